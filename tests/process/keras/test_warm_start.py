# SPDX-License-Identifier: Apache-2.0
"""A training that begins with the weights of an earlier one: which variables it loads, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.checkpoints import CheckpointError, Store, Tensor
from edl.errors import ConfigError, EdlError, ModelError
from edl.trainer.agreement import control
from edl.trainer.checkpoint.warm_start import WarmStart
from edl.trainer.evaluation.inference import InferenceLearner
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from tests.process.keras.models import dense, plain, sgd
from tests.process.keras.rings import Case, Meeting, batch, learner_of, parts_of, ring_step
from tests.support.checkpoints.checkpoints import write

pytestmark = pytest.mark.process


def adam(outputs: int = 2) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.backend.clear_session()  # names as in a process of its own
        layers = [keras.layers.BatchNormalization()]
        return dense(keras.optimizers.Adam(0.01), outputs=outputs, layers=layers, metrics=["mae"])

    return build


CASE = Case(adam(), plain)


def learner(case: Case = CASE, steps: int = 0) -> KerasLearner:
    meeting = Meeting()
    made = learner_of(case, meeting)
    for step in range(steps):
        ring_step(made, meeting, parts_of(case, 1, 0, 12), step)
    return made


Learner = KerasLearner | InferenceLearner | OwnStepLearner


def state(of: Learner) -> dict[str, bytes]:
    return {d.name: part.tobytes() for d, part in zip(of.variable_specs(), of.parts(), strict=True)}


def kept(of: Learner, where: Path, step: int = 7) -> Path:
    """A checkpoint of it."""
    parts = zip(of.variable_specs(), of.parts(), strict=True)
    tensors = {d.name: Tensor(d.dtype, d.shape, part.data) for d, part in parts}
    written = write(Store.open(str(where)), step, tensors=tensors, model=of.fingerprint())
    return where / written.directory


def warm(of: KerasLearner, where: Path | str, everything: bool = False, told: Any = print) -> WarmStart:
    return WarmStart(str(where), everything, of.model, of, told)


@pytest.fixture(scope="module")
def trained() -> KerasLearner:
    return learner(steps=3)


def saved(of: KerasLearner, path: Path) -> Path:
    of.model.save_weights(path) if path.name.endswith(".weights.h5") else of.model.save(path)
    return path


@pytest.mark.parametrize("kind", ["checkpoints", "one of them", "m.keras", "m.weights.h5", "m.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_the_weights_and_averages_are_taken_and_the_optimizer_begins_anew(
    trained: KerasLearner, tmp_path: Path, kind: str
) -> None:
    if kind in ("checkpoints", "one of them"):
        one = kept(trained, tmp_path / "c")
        where = tmp_path / "c" if kind == "checkpoints" else one
    else:
        where = saved(trained, tmp_path / kind)
    ours, told = learner(), list[str]()
    before, there = state(ours), state(trained)
    start = warm(ours, where, told=told.append)
    start.check()
    assert state(ours) == before
    start.begin()
    weights = {d.name for d in ours.variable_specs() if d.of_model}
    assert {w.path for w in ours.model.weights} == weights
    assert any("moving_mean" in name for name in weights)
    for name, value in state(ours).items():
        assert value == (there if name in weights else before)[name], name
    assert before["dense/kernel"] != there["dense/kernel"] and str(where) in told[0]


def composed(prefix: str, dtype: str = "float32") -> keras.Model:
    """Nested and shared layers under names of its own."""
    keras.utils.set_random_seed(len(prefix))
    layers = keras.layers
    x = inputs = keras.Input((4,), name=f"{prefix}in")
    shared = layers.Dense(4, name=f"{prefix}shared", dtype=dtype)
    inner = [keras.Input((4,)), layers.Dense(4, name=f"{prefix}b", dtype=dtype), layers.BatchNormalization()]
    x = shared(keras.Sequential(inner, name=f"{prefix}inner")(shared(x)))
    model = keras.Model(inputs, layers.Dense(2, name=f"{prefix}out", dtype=dtype)(x), name=f"{prefix}model")
    model.compile(sgd(), "mse")
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5", "m.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_file_is_loaded_by_structure_as_keras_loads_it(tmp_path: Path, kind: str, dtype: str) -> None:
    there, second, told = composed("of_the_file_", dtype), composed("second_"), list[str]()
    path = tmp_path / kind
    there.save_weights(path) if kind == "m.weights.h5" else there.save(path)
    second.load_weights(path)
    ours = learner(Case(lambda: composed("renamed_"), plain))
    start = warm(ours, path, told=told.append)
    start.check()
    start.begin()
    for here, expected, saved in zip(ours.model.weights, second.weights, there.weights, strict=True):
        np.testing.assert_array_equal(here, expected)
        np.testing.assert_array_equal(here, np.asarray(saved, here.dtype))
    assert told[0].endswith(", converted from float16") == (dtype == "float16")


def test_where_nothing_is_trained_the_averages_of_the_weights_are_taken(tmp_path: Path) -> None:
    """As the trained model has them, and what is exported of a checkpoint."""

    def build() -> keras.Model:
        keras.backend.clear_session()
        return dense(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5))

    trained = learner(Case(build, plain), steps=3)
    kept(trained, tmp_path)
    further, model = learner(Case(build, plain)), build()
    frozen = InferenceLearner(model, lambda vector: vector)
    warm(further, tmp_path).begin()
    np.testing.assert_array_equal(further.model.weights[0], trained.model.weights[0])
    WarmStart(str(tmp_path), False, model, frozen, print, work="evaluation").begin()
    trained.finish_training()
    for ours, theirs in zip(model.weights, trained.model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert not np.array_equal(model.weights[0], further.model.weights[0])


class Wrapped(keras.Model):
    """Its train_step() calls what it is made of, which has no weights before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])

    def call(self, x: Any) -> Any:
        return self.inner(x)


