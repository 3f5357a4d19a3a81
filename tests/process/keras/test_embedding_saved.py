# SPDX-License-Identifier: Apache-2.0
"""A model whose rows are on servers is evaluated and saved with them, and its file is loaded anywhere."""

from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import edl.layers
from edl.layers.row_location import rows_elsewhere
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.export import saved_file
from edl.trainer.ring.base import RingBroken
from tests.process.keras.embedding_models import CASES, MANY, Beside, E, K, beside, ids, of, one_id
from tests.process.keras.models import TOKENS, Y, sgd
from tests.process.keras.rings import Case, Meeting, batch, learner_of


@pytest.fixture(scope="module")
def trained() -> Beside:
    """After a step."""
    both = beside(CASES["a shared table"])
    both.keras_step(0)
    both.step(1, 0)
    return both


def test_a_model_is_evaluated_with_the_rows_of_its_servers(trained: Beside) -> None:
    x = trained.case.data()[0]
    expected = trained.reference.predict(x, verbose=0)
    np.testing.assert_allclose(trained.learner.model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    whole = batch(trained.case, 0, 30)
    learner = trained.learner
    metrics = EvaluationMetrics(learner.model, batch(trained.case, 0, 5), lookups=learner.lookups)
    (loss,) = metrics.results(metrics.added(whole).astype("f8")).values()
    assert loss == pytest.approx(trained.reference.evaluate(x, Y, verbose=0), rel=1e-4)


class Asking(LocalRows):
    """They can be asked for before they are needed, and remember how they were asked."""

    generation = 1

    def __init__(self, rows: LocalRows, tables: Any):
        super().__init__(tables)
        self._tables, self.asked = rows._tables, list[str]()

    def pull(self, step: int, ids: Any) -> Any:
        self.asked.append("now")
        return super().pull(step, ids)

    def begin_pull(self, step: int, ids: Any, last: Any = None) -> Any:
        self.asked.append("ahead")
        rows = super().pull(step, ids)
        return SimpleNamespace(result=lambda: rows, forget=lambda: self.asked.append("forgotten"))

    def begin_stage(self, step: int, rank: int, gradients: Any) -> Any:
        raise AssertionError("nothing is trained")


def two_tables() -> keras.Model:
    inputs = ids(6)
    x = [E(4, input_dim=MANY, combiner="sum", name=name)(inputs) for name in ("one", "other")]
    return of(inputs, K.Dense(2)(K.concatenate([*x, E(3, input_dim=MANY, name="third")(inputs[:, 0])])))


def test_an_evaluation_asks_once_for_all_rows_of_a_batch_and_ahead_for_those_of_the_next() -> None:
    case = Case(two_tables, lambda: (TOKENS, Y, None))
    with rows_elsewhere():
        learner = learner_of(case, Meeting())
        rows = LocalRows(learner.tables, seed=3)
        learner.use(rows)
        first, second, third = (batch(case, at, at + 10) for at in (0, 10, 20))
        one_by_one = EvaluationMetrics(learner.model, batch(case, 0, 5))
        expected = [one_by_one.added(each) for each in (first, second, third)]
        metrics = EvaluationMetrics(learner.model, batch(case, 0, 5), lookups=learner.lookups)
        ahead = Asking(rows, learner.tables)
        learner.use(ahead)
        found = [
            metrics.added(first, lambda: second),
            metrics.added(second, lambda: first),  # and then a different one is next
            metrics.added(third),
        ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ahead.asked == ["now", "ahead", "ahead", "forgotten", "now"]


def test_rows_that_were_asked_for_in_another_ring_are_not_taken() -> None:
    case = Case(one_id, lambda: (TOKENS[:, 0], Y, None))
    with rows_elsewhere():
        learner = learner_of(case, Meeting())
        metrics = EvaluationMetrics(learner.model, batch(case, 0, 5), lookups=learner.lookups)
        ahead = Asking(LocalRows(learner.tables, seed=3), learner.tables)
        learner.use(ahead)
        first, second = batch(case, 0, 10), batch(case, 10, 20)
        metrics.added(first, lambda: second)
        ahead.generation = 2
        metrics.added(second)
    assert ahead.asked == ["now", "ahead", "forgotten", "now"]


class OwnTest(keras.Model):
    """A model whose test step looks up other ids than its forward pass."""

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        return super().test_step((x + 1, y))


def test_a_model_with_a_test_of_its_own_is_evaluated_as_it_says() -> None:
    def build(kind: type[keras.Model]) -> keras.Model:
        inputs = ids()
        model = kind(inputs, K.Dense(2, kernel_initializer="ones")(E(4, input_dim=MANY, name="t")(inputs)))
        model.compile(sgd(), loss="mse")
        return model

    def evaluated(kind: type[keras.Model], more: int) -> np.ndarray:
        case = Case(lambda: build(kind), lambda: (TOKENS[:, 0] % 9 + more, Y, None))
        with rows_elsewhere():
            learner = learner_of(case, Meeting())
            learner.use(LocalRows(learner.tables, seed=3))
            metrics = EvaluationMetrics(learner.model, batch(case, 0, 5), lookups=learner.lookups)
            return metrics.added(batch(case, 0, 10))

    np.testing.assert_allclose(evaluated(OwnTest, 0), evaluated(keras.Model, 1), rtol=1e-6)


class Gone(LocalRows):
    def pull(self, step: int, ids: Any) -> Any:
        raise RingBroken("the ring was cut")


def test_rows_that_do_not_come_for_an_evaluation_are_a_broken_ring_and_no_error_of_the_user(
    trained: Beside,
) -> None:
    learner = trained.learner
    metrics = EvaluationMetrics(learner.model, batch(trained.case, 0, 5), lookups=learner.lookups)
    learner.use(Gone(learner.tables))
    try:
        with pytest.raises(RingBroken, match="the ring was cut"):
            metrics.added(batch(trained.case, 0, 5))
    finally:
        learner.use(trained.rows)


def test_a_saved_model_has_the_rows_that_there_are_and_is_loaded_anywhere(
    trained: Beside, tmp_path: Path
) -> None:
    model, seen = trained.learner.model, trained.case.data()[0]
    expected = trained.reference.predict([a[:12] for a in seen], verbose=0)  # of ids that were trained
    before = len(model.weights)
    with trained.learner.whole():
        model.save(tmp_path / "m.keras")
    assert len(model.weights) == before, "the model is as it was"
    np.savez(tmp_path / "x.npz", *(a[:12] for a in seen))
    found = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(edl.__file__).parents[1],
    )
    assert found.returncode == 0, found.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-4, atol=1e-5)


