# SPDX-License-Identifier: Apache-2.0
"""What callbacks change: variables that no model lists, and what cannot be changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as k

from edl.errors import ModelError
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.callback_jobs import EPOCHS, Ours, fitted, model, same
from tests.process.keras.models import dense, plain
from tests.process.keras.rings import Case, Meeting, learner_of


def compiles(job_model: keras.Model) -> None:
    job_model.compile("adam", "mae")


def freezes(job_model: keras.Model) -> None:
    job_model.layers[1].trainable = False


def tunes(job_model: keras.Model) -> None:
    job_model.optimizer.momentum = 0.9


@pytest.mark.parametrize("change", [compiles, freezes, tunes])
def test_what_is_in_the_graph_cannot_be_changed(change: Callable[[keras.Model], None]) -> None:
    job = Ours(lambda: [k.LambdaCallback(on_epoch_end=lambda *_: change(job.learner.model))], 1)
    with pytest.raises(ModelError, match="has compiled the model anew, or has changed what is trained"):
        job.train()


@cache
def beta() -> keras.Variable:
    """A variable of the loss, which no layer has. (Made late: it initializes TensorFlow.)"""
    return keras.Variable(0.0, trainable=False, name="beta")


def annealed(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), -1) + beta() * keras.ops.mean(abs(y_pred), -1)


class Scale(keras.layers.Layer):
    def __init__(self, read_by: str):
        super().__init__()
        self.factor, self.read_by = tf.Variable(0.0, trainable=False, name="factor"), read_by

    def call(self, x: Any) -> Any:
        if self.read_by == "numpy":
            factor = tf.numpy_function(lambda: self.factor.numpy(), [], tf.float32)
            return x * (1 + tf.ensure_shape(factor, []))
        return x * (1 + self.factor)


class Anneals(k.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        beta().assign(0.1 * epoch)


class Raises(k.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if isinstance(layer, Scale):
                layer.factor.assign(0.1 * epoch)


def with_beta() -> keras.Model:
    beta()
    return dense(loss=annealed, metrics=["mae"])


UNLISTED: dict[str, tuple[type[k.Callback], Callable[[], keras.Model]]] = {
    "a keras.Variable of the loss": (Anneals, with_beta),
    "a tf.Variable of a layer": (Raises, lambda: dense(layers=[Scale("graph")], metrics=["mae"])),
    "eager": (Raises, lambda: dense(layers=[Scale("eager")], metrics=["mae"], run_eagerly=True)),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_a_variable_that_no_model_lists_changes_on_all_workers(name: str) -> None:
    callback, build = UNLISTED[name]
    job = Ours(lambda: [callback()], 2, build)
    expected = fitted(job)
    job.learner.load(job.first)
    raised = [v for v in job.learner.variables if v.name.partition(":")[0] in ("beta", "factor")]
    same(job.train(), expected)
    final = [v.numpy() for v in raised]
    assert final == [pytest.approx(0.1 * (EPOCHS - 1))]
    turn = job.here.run(job.epochs, job.whole, EPOCHS + 1, {})
    assert [v.numpy() for v in raised] == final  # unchanged, until all members apply the callback update
    job.learner.change(turn.changed)
    assert [v.numpy() for v in raised] == [pytest.approx(0.1 * EPOCHS)]


class Counts(k.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.mean = tf.Variable(0), keras.metrics.Mean()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.mean.update_state(epoch)  # a metric of its own may change: it is made anew in each process
        self.times.assign_add(1)


def test_a_variable_that_no_step_reads_cannot_be_changed_by_a_callback() -> None:
    with pytest.raises(ModelError, match=r"callbacks have changed Counts.times, a variable that no"):
        Ours(lambda: [Counts()], 1).train()
    by_numpy = Ours(lambda: [Raises()], 1, lambda: dense(layers=[Scale("numpy")], metrics=["mae"]))
    with pytest.raises(ModelError, match=r"callbacks have changed scale\w*.factor, a variable that no"):
        by_numpy.train()


def test_the_learner_is_made_of_what_the_callbacks_change() -> None:
    learner = learner_of(Case(model, plain), Meeting())
    assert isinstance(learner, KerasLearner)
    rate = learner.model.optimizer.learning_rate
    place = [d.name for d in learner.variable_specs()].index(rate.path)
    learner.change({place: np.array([0.25], np.float32).view(np.uint8)})
    assert float(rate) == 0.25
