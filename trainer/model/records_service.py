# SPDX-License-Identifier: Apache-2.0
"""The records of the user's module in a reader process.

The module is imported again, and `data(split)` called again, as each worker does it: nothing of a reader has
to be pickled. Before each batch the random numbers of Python, NumPy and, for `feed`, TensorFlow are seeded
from the job's seed, the step and its first record. So an augmentation in `feed` gives the same values for any
number of reader processes, and different ones in each epoch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from edl.config.job import Data
from edl.contract.order import mix
from edl.data.same import digest_of_reader
from edl.errors import DataError
from edl.trainer.model import user_model
from edl.trainer.records.batches import Batch
from edl.trainer.records.records import Records
from edl.trainer.records.step_part import StepPart

SEEDS = 1 << 32  # NumPy takes no larger seed


class RecordsService:
    """Reads and feeds the records of a split.

    Args:
        module, source, functions: the user's module, as in the values of the job, in `model`.
        data: the values in `data`, which may name records and say how many are held out.
        split: its name.
        seed, shuffle, lenient: see `Records`.
        count, digest: the number of records that the worker has found, and their digest; empty if they
            have none.
        classes: the classes of the training's labels, as the worker knows them.

    Raises:
        DataError: the records are not those that the worker has found.
    """

    def __init__(
        self,
        module: str,
        source: str,
        data: dict[str, Any],
        split: str,
        seed: int,
        shuffle: bool,
        lenient: bool,
        count: int,
        digest: str = "",
        functions: dict[str, str] | None = None,
        classes: Sequence[str] | None = None,
    ):
        keras.utils.set_random_seed(seed)
        loaded = user_model.load(module, source, Data.model_validate(data), seed, functions=functions)
        loaded.labels.classes = None if classes is None else tuple(classes)
        reader = loaded.reader(split)
        found = len(reader) if reader is not None else 0
        if reader is None or found != count:
            raise DataError(
                f"{loaded.name}: {loaded.source(split)} has {found} records in a reader process, and had "
                f"{count} in its worker; it must return the same records each time"
            )
        if digest_of_reader(reader) != digest:
            raise DataError(
                f"{loaded.name}: {loaded.source(split)} has other records in a reader process than in its "
                "worker; it must return the same records each time"
            )
        self._seed, self._feeds = mix(seed), loaded.feed_of(split) is not None
        self._records = Records(
            reader,
            loaded.feed_of(split),
            loaded.name,
            seed=seed if split == "train" else 0,  # as in an evaluation that the worker reads by itself
            shuffle=shuffle,
            lenient=lenient,
            transform=loaded.transform_of(split),
        )

    def batch(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Batch:
        """Read and feed a batch.

        Raises:
            DataError, or what the reader or `feed` raises.
        """
        self._begin(step)
        return self._records.batch_of(indices, shards, step.part, step.epoch)

    def pick(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Any:
        """Read raw records of a batch, in the order of `indices`."""
        self._begin(step)
        return self._records.pick(indices, shards, step.part)

    def feed(self, step: StepPart, indices: np.ndarray, back: np.ndarray, *pieces: Any) -> Batch:
        """Feed the raw records that several processes have picked."""
        self._begin(step)
        return self._records.feed(indices, back, step.epoch, pieces)

    def good(self, indices: np.ndarray, epoch: int) -> Batch:
        """Read and feed records, without those that are bad if the job allows bad records."""
        return self._records.batch_without_bad(indices, epoch)

    def alone(self, start: int, stop: int) -> None:
        """Read and feed the records [start, stop), to see whether this process survives it."""
        with contextlib.suppress(Exception):  # a record that raises is found where its batch is made
            self._records.consecutive(start, stop)

    def _begin(self, step: StepPart) -> None:
        if step.layout != self._records.layout:
            self._records.lay_out(step.layout)
        seed = mix(self._seed ^ mix(step.start) ^ step.part.rank) % SEEDS
        if self._feeds:
            keras.utils.set_random_seed(seed)
        else:
            # TensorFlow's seed is for `feed` only. Setting it makes TensorFlow prepare each tf.function, such
            # as `transform`, again, which can take longer than the batch.
            random.seed(seed)
            np.random.seed(seed)
