# SPDX-License-Identifier: Apache-2.0
"""Jobs whose callbacks are called, over rings of one and of two, and by `fit`."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import callbacks as k

from edl import config
from edl.config import values
from edl.trainer.agreement.epochs import CallbackUpdate, Epochs, columns
from edl.trainer.callbacks.callbacks import Callbacks
from edl.trainer.callbacks.rules import accepted
from tests.process.keras.models import X, Y, dense, plain
from tests.process.keras.rings import Case, Meeting, learner_of, parts_of, ring_step

EPOCHS, BATCH = 6, 12
STEPS = ((0, 12), (12, 24), (24, 30))
HELD_OUT = (X[::3] + 0.1, -Y[::3])  # so that it gets worse
CONFIG = config.parse(values.defaults())


def model() -> keras.Model:
    return dense(keras.optimizers.SGD(0.1, momentum=0.5), metrics=["mae"])


def used(*given: k.Callback) -> list[k.Callback]:
    return accepted(list(given), CONFIG, lambda text: None)


class Ours:
    """A job of one learner, which plays all ranks; the worker with the callbacks may be replaced."""

    def __init__(
        self,
        make: Callable[[], list[k.Callback]],
        size: int,
        build: Callable[[], keras.Model] = model,
    ):
        self.make, self.build = make, build
        self.case, self.meeting = Case(build, plain), Meeting()
        self.learner = learner_of(self.case, self.meeting)
        self.first = self.learner.state()
        self.begin(size)

    def begin(self, size: int) -> None:
        """Another job, with the same first weights."""
        self.learner.load(self.first)
        self.size, self.epochs, self.turns, self.task = size, Epochs(), 0, EPOCHS
        self.here = self.worker()

    def worker(self) -> Callbacks:
        return Callbacks(used(*self.make()), self.learner, len(STEPS), self.task)

    def resume(self, epochs: Epochs, task: int) -> None:
        """Let a new worker resume from this history, with this number of epochs."""
        self.epochs, self.task = epochs.going_on(task, self.task), task
        self.here = self.worker()

    @property
    def whole(self) -> int:
        return len(self.epochs.history)

    def turn(self) -> None:
        """Between two epochs, as far as one is due."""
        more = self.whole < self.epochs.limit(self.task)
        if not self.epochs.due(self.whole, more):
            return
        self.turns += 1
        before = self.learner.digest()
        turn = self.here.run(self.epochs, self.whole, self.task, {"ring_size": float(self.size)})
        assert self.learner.digest() == before, "a turn changes nothing"
        told = CallbackUpdate.unpack(turn.pack())  # as the other ranks get it
        assert told.after == turn.after
        assert {i: v.tobytes() for i, v in told.changed.items()} == {
            i: v.tobytes() for i, v in turn.changed.items()
        }
        self.learner.change(turn.changed)
        self.epochs = turn.after

    def train(self, between: Callable[[Ours], None] = lambda job: None) -> Ours:
        """All epochs; `between` is done before each turn."""
        self.turn()
        while self.whole < self.epochs.limit(self.task):
            for nth, ends in enumerate(STEPS):
                step = self.whole * len(STEPS) + nth
                agreed = ring_step(self.learner, self.meeting, parts_of(self.case, self.size, *ends), step)
                self.epochs = self.epochs.after(agreed.loss, agreed.records)
            self.epochs = self.epochs.whole(self.learner.take_metrics())
            held = self.learner.model.evaluate(*HELD_OUT, batch_size=BATCH, verbose=0, return_dict=True)
            self.learner.model.reset_metrics()
            self.epochs = self.epochs.evaluated(held)
            between(self)
            self.turn()
        self.learner.finish_training()
        self.here.end(self.epochs)
        return self

    @property
    def weights(self) -> list[np.ndarray]:
        return list(self.learner.model.get_weights())


def fitted(like: Ours) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """What `fit` makes of a model with the same first weights: its history, and the weights."""
    reference = like.build()
    reference.set_weights(like.weights)
    history = reference.fit(
        X,
        Y,
        batch_size=BATCH,
        shuffle=False,
        epochs=EPOCHS,
        validation_data=HELD_OUT,
        validation_batch_size=BATCH,
        callbacks=like.make(),
        verbose=0,
    )
    return dict(history.history), list(reference.get_weights())


def same(job: Ours, expected: tuple[dict[str, list[float]], list[np.ndarray]]) -> None:
    history, weights = expected
    found = columns(job.epochs.history)
    assert found.keys() == history.keys()
    for name, column in history.items():
        assert found[name] == pytest.approx(column, rel=2e-5, abs=1e-6), name
    for ours, theirs in zip(job.weights, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
