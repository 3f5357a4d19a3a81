# SPDX-License-Identifier: Apache-2.0
"""The methods that a worker calls in its reader processes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from edl.trainer.records.batches import Batch
from edl.trainer.records.step_part import StepPart


class Service(Protocol):
    """The methods that are called in reader processes."""

    def batch(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Batch:
        """Read and feed the records at `indices`, which lie in these shards."""
        ...

    def pick(self, step: StepPart, indices: np.ndarray, shards: np.ndarray) -> Any:
        """Read raw records of a batch, in the order of `indices`."""
        ...

    def feed(self, step: StepPart, indices: np.ndarray, back: np.ndarray, *pieces: Any) -> Batch:
        """Feed raw records that several processes have picked; `back` has the place of each in the pieces."""
        ...

    def good(self, indices: np.ndarray, epoch: int) -> Batch:
        """Read and feed records, without those that are bad if the job allows bad records."""
        ...

    def alone(self, start: int, stop: int) -> None:
        """Read and feed the records [start, stop), to see whether this process survives it.

        Errors of these records are ignored here.
        """
        ...
