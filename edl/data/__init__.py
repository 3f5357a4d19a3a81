"""Readers: sources of a job's records, one module per format.

base                the interface of readers
dataset             a reader over any indexable data
in_memory           arrays, and nests of them (nest)
tables, columns     pandas, Polars and Arrow; pyarrow's columns as arrays
indexed, batched    datasets of records, and of batches
selected            columns as features, labels and weights
split               a reader's records divided into training, test and validation
from_tf             a tf.data pipeline, read into memory
npz_file, csv_file  files that are read into memory
parquet_file        files that are read one row group at a time
criteo              the public click logs, as text (lines) or Parquet; one block is in memory
"""

from edl.data.base import RandomAccess, Reader
from edl.data.criteo import criteo
from edl.data.csv_file import csv
from edl.data.dataset import dataset
from edl.data.from_tf import from_tf
from edl.data.in_memory import arrays
from edl.data.npz_file import npz
from edl.data.parquet_file import parquet
from edl.data.split import split

__all__ = [
    "RandomAccess",
    "Reader",
    "arrays",
    "criteo",
    "csv",
    "dataset",
    "from_tf",
    "npz",
    "parquet",
    "split",
]
