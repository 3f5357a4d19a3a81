# SPDX-License-Identifier: Apache-2.0
"""A ring in this process, and Keras beside it: the same records in the same order, step for step.

One learner plays all ranks: what a rank contributes changes nothing, so the ranks are threads that call
the same learner, and meet where a step sums. Then the sum of their vectors is applied, once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch
from edl.trainer.step.learner import KerasLearner

STEPS = ((0, 12), (12, 23), (23, 30))  # of 30 records
# For rings of 1, 2 and 3: where the shards of a step's records end. Equal ends: a rank without records.
RINGS = {1: (0.0, 1.0), 2: (0.0, 0.4, 1.0), 3: (0.0, 0.1, 0.7, 1.0)}
IDLE = {3: (0.0, 0.35, 0.35, 1.0)}  # in the second step


@dataclass(frozen=True)
class Case:
    """A model, and the data that it is trained on."""

    build: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, Any, Any]]  # features, labels, weights or None, of 30 records
    tolerance: float = 1e-6
    told: bool = True  # whether the reported loss is Keras' own; that of a sum is reported for each record
    class_weight: dict[int, float] | None = None  # given to Keras as such, to the ring as weights
    # What feed() makes of the records of a batch.
    padded: Callable[[Any], Any] = field(default=lambda part: part)


class Meeting:
    """Where ranks meet: the sum of what all of them bring. Which rank brings what does not matter."""

    def __init__(self) -> None:
        self.size = 1
        self.totals: list[np.ndarray] = []  # of all meetings
        self._here: list[np.ndarray] = []
        self._changed = threading.Condition()

    def reduce(self, vector: Any) -> np.ndarray:
        with self._changed:
            mine = len(self.totals)
            self._here.append(np.array(vector, np.float32))
            if len(self._here) == self.size:
                with np.errstate(invalid="ignore"):  # too large a scale is a part of a test
                    self.totals.append(np.sum(self._here, axis=0))
                self._here = []
                self._changed.notify_all()
            met = self._changed.wait_for(lambda: len(self.totals) > mine, timeout=30)
            assert met, "not all ranks have met"
            return self.totals[mine]


def batch(case: Case, start: int, stop: int) -> Batch:
    """The records [start, stop), as feed() would give them to a worker."""
    features, labels, weights = case.data()

    def of(tree: Any) -> Any:
        return keras.tree.map_structure(lambda a: None if a is None else arrays.cut(a, start, stop), tree)

    x, y, w = case.padded((of(features), of(labels), of(weights)))
    if case.class_weight is not None:
        w = np.array([case.class_weight[int(label)] for label in np.ravel(y)], np.float32)
    return Batch(np.arange(start, stop), x, y, w)


def learner_of(case: Case, meeting: Meeting, **options: Any) -> KerasLearner:
    others = [batch(case, i, i + 1) for i in range(3)]
    return KerasLearner(case.build(), batch(case, 0, 5), others, reduce=meeting.reduce, **options)


def ring_step(
    learner: KerasLearner,
    meeting: Meeting,
    parts: Sequence[Batch | None],
    step: int = 0,
    took: Callable[[Commit], None] = lambda commit: None,
    bad: int = 0,
) -> control.Agreed:
    """One step of a ring with a rank for each part, in this process; `took` gets it, as servers do.

    `bad` records of the step were left out of these parts, which the other ranks cannot know beforehand.

    Ranks of odd number have their part made ready ahead, as a reading thread does it.
    """
    meeting.size = len(parts)
    parts = [learner.ready(part) if part and rank % 2 else part for rank, part in enumerate(parts)]

    records = bad + sum(len(part) for part in parts if part is not None)

    def contribute(rank: int) -> control.StepResult:
        return learner.allreduce_step(parts[rank], control.write(step), step, rank, records)

    with ThreadPoolExecutor(len(parts)) as ranks:
        sums = list(ranks.map(contribute, range(len(parts))))
    assert len({str(s.agreed) for s in sums}) == 1
    took(learner.commit(step, sums[0]))
    learner.apply(sums[0])
    return sums[0].agreed


def parts_of(case: Case, size: int, start: int, stop: int, nth: int = 0) -> list[Batch | None]:
    ends = IDLE.get(size, RINGS[size]) if nth == 1 else RINGS[size]
    cuts = [start + round(end * (stop - start)) for end in ends]
    return [batch(case, a, b) if a < b else None for a, b in itertools.pairwise(cuts)]


def differences(case: Case) -> dict[int, dict[str, float]]:
    """How far the weights of rings of 1, 2 and 3 are from Keras' after the steps, by ring and variable."""
    meeting = Meeting()
    reference = case.build()
    learner = learner_of(case, meeting)
    first = batch(case, 0, 5)
    if not reference.built or len(reference.weights) != len(learner.model.weights):
        reference(keras.tree.map_structure(arrays.tensor, keras.tree.map_structure(arrays.standard, first.x)))
    reference.set_weights(learner.model.get_weights())
    reference.optimizer.build(reference.trainable_variables)  # with these weights: one optimizer copies them
    losses = [_keras_step(case, reference, *ends) for ends in STEPS]
    reference.optimizer.finalize_variable_values(reference.trainable_variables)
    expected = {v.path: v.numpy() for v in _compared(reference)}
    before = learner.state()
    found = {}
    for size in RINGS:
        learner.load(before)
        for nth, (start, stop) in enumerate(STEPS):
            agreed = ring_step(learner, meeting, parts_of(case, size, start, stop, nth), nth)
            assert agreed.records == stop - start
            assert not agreed.nonfinite
            if case.told:
                assert agreed.loss == pytest.approx(losses[nth], rel=max(1e-4, 10 * case.tolerance), abs=1e-5)
        learner.finish_training()
        got = [v.numpy() for v in _compared(learner.model)]
        found[size] = {
            path: float(
                np.max(np.abs(np.float64(a) - np.float64(b)), initial=0.0)
                / max(1.0, np.max(np.abs(np.float64(b)), initial=0.0))
            )
            for (path, b), a in zip(expected.items(), got, strict=True)
        }
    return found


def _compared(model: keras.Model) -> list[keras.Variable]:
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in model.variables if id(v) not in metrics and v.name != "seed_generator_state"]


def _keras_step(case: Case, model: keras.Model, start: int, stop: int) -> float:
    whole = batch(case, start, stop)
    weights = (
        {"sample_weight": whole.weights} if case.class_weight is None else {"class_weight": case.class_weight}
    )
    x, y = (keras.tree.map_structure(_given, tree) for tree in (whole.x, whole.y))
    told = model.train_on_batch(x, y, return_dict=True, **weights)
    return float(told["loss"])


def _given(array: Any) -> Any:
    return array if array is None else arrays.tensor(arrays.standard(array))


def assert_same(case: Case) -> None:
    for size, by_path in differences(case).items():
        worst = max(by_path, key=lambda path: by_path[path])
        assert by_path[worst] <= case.tolerance, f"ring of {size}: {worst} differs by {by_path[worst]:.2g}"
