# SPDX-License-Identifier: Apache-2.0
"""The formats of files by name, registered for `opening`."""

from __future__ import annotations

from edl import integrations
from edl.data.formats import (
    arrayrecord_file,
    csv_file,
    hdf5_file,
    image_files,
    npy_file,
    parquet_file,
    text_file,
    tfrecord_file,
)
from edl.data.formats.opening import FORMATS, Format, format_of, open_files

__all__ = ["FORMATS", "format_of", "open_files"]

FORMATS.update(
    (format.name, format)
    for format in (
        Format("csv", csv_file.csv, csv_file.SUFFIXES),
        Format("parquet", parquet_file.parquet, parquet_file.SUFFIXES),
        Format("tfrecord", tfrecord_file.tfrecord, tfrecord_file.SUFFIXES),
        Format("images", image_files.images, image_files.SUFFIXES),
        Format("npy", npy_file.npy, npy_file.SUFFIXES),
        Format("text", text_file.text, text_file.SUFFIXES),
        Format("hdf5", hdf5_file.hdf5, hdf5_file.SUFFIXES),
        Format("arrayrecord", arrayrecord_file.arrayrecord, arrayrecord_file.SUFFIXES),
    )
)
FORMATS.update(integrations.installed(integrations.FORMATS))
