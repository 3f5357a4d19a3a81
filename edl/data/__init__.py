# SPDX-License-Identifier: Apache-2.0
"""Readers: sources of a job's records, one module per format.

base                the interface of readers
dataset             a reader over any indexable data
in_memory           arrays, and nests of them (nest), converted without a change of values (exact)
tables, columns     pandas, Polars and Arrow; pyarrow's columns as arrays
indexed, batched    datasets of records, and of batches
selected            columns as features, labels and weights
split               a reader's records divided into training, test and validation
from_tf             a tf.data pipeline, read into memory
conversion          records of any source, written to an ArrayRecord file with their structure
files               files by address: paths, lists, globs, directories, object stores
formats, opening    the formats by name, and a reader for any address
joined, index_file  the records of several files as one; indexes that are built once
partitions          directories whose names or logs say more than their files
place               the file and the number there of a record, for messages
csv_file            text of columns (csv_text); large files have an index (csv_scan), many small ones are
                    parsed at once (csv_together)
parquet_file        files that are read one row group at a time
tfrecord_file, arrayrecord_file, recordio_file
                    files of serialized examples, which TensorFlow parses (examples)
image_files         images, decoded by Pillow
npy_file            arrays of NumPy (record_array); features with labels (zipped)
text_file, hdf5_file  lines of text; datasets of HDF5
"""

from edl.data.arrayrecord_file import arrayrecord
from edl.data.base import RandomAccess, Reader
from edl.data.csv_file import csv
from edl.data.dataset import dataset
from edl.data.formats import open_files
from edl.data.from_tf import from_tf
from edl.data.hdf5_file import hdf5
from edl.data.image_files import images
from edl.data.in_memory import arrays
from edl.data.npy_file import npy
from edl.data.parquet_file import parquet
from edl.data.recordio_file import recordio
from edl.data.split import split
from edl.data.text_file import text
from edl.data.tfrecord_file import tfrecord

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
    "recordio",
    "split",
    "text",
    "tfrecord",
]
