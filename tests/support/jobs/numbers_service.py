# SPDX-License-Identifier: Apache-2.0
"""Records of a reader process without TensorFlow: record i is the number i. Some end the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.errors import DataError
from edl.trainer.records.batches import BadRecord, Batch
from edl.trainer.records.step_part import StepPart


class Numbers:
    """Reads numbers.

    Args:
        seed, shuffle: unused; the worker computes the order.
        read: a file to which the number of each block that is read is appended; empty for none.
        deadly: the records that end their process, and how: "exit", "crash", "kill", "hang".
        raising: records whose `feed` raises.
        lenient: leave records of `raising` out.
        slow: seconds that a batch takes.
    """

    def __init__(
        self,
        seed: int = 0,
        shuffle: bool = False,
        read: str = "",
        deadly: dict[str, str] | None = None,
        raising: Sequence[int] = (),
        lenient: bool = False,
        slow: float = 0.0,
    ):
        self._read, self._slow = read, slow
        self._deadly = {int(record): how for record, how in (deadly or {}).items()}
        self._raising, self._lenient = set(raising), lenient
        self._blocks: dict[int, int] = {}  # by shard, as in `Records`

    def batch(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Batch:
        return self._fed(indices, indices)

    def pick(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Any:
        size = step.layout.block
        for index, shard in zip(indices.tolist(), shards.tolist(), strict=True):
            if self._blocks.get(shard) != index // size:
                self._blocks[shard] = index // size
                self.alone(index // size * size, (index // size + 1) * size)
                with open(self._read, "a", encoding="utf-8") as file:
                    file.write(f"{index // size}\n")
        return indices

    def feed(self, step: StepPart, indices: np.ndarray, back: np.ndarray, *pieces: Any) -> Batch:
        return self._fed(np.concatenate(pieces)[back], indices)

    def good(self, indices: np.ndarray, epoch: int) -> Batch:
        return self._fed(indices, indices)

    def alone(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            self._end(index)

    def _fed(self, records: np.ndarray, indices: np.ndarray) -> Batch:
        time.sleep(self._slow)
        for index in indices.tolist():
            self._end(index)
        bad = [index for index in indices.tolist() if index in self._raising]
        if bad and not self._lenient:
            raise DataError(f"record {bad[0]} is bad")
        good = ~np.isin(indices, bad)
        told = tuple(BadRecord(index, "it is bad") for index in bad)
        x = records[good].astype(np.float32)
        return Batch(indices[good], x, None, None, x.nbytes, told)

    def _end(self, index: int) -> None:
        match self._deadly.get(index):
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(3600)


class Unopened:
    """Data that cannot be opened."""

    def __init__(self) -> None:
        raise FileNotFoundError("there is no file numbers.bin")
