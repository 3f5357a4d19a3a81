"""The model of the tests that need no TensorFlow: each weight counts how often its position was applied.

After a job every weight must be one, on every worker that has the final state; so the weights
themselves say whether a record was lost or counted twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from edl.contract.layout import Layout, Part
from trainer import control
from trainer.data import BadRecord, Batch


class CountingLearner:
    """The two halves of a step in NumPy.

    Args:
        positions: of the whole job; one weight each.
        works: called in each forward pass, where the time of a step is spent.
    """

    def __init__(self, positions: int, works: Callable[[], None] = lambda: None):
        self._variables = np.zeros(positions + 1, np.int16)  # the last one counts the updates
        self._works = works

    @property
    def weights(self) -> np.ndarray:
        return self._variables[:-1]

    @property
    def updates(self) -> int:
        return int(self._variables[-1])

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> np.ndarray:
        self._works()
        vector = self.nothing(contribution)
        vector[batch.x] = 1
        told = vector[len(self._variables) - 1 :]
        told[control.RECORDS] = len(batch)
        told[control.LOSS] = 0.5 * len(batch)
        return vector

    def nothing(self, contribution: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(len(self._variables) - 1, np.float32), contribution])

    def agreed(self, total: np.ndarray) -> control.Agreed:
        return control.read(total[len(self._variables) - 1 :])

    def update(self, total: np.ndarray) -> None:
        self._variables[:-1] += total[: len(self._variables) - 1].astype(np.int16)
        self._variables[-1] += 1

    def take_metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> np.ndarray:
        return self._variables.view(np.uint8)

    def load(self, state: np.ndarray) -> None:
        assert len(state) == self._variables.nbytes, "the state of another model"
        self._variables = state.view(np.int16).copy()

    def fingerprint(self) -> str:
        return "counting"

    def digest(self) -> str:
        return hashlib.sha256(self._variables.tobytes()).hexdigest()


class Positions:
    """A source whose records are their positions.

    Args:
        bad: records of an epoch that cannot be read.
    """

    def __init__(self, epoch_size: int, bad: Collection[int] = ()):
        self.layout = Layout(epoch_size)
        self.bad = bad

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout

    def batch(self, start: int, stop: int, part: Part) -> Batch | None:
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
    """Reads in the thread that asks."""

    def submit(self, read: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(read(*arguments, **named))
        return done