def test_weights_that_were_made_by_another_call_are_told_by_the_rest_of_their_names(tmp_path: Path) -> None:
    x = np.ones((4, 3), np.float32)
    keras.backend.clear_session()
    trained = Wrapped()
    trained.inner(x)
    kept(InferenceLearner(trained, lambda vector: vector), tmp_path)  # as of a training
    keras.backend.clear_session()
    model = Wrapped()
    assert not np.array_equal(model(x), trained(x))
    assert model.weights[0].path != trained.weights[0].path
    frozen = InferenceLearner(model, lambda vector: vector)
    start = WarmStart(str(tmp_path), False, model, frozen, print, work="evaluation")
    start.check()
    start.begin()
    np.testing.assert_array_equal(model(x), trained(x))


class OwnStep(Wrapped):
    """Its step calls what it is made of, and not the model."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.inner(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def own_step(momentum: float = 0.5) -> keras.Model:
    keras.backend.clear_session()
    model = OwnStep()
    optimizer = keras.optimizers.Adam(0.1, use_ema=momentum > 0, ema_momentum=momentum or 0.99)
    model.compile(optimizer, loss="mse")
    return model


@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_averages_of_weights_that_were_made_by_another_call_are_found(
    tmp_path: Path, momentum: float
) -> None:
    """Nothing is trained: the weights are those that the model would have if the training had ended there."""
    case, meeting = Case(lambda: own_step(momentum), plain), Meeting()
    trained = OwnStepLearner(case.build(), batch(case, 0, 5), meeting.reduce)
    for step in range(3):
        trained.apply(trained.allreduce_step(batch(case, 0, 12), control.write(step), step, 0, 12))
    kept(trained, tmp_path)
    model, x = own_step(), np.ones((4, 4), np.float32)
    model(x)
    assert model.weights[0].path != trained.model.weights[0].path
    raw = trained.model.weights[0].numpy()
    WarmStart(
        str(tmp_path), False, model, InferenceLearner(model, lambda vector: vector), print, "evaluation"
    ).begin()
    trained.finish_training()
    for ours, theirs in zip(model.weights, trained.model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert np.array_equal(model.weights[0].numpy(), raw) == (momentum == 0)


def test_everything_of_a_checkpoint_is_taken_but_what_it_had_counted_of_an_epoch(
    trained: KerasLearner, tmp_path: Path
) -> None:
    kept(trained, tmp_path)
    ours = learner()
    warm(ours, tmp_path, everything=True).begin()
    there, here = state(trained), state(ours)
    counts = {name for name in there if there[name] != here[name]}
    assert counts and all("mean_absolute_error" in name or "mae" in name for name in counts), counts
    assert np.frombuffer(here["adam/iteration"], np.int64) == 3


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_what_does_not_fit_is_refused_variable_by_variable_and_nothing_is_changed(
    trained: KerasLearner, tmp_path: Path
) -> None:
    kept(trained, tmp_path)
    other = learner(Case(adam(outputs=3), lambda: (plain()[0], np.zeros((30, 3), "f4"), None)))
    before = state(other)
    for start in (
        warm(other, tmp_path),
        *(warm(other, saved(trained, tmp_path / n)) for n in ("m.keras", "m.h5")),
    ):
        for attempt in (start.check, start.begin):
            with pytest.raises(ModelError) as refused:
                attempt()
            text = str(refused.value)
            assert "float32 [8, 3] here, and float32 [8, 2] there" in text
            assert "dense_1" in text and "float32 [4, 8]" not in text, text
    assert state(other) == before


def test_an_optimizer_of_another_kind_keeps_its_own_beginning_and_cannot_take_everything(
    trained: KerasLearner, tmp_path: Path
) -> None:
    kept(trained, tmp_path)

    def build() -> keras.Model:
        model = adam()()
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        return model

    ours = learner(Case(build, plain))
    warm(ours, tmp_path).begin()
    assert state(ours)["dense/kernel"] == state(trained)["dense/kernel"]
    with pytest.raises(ModelError, match=r"sgd/iteration is int64 \[\] here, and missing there"):
        warm(ours, tmp_path, everything=True).check()


def test_what_is_not_there_or_is_no_such_file_is_refused_in_words(tmp_path: Path) -> None:
    ours = learner()
    (tmp_path / "empty.keras").write_bytes(b"PK")
    (tmp_path / "model.bin").touch()
    saved(ours, tmp_path / "new.weights.h5").rename(tmp_path / "new.h5")
    cases: list[tuple[str, type[EdlError], str]] = [
        ("none.keras", ConfigError, "none.keras: no such file on this worker"),
        ("empty.keras", CheckpointError, "empty.keras is not a file that Keras has saved"),
        ("new.h5", CheckpointError, "rename it, so that its name ends with .weights.h5"),
        ("model.bin", ConfigError, "is a file, and the names of Keras' files end with .keras, "),
        ("nothing", CheckpointError, "no whole checkpoint found"),
        ("step-000000000007-a", CheckpointError, "no checkpoint found"),
    ]
    for name, kind, words in cases:
        with pytest.raises(kind, match=words):
            warm(ours, tmp_path / name).check()