LOADS = """
import sys
import numpy as np
import edl.layers
import keras
x = list(np.load(sys.argv[1] + "/x.npz").values())
model = keras.models.load_model(sys.argv[1] + "/m.keras")
np.save(sys.argv[1] + "/y.npy", model.predict(x, verbose=0))
"""


def test_a_saved_model_gives_zeros_for_an_id_that_was_never_trained() -> None:
    layer = E(3, combiner="sum", vocabulary=2)
    layer.build()
    layer.ids.assign([-5, 1 << 40])
    layer.embeddings.assign([[1, 2, 3], [4, 5, 6]])
    found = layer(np.array([[-5, 1 << 40], [7, -5], [1 << 62, 0]]))
    np.testing.assert_array_equal(found, [[5, 7, 9], [1, 2, 3], [0, 0, 0]])


@keras.saving.register_keras_serializable("tests")
class OfItsOwn(keras.Model):
    """A model whose tables no file describes, because its class creates them."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.users, self.out = E(3, name="users"), K.Dense(1)

    def call(self, features: Any) -> Any:
        return self.out(self.users(features["user"]))


def of_its_own() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = OfItsOwn()
    model.compile(sgd(), "mse")
    return model


USERS = {"user": np.array([5, -7, 1 << 62, 5, 9])}  # and the last one is not learned


def learned(model: keras.Model) -> np.ndarray:
    with edl.layers.rows_to_be_loaded():
        assert not model(USERS).numpy().any(), "there are no rows yet"
    rows = np.random.default_rng(2).random((3, 3)).astype(np.float32)
    model.users.fill(np.array([1 << 62, 5, -7]), rows)
    outputs: np.ndarray = model(USERS).numpy()
    assert outputs[:4].all() and not outputs[4:].any()
    return outputs


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_model_whose_class_makes_the_layer_is_loaded_with_its_rows(elsewhere: bool, tmp_path: Path) -> None:
    model, path = of_its_own(), tmp_path / "m.keras"
    outputs = learned(model)
    model.save(path)
    with warnings.catch_warnings():  # Keras knows no more than the shapes that its class is called with
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        with rows_elsewhere() if elsewhere else nullcontext():
            loaded: Any = saved_file.load(path, {}) if elsewhere else keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.predict(USERS, verbose=0), outputs)
    assert loaded.users.vocabulary == 3
    loaded.save(path)


def test_a_model_built_by_its_own_code_takes_rows_from_a_file_of_weights(tmp_path: Path) -> None:
    trained_one, path = of_its_own(), tmp_path / "m.weights.h5"
    outputs = learned(trained_one)
    trained_one.save_weights(path)
    with edl.layers.rows_to_be_loaded():
        model = of_its_own()
        assert not model.predict(USERS, verbose=0).any()
    model.load_weights(path)
    np.testing.assert_array_equal(model.predict(USERS, verbose=0), outputs, "also where it was traced before")
    np.testing.assert_array_equal(model(USERS), outputs)
    with pytest.raises(ValueError, match=r"no input_dim.*rows_to_be_loaded"):
        E(3)(np.array([1]))


class OnServers:
    """Rows that cannot all be read at once, as on servers."""

    def __init__(self, rows: LocalRows):
        self.pull, self.stage = rows.pull, rows.stage


def test_a_model_whose_rows_cannot_be_had_is_saved_with_zeros_and_says_so(
    trained: Beside, tmp_path: Path
) -> None:
    learner, x = trained.learner, trained.case.data()[0]
    assert learner.missing() == ""
    learner.use(OnServers(trained.rows))
    try:
        assert "zeros for all rows of 'embedding', 'embedding_1'" in learner.missing()
        expected = learner.model.predict(x, verbose=0)
        with learner.whole():
            learner.model.save(tmp_path / "m.keras")
            bias = learner.model.predict(x, verbose=0)
            with learner.live():
                np.testing.assert_allclose(learner.model.predict(x, verbose=0), expected)
        np.testing.assert_allclose(learner.model.predict(x, verbose=0), expected)
        assert np.ptp(bias, 0).max() == 0, "all records are alike"
        np.testing.assert_allclose(keras.models.load_model(tmp_path / "m.keras").predict(x, verbose=0), bias)
    finally:
        learner.use(trained.rows)
