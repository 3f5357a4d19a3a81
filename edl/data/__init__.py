# SPDX-License-Identifier: Apache-2.0
"""Readers: sources of a job's records.

base                the interface of readers
exact, nest, place  values that are converted without a change, nests of arrays, and the places of records
same                readers compared by their records
objects             arrays, tables, datasets and pipelines as readers
files               files by address, and the records of several files as one
formats             one module per format of files, and a reader for any address
conversion          records of any source, written to an ArrayRecord file with their structure
description         what is in files, for `edl data inspect`
"""

from edl.data.base import RandomAccess, Reader
from edl.data.formats.arrayrecord_file import arrayrecord
from edl.data.formats.by_name import open_files
from edl.data.formats.csv_file import csv
from edl.data.formats.hdf5_file import hdf5
from edl.data.formats.image_files import images
from edl.data.formats.npy_file import npy
from edl.data.formats.parquet_file import parquet
from edl.data.formats.text_file import text
from edl.data.formats.tfrecord_file import tfrecord
from edl.data.objects.dataset import dataset
from edl.data.objects.from_tf import from_tf
from edl.data.objects.in_memory import arrays
from edl.data.objects.split import split

__all__ = [
    "RandomAccess",
    "Reader",
    "arrayrecord",
    "arrays",
    "csv",
    "dataset",
    "from_tf",
    "hdf5",
    "images",
    "npy",
    "open_files",
    "parquet",
    "split",
    "text",
    "tfrecord",
]
