"""Readers: where a job's records come from, one module a format.

base                what a reader is
in_memory           arrays
npz_file, csv_file  files that are read into memory
"""

from edl.data.base import RandomAccess, Reader
from edl.data.csv_file import csv
from edl.data.in_memory import arrays
from edl.data.npz_file import npz

__all__ = ["RandomAccess", "Reader", "arrays", "csv", "npz"]
