# SPDX-License-Identifier: Apache-2.0
"""The counting model, for tests without TensorFlow: each weight counts how often its position was applied.

After a job every weight must be one, on every worker that has the final state. So the weights themselves show
whether a record was lost or counted twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from edl.contract.layout import Layout, StepSlice
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records.batches import BadRecord, Batch, Following, nothing_follows
from edl.trainer.ring.base import Ring


class CountingLearner:
    """The two halves of a step in NumPy.

    Args:
        positions: the number of positions of the whole job; each has one weight.
        works: called in each forward pass, where the time of a step is spent.
        pieces: the number of sums of a step; the control vector is at the end of the last sum.
        clock: returns seconds.
    """

    def __init__(
        self,
        positions: int,
        works: Callable[[], None] = lambda: None,
        pieces: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._variables = np.zeros(positions + 2, np.int16)  # then the updates, and what `flip` changes
        self._works, self._pieces, self._clock = works, pieces, clock
        self._reduce: Callable[[Any], Any] = lambda vector: vector

    def joins(self, ring: Ring) -> None:
        """Make all further sums over this ring."""
        self._reduce = ring.reduce

    @property
    def weights(self) -> np.ndarray:
        return self._variables[:-2]

    @property
    def updates(self) -> int:
        return int(self._variables[-2])

    def flip(self) -> None:
        """Flip a bit of the state that no step reads, like a memory error."""
        self._variables[-1] ^= 1

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        vector = self.nothing(contribution) if batch is None else self.gradients(batch, contribution)
        ready_at = self._clock()
        total = np.concatenate([self._reduce(piece) for piece in np.array_split(vector, self._pieces)])
        ours, agreed = (control.read(v[len(self.weights) :]) for v in (vector, total))
        return control.StepResult(agreed, ours.nonfinite, self._clock() - ready_at, total.nbytes, total)

    def gradients(self, batch: Batch, contribution: np.ndarray) -> np.ndarray:
        self._works()
        vector = self.nothing(contribution)
        vector[batch.x] = 1
        told = vector[len(self.weights) :]
        told[control.RECORDS] = len(batch)
        told[control.LOSS] = 0.5 * len(batch)
        return vector

    def nothing(self, contribution: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(len(self.weights), np.float32), contribution])

    def apply(self, sums: control.StepResult) -> None:
        self._variables[:-2] += sums.given[: len(self.weights)].astype(np.int16)
        self._variables[-2] += 1

    has_loss = True

    def take_metrics(self) -> dict[str, Value]:
        return {}

    tables: tuple[Table, ...] = ()

    def commit(self, step: int, sums: control.StepResult) -> Commit:
        skipped = sums.agreed.nonfinite or not sums.agreed.records
        return Commit(step, skipped, 1.0, 0.0, self.updates)

    can_catch_up = True

    @property
    def nbytes(self) -> int:
        return self._variables.nbytes

    def variable_specs(self) -> list[VariableSpec]:
        return [VariableSpec("counts", "int16", (len(self._variables),))]

    def parts(self) -> list[np.ndarray]:
        return [self.state().copy()]

    def prepared(self, parts: list[np.ndarray]) -> np.ndarray:
        (part,) = parts
        return part

    def take_over(self, values: np.ndarray) -> None:
        self.load(values)

    def state(self) -> np.ndarray:
        return self._variables.view(np.uint8)

    def load(self, state: np.ndarray) -> None:
        assert len(state) == self._variables.nbytes, "the state of another model"
        self._variables = state.view(np.int16).copy()

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        for value in values.values():
            self.load(value)

    def fingerprint(self) -> str:
        return "counting"

    def digest(self) -> str:
        return hashlib.sha256(self._variables.tobytes()).hexdigest()


class CountingMetrics:
    """Metrics that count how often each record of the held-out data was evaluated.

    Args:
        works: called in each forward pass.
    """

    all_count = True

    def __init__(self, records: int, works: Callable[[], None] = lambda: None):
        self.size, self._works = records, works

    def added(self, batch: Batch, following: Callable[[], Batch | None] = lambda: None) -> np.ndarray:
        self._works()
        values = np.zeros(self.size, np.float32)
        values[batch.x] = 1
        return values

    def results(self, totals: np.ndarray) -> dict[str, Value]:
        return {"least": float(totals.min()), "most": float(totals.max())}


class Positions:
    """A data source whose records are their own positions.

    Args:
        bad: the records of an epoch that cannot be read.
    """

    def __init__(self, epoch_size: int, bad: Collection[int] = ()):
        self.layout = Layout(epoch_size)
        self.bad = bad

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        size = self.layout.records
        assert start // size == (stop - 1) // size, "a batch of two epochs"
        first, last = part.of(stop - start)
        positions = np.arange(start + first, start + last)
        if not len(positions):
            return None
        wrong = np.isin(positions % size, list(self.bad))
        bad = tuple(BadRecord(index, "it is bad") for index in (positions % size)[wrong].tolist())
        positions = positions[~wrong]
        return Batch(positions % size, positions, None, None, bad=bad)


class AtOnce(Executor):
    """An executor that runs each read at once, in the calling thread."""

    def submit(self, read: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(read(*arguments, **named))
        except Exception as error:  # the caller of result() gets it
            done.set_exception(error)
        return done
