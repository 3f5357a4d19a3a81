# SPDX-License-Identifier: Apache-2.0
"""The faulty counting model over files (tests/support/jobs/counting_files.py writes them).

EDL_COUNTING_FILES is their directory, and EDL_COUNTING_FORMAT is tfrecord, csv or images.
"""

import os
from typing import Any

import numpy as np
from counting_faulty import feed as plain_feed  # a worker finds what lies beside the model's file
from counting_faulty import model

import edl
from edl.data.formats import csv_file
from tests.support.jobs.counting_files import CLASSES, numbers_of

__all__ = ["data", "feed", "model"]

FORMAT = os.environ.get("EDL_COUNTING_FORMAT", "tfrecord")
csv_file.IN_MEMORY = 1024  # bytes: all files are larger, so each read parses its lines


def data(split: str) -> edl.Reader | None:
    """Return the records 0, 1, ... for training."""
    if split != "train":
        return None
    files = os.environ["EDL_COUNTING_FILES"]
    if FORMAT == "images":
        return edl.images(files)
    return edl.csv(files) if FORMAT == "csv" else edl.tfrecord(files, {"number": "int64"})


def feed(records: Any) -> tuple[np.ndarray, np.ndarray]:
    if FORMAT == "images":
        images, classes = records
        numbers = numbers_of(images)
        assert (classes == numbers % CLASSES).all(), "an image has the label of another"
    else:
        numbers = records["number"]
    return plain_feed((numbers.astype(np.int32),))
