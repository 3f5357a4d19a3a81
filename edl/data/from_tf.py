# SPDX-License-Identifier: Apache-2.0
"""A reader over a tf.data pipeline whose records fit in memory."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from edl.data.base import CONVERT, DOCS
from edl.data.in_memory import Arrays
from edl.data.nest import leaves, map_leaves
from edl.errors import DataError

MIB = 1 << 20


def from_tf(dataset: Any, most_mebibytes: float = 2048) -> Arrays:
    """A reader over the records of a `tf.data.Dataset`, which are read into memory once, at the start.

    Each worker reads them by itself, so the pipeline must return the same records in the same order each
    time: no `shuffle` without `reshuffle_each_iteration=False` and a seed, no random augmentation. The job
    shuffles the records itself.

    Args:
        dataset: a dataset as for Keras' `fit`: each element is a batch of features, (features, labels) or
            (features, labels, weights). For a dataset of single records, pass `dataset.batch(1024)`.
        most_mebibytes: limit of the memory that the records take in each worker.

    Raises:
        DataError: the records take more memory, the order differs between two passes, a batch is ragged, or
            the dataset has no end or no records.
    """
    if getattr(dataset, "cardinality", None) is None:
        raise DataError(f"from_tf: expected a tf.data.Dataset, not a {type(dataset).__name__}")
    if int(dataset.cardinality()) == -1:
        raise DataError("from_tf: the dataset has no end (repeat()); give it without repeat, or with take(n)")
    batches: list[Any] = []
    size = 0
    for batch in dataset.as_numpy_iterator():
        for path, leaf in leaves(batch):
            if not isinstance(leaf, np.ndarray) or not leaf.shape:
                raise DataError(
                    f"from_tf: batch {len(batches)}: {path or 'the batch'} is a {type(leaf).__name__}; "
                    "expected an array with an entry for each record (dataset.batch(1024) makes batches of "
                    "single records)"
                )
            size += leaf.nbytes
        if size > most_mebibytes * MIB:
            raise DataError(
                f"from_tf: the records take more than {most_mebibytes:g} MiB of memory (after "
                f"{len(batches) + 1} batches); raise most_mebibytes, or write them to a file once: "
                f"{CONVERT} ({DOCS}#streams)"
            )
        batches.append(batch)
    if not batches:
        raise DataError("from_tf: the dataset has no records")
    for again in islice(dataset.as_numpy_iterator(), 1):
        same = [
            np.array_equal(a, b) for (_, a), (_, b) in zip(leaves(again), leaves(batches[0]), strict=True)
        ]
        if not all(same):
            raise DataError(
                "from_tf: the dataset gives other records the second time it is read (shuffle, or random "
                "augmentation); workers could not agree on them. Leave shuffle out: the job shuffles by "
                "itself"
            )
    try:
        return Arrays(map_leaves(lambda *arrays: np.concatenate(arrays), *batches), "from_tf")
    except ValueError as error:
        raise DataError(f"from_tf: batches do not go together: {error}") from error
