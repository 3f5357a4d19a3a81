"""Readers: where a job's records come from, one module a format.

base                what a reader is
in_memory           arrays
columns             pyarrow's columns as arrays
npz_file, csv_file  files that are read into memory
parquet_file        files of which one group of rows is in memory
criteo              the public click logs, as text (lines) or Parquet; one block is in memory
"""

from edl.data.base import RandomAccess, Reader
from edl.data.criteo import criteo
from edl.data.csv_file import csv
from edl.data.in_memory import arrays
from edl.data.npz_file import npz
from edl.data.parquet_file import parquet

__all__ = ["RandomAccess", "Reader", "arrays", "criteo", "csv", "npz", "parquet"]
