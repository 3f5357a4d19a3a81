"""Models whose rows are on servers, over a ring against Keras with an ordinary table.

Here the rows are in this process (trainer/local_rows.py), and begin as those of the table.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl.layers
import ps.initializers
from edl.errors import DataError, ModelError
from edl.layers.embedding import rows_elsewhere
from tests.process.keras.models import TOKENS, WEIGHTS, Y, sgd
from tests.process.keras.rings import STEPS, Case, Meeting, batch, learner_of, parts_of, ring_step
from tests.process.keras.rings import _given as tensor
from trainer import control, saved_file
from trainer.evaluation_metrics import EvaluationMetrics
from trainer.learner import KerasLearner
from trainer.local_rows import LocalRows
from trainer.lookups import Lookups
from trainer.own_step import OwnStepLearner
from trainer.ring.base import RingBroken

K = keras.layers
E = edl.layers.Embedding
WORDS = np.array([b"red", b"green", b"blue", b"a longer word", b""], object)[TOKENS % 5]
MANY = 64  # ids that there are in a test
SIZE = 3  # of the ring; in the second step, one of its ranks has no records


def of(inputs: Any, outputs: Any, optimizer: Any = None, **compiled: Any) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or sgd(), **{"loss": "mse", **compiled})
    return model


def ids(*shape: int | None, dtype: str = "int64", **kind: Any) -> Any:
    return keras.Input(shape, dtype=dtype, **kind)


def sequence(**options: Any) -> keras.Model:
    inputs = ids(6)
    x = K.Flatten()(E(4, input_dim=MANY, **options)(inputs))
    return of(inputs, K.Dense(2)(x))


def one_id(optimizer: Any = None) -> keras.Model:
    inputs = ids()
    return of(inputs, K.Dense(2)(E(4, input_dim=MANY)(inputs)), optimizer)


def combined(combiner: str, **options: Any) -> keras.Model:
    inputs = ids(6)
    return of(inputs, K.Dense(2)(E(4, combiner=combiner, input_dim=MANY, **options)(inputs)))


def weighted() -> keras.Model:
    inputs, by = ids(6), keras.Input((6,))
    return of([inputs, by], K.Dense(2)(E(4, combiner="sqrtn", input_dim=MANY)(inputs, by)))


def ragged(combiner: str | None = "mean") -> keras.Model:
    inputs = ids(None, ragged=True)
    return of(inputs, K.Dense(2)(E(4, combiner=combiner, input_dim=MANY)(inputs)))


def sparse() -> keras.Model:
    inputs = ids(6, sparse=True)
    return of(inputs, K.Dense(2)(E(4, combiner="sum", input_dim=MANY)(inputs)))


def texts() -> keras.Model:
    inputs = ids(6, dtype="string")
    return of(inputs, K.Dense(2)(E(4, combiner="sum", mask_zero=True, input_dim=MANY)(inputs)))


def shared() -> keras.Model:
    """One table for two features, and one of its own."""
    a, b = ids(3), ids(3)
    table, other = E(4, input_dim=MANY), E(3, combiner="sum", input_dim=MANY)
    x = K.Concatenate()([K.Flatten()(table(a)), K.Flatten()(table(b)), other(b)])
    return of([a, b], K.Dense(2)(x))


def frozen(optimizer: Any = None) -> keras.Model:
    """One table that is trained, and one that stays as it begins."""
    a, b = ids(3), ids(3)
    table, other = E(4, combiner="sum", input_dim=MANY), E(3, combiner="sum", input_dim=MANY, trainable=False)
    x = K.Concatenate()([table(a), other(b)])
    return of([a, b], K.Dense(2)(x), optimizer)


def nested() -> keras.Model:
    inner_ids = ids(6)
    inner = keras.Model(inner_ids, E(4, combiner="sum", input_dim=MANY)(inner_ids))
    inputs = ids(6)
    return of(inputs, K.Dense(2)(inner(inputs)))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = E(4, combiner="mean", input_dim=MANY)
        self.dense = K.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(self.table(x % 7))


def subclassed() -> keras.Model:
    model = Subclassed()
    model.compile(sgd(), "mse")
    return model


def eager() -> keras.Model:
    inputs = ids(6)
    x = E(4, combiner="sum", input_dim=MANY)(inputs)
    return of(inputs, K.Dense(2)(x), run_eagerly=True)


def masked() -> keras.Model:
    inputs = ids(6)
    x = K.LSTM(3)(E(4, mask_zero=True, input_dim=MANY)(inputs))
    return of(inputs, K.Dense(2)(x))


def normalized() -> keras.Model:
    inputs = ids(6)
    x = K.BatchNormalization(synchronized=True)(E(4, combiner="sum", input_dim=MANY)(inputs))
    return of(inputs, K.Dense(2)(x))


def beside_an_ordinary_one() -> keras.Model:
    """Of which Adam takes the rows one by one."""
    inputs = ids(6)
    x = K.Concatenate()(
        [K.Flatten()(K.Embedding(9, 3)(inputs)), E(4, combiner="sum", input_dim=MANY)(inputs)]
    )
    return of(inputs, K.Dense(2)(x), keras.optimizers.Adagrad(0.1))


def only_rows() -> keras.Model:
    inputs = ids(6)
    return of(inputs, E(2, combiner="sum", input_dim=MANY)(inputs))


def decaying() -> keras.Model:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return one_id(keras.optimizers.SGD(schedule))


def tokens() -> Any:
    return TOKENS, Y, None


def first() -> Any:
    return TOKENS[:, 0], Y, None


def all_weighted() -> Any:
    return TOKENS, Y, WEIGHTS


FACTORS = np.random.default_rng(2).random((30, 6)).astype("f4")
CASES = {
    "one id": Case(one_id, first),
    "several ids": Case(sequence, tokens),
    "sum": Case(lambda: combined("sum"), tokens),
    "mean, without padding": Case(lambda: combined("mean", mask_zero=True), tokens),
    "sqrtn, weights": Case(weighted, lambda: ([TOKENS, FACTORS], Y, None)),
    "records of unlike weight": Case(lambda: combined("mean"), all_weighted),
    "ragged": Case(ragged, lambda: (tf.RaggedTensor.from_tensor(TOKENS, padding=0), Y, None)),
    "sparse": Case(sparse, lambda: (tf.sparse.from_dense(TOKENS), Y, None)),
    "texts": Case(texts, lambda: (WORDS, Y, None)),
    "a shared table": Case(shared, lambda: ([TOKENS[:, :3], TOKENS[:, 3:]], Y, None)),
    "a nested model": Case(nested, tokens),
    "a model by subclassing": Case(subclassed, tokens),
    "run_eagerly": Case(eager, tokens),
    "mask_zero": Case(masked, tokens),
    "BatchNormalization(synchronized=True)": Case(normalized, tokens),
    "beside keras.layers.Embedding": Case(beside_an_ordinary_one, tokens),
    "nothing but rows": Case(only_rows, tokens),
    "SGD with momentum, all ids in each step": Case(
        lambda: one_id(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
        lambda: (np.arange(30) % 4, Y, None),
    ),
    "Adam, all ids in each step": Case(
        lambda: one_id(keras.optimizers.Adam(0.1)), lambda: (np.arange(30) % 4, Y, None)
    ),
    "Adagrad": Case(lambda: one_id(keras.optimizers.Adagrad(0.1)), first),
    "Ftrl, all ids in each step": Case(
        lambda: one_id(keras.optimizers.Ftrl(0.1)), lambda: (np.arange(30) % 4, Y, None)
    ),
    "a learning rate that decays": Case(decaying, first),
    "a table that is not trained": Case(frozen, lambda: ([TOKENS[:, :3], TOKENS[:, 3:]], Y, None)),
}
TOLERANCE = 2e-5


@dataclass
class Beside:
    """A ring whose model has its rows on servers, and Keras with the same model and an ordinary table."""

    case: Case
    meeting: Meeting
    learner: KerasLearner
    rows: LocalRows
    reference: keras.Model

    def step(self, size: int, nth: int) -> control.Agreed:
        parts = parts_of(self.case, size, *STEPS[nth], nth)
        return ring_step(self.learner, self.meeting, parts, nth, took=self.rows.took)

    def keras_step(self, nth: int) -> None:
        whole = batch(self.case, *STEPS[nth])
        x, y = (keras.tree.map_structure(tensor, tree) for tree in (whole.x, whole.y))
        model, tables = self.reference, {id(v) for v in tables_of(self.reference)}
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), whole.weights, training=True)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        # A row is learned once in a step, with the sum of all that its id has had.
        model.optimizer.apply_gradients(
            (tf.convert_to_tensor(g) if id(v) in tables else g, v)
            for g, v in zip(gradients, variables, strict=True)
        )

    def assert_equal(self) -> None:
        theirs = tables_of(self.reference)
        for number, table in enumerate(self.learner.tables):
            known, rows = self.rows.all_rows(number)
            assert len(known), "nothing was learned"
            np.testing.assert_allclose(
                rows, theirs[number].numpy()[known], TOLERANCE, TOLERANCE, err_msg=table.name
            )
        tables = {id(v) for v in theirs}
        dense = [v for v in self.reference.weights if id(v) not in tables]
        for ours, other in zip(self.learner.model.weights, dense, strict=True):
            if ours.name != "seed_generator_state":
                np.testing.assert_allclose(ours, other, TOLERANCE, TOLERANCE, err_msg=ours.path)


def tables_of(model: keras.Model) -> list[keras.Variable]:
    return [layer.embeddings for layer in model._flatten_layers() if isinstance(layer, E)]


def beside(case: Case, **options: Any) -> Beside:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    reference = case.build()
    x = keras.tree.map_structure(tensor, batch(case, 0, 5).x)
    reference(x)
    keras.backend.clear_session()
    meeting = Meeting()
    with rows_elsewhere():
        learner = learner_of(case, meeting, **options)
    begin = [v.numpy() for v in tables_of(reference)]
    names = {table.name: number for number, table in enumerate(learner.tables)}
    rows = LocalRows(learner.tables, initial=lambda table, ids: begin[names[table.name]][ids])
    learner.use(rows)
    tables = {id(v) for v in tables_of(reference)}
    dense = [v for v in reference.weights if id(v) not in tables]
    for other, ours in zip(dense, learner.model.weights, strict=True):
        other.assign(ours)
    return Beside(case, meeting, learner, rows, reference)


@pytest.mark.parametrize("name", CASES)
def test_rows_on_servers_are_trained_as_an_ordinary_table(name: str) -> None:
    both = beside(CASES[name])
    for nth, (start, stop) in enumerate(STEPS):
        both.keras_step(nth)
        agreed = both.step(SIZE, nth)
        assert (agreed.records, agreed.nonfinite) == (stop - start, False)
    both.assert_equal()


# --- the model that is saved, and evaluated


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
            metrics.added(second, lambda: first),  # and then another one is next
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
        ahead.generation = 2  # type: ignore[misc]
        metrics.added(second)
    assert ahead.asked == ["now", "ahead", "forgotten", "now"]


class OwnTest(keras.Model):
    """Whose test looks up other ids than its forward pass."""

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
    """Whose tables no file describes: its class makes them."""

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


# --- what a step is made of


def test_a_batch_in_pieces_learns_what_a_whole_one_does() -> None:
    both = beside(CASES["sum"], pieces=3)
    both.keras_step(0)
    both.step(2, 0)
    both.assert_equal()


class Noted(LocalRows):
    """Notes what is asked of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[tuple[str, int]] = []

    def pull(self, step: int, ids: Any) -> Any:
        self.told.append(("pull", step))
        assert all(len(np.unique(some)) == len(some) for some in ids)
        return super().pull(step, ids)

    def stage(self, step: int, rank: int, gradients: Any) -> None:
        self.told.append(("stage", step))
        assert all(len(np.unique(some)) == len(some) for some, _ in gradients)
        super().stage(step, rank, gradients)


def test_gradients_are_staged_before_the_sums_and_a_rank_without_records_asks_for_nothing() -> None:
    both = beside(CASES["a shared table"])
    noted = Noted(both.learner.tables)
    both.learner.use(noted)
    reduce = both.meeting.reduce

    def told(vector: Any) -> Any:
        noted.told.append(("sum", 7))
        return reduce(vector)

    both.learner._step._reduce = told  # type: ignore[attr-defined]
    ring_step(both.learner, both.meeting, [batch(both.case, 0, 12)], 7)
    assert noted.told == [("pull", 7), ("stage", 7), ("sum", 7)]
    noted.told.clear()
    sums = both.learner.sums(None, control.write(7), 7, 0, 0)
    assert noted.told == [("sum", 7)]
    assert both.learner.commit(7, sums).skipped


class Ahead:
    """Rows that can be asked for before they are needed: of the state that they are of by then."""

    def __init__(self, rows: LocalRows):
        self._rows, self.generation = rows, 1
        self.told: list[tuple[str, int]] = []

    def pull(self, step: int, ids: Any) -> Any:
        self.told.append(("pull", step))
        return self._rows.pull(step, ids)

    def stage(self, step: int, rank: int, gradients: Any) -> None:
        raise AssertionError("it was to be begun")

    def begin_pull(self, step: int, ids: Any, last: Any = None) -> Begun:
        self.told.append(("begin pull", step))
        assert last.step == step - 1
        self._rows.took(last)  # as servers do: the rows are of the state after it
        rows = self._rows.pull(step, ids)
        return Begun(self, lambda: rows, "rows", step)

    def begin_stage(self, step: int, rank: int, gradients: Any) -> Begun:
        self.told.append(("begin stage", step))
        return Begun(self, lambda: self._rows.stage(step, rank, gradients), "staged", step)


@dataclass
class Begun:
    rows: Ahead
    made: Any
    what: str
    step: int

    def result(self) -> Any:
        self.rows.told.append((self.what, self.step))
        return self.made()

    def forget(self) -> None:
        self.rows.told.append(("forget", self.step))


def test_rows_of_the_next_step_are_asked_for_before_this_one_is_in_the_model() -> None:
    both, steps = beside(CASES["a shared table"]), [(0, 12), (12, 24), (6, 18)]
    batches = [batch(both.case, *some) for some in steps]
    ahead = Ahead(both.rows)
    both.learner.use(ahead, following=lambda step: batches[step + 1] if step < 2 else None)
    for step, some in enumerate(batches):
        if step == 2:  # another ring: what was begun in the one before is of no use
            ahead.generation = 2
        sums = both.learner.sums(some, control.write(step), step, 0, 12)
        commit = both.learner.commit(step, sums)
        both.learner.apply(sums)
        whole = batch(both.case, *steps[step])
        model = both.reference
        with tf.GradientTape() as tape:
            x, y = (keras.tree.map_structure(tensor, tree) for tree in (whole.x, whole.y))
            loss = model.compute_loss(x, y, model(x, training=True), None, training=True)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        dense = map(tf.convert_to_tensor, gradients)
        model.optimizer.apply_gradients(zip(dense, model.trainable_variables, strict=True))
    both.rows.took(commit)
    assert ahead.told == [
        ("pull", 0), ("begin stage", 0), ("staged", 0), ("begin pull", 1),
        ("rows", 1), ("begin stage", 1), ("staged", 1), ("begin pull", 2),
        ("forget", 2), ("pull", 2), ("begin stage", 2), ("staged", 2),
    ]  # fmt: skip
    both.assert_equal()


def test_a_row_that_is_not_finite_is_flagged_and_what_was_staged_is_dropped() -> None:
    both = beside(CASES["sum"])
    known = both.rows.all_rows(0)
    spoiled = LocalRows(
        both.learner.tables, initial=lambda table, some: np.full((len(some), 4), np.inf, "f4")
    )
    both.learner.use(spoiled)
    sums = both.learner.sums(batch(both.case, 0, 12), control.write(0), 0, 0, 12)
    assert (sums.agreed.nonfinite, sums.at_fault) == (True, True)
    commit = both.learner.commit(0, sums)
    assert commit.skipped
    spoiled.took(commit)
    assert len(spoiled.all_rows(0)[0]) == len(known[0]) == 0


def test_what_servers_are_told_of_a_step() -> None:
    both = beside(CASES["a learning rate that decays"])
    for step in range(2):
        sums = both.learner.sums(batch(both.case, 0, 12), control.write(step), step, 0, 12)
        commit = both.learner.commit(step, sums)
        assert (commit.step, commit.skipped, commit.iteration) == (step, False, step)
        assert commit.learning_rate == pytest.approx(0.1 * 0.5**step)
        assert commit.scale == pytest.approx(1 / 12)
        both.learner.apply(sums)


# --- what is refused


def refused(build: Any, data: Any = tokens) -> str:
    with pytest.raises(ModelError) as error:
        beside(Case(build, data))
    return str(error.value)


def by_rows() -> keras.Model:
    inputs = ids(6)
    x = E(1, input_dim=MANY, name="first")(inputs)
    chosen = K.Lambda(lambda v: tf.cast(v[..., 0] * 100, tf.int64) % MANY)(x)
    return of(inputs, K.Dense(2)(E(4, combiner="sum", input_dim=MANY, name="second")(chosen)))


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_ids_that_depend_on_rows_are_refused() -> None:
    assert "the ids of layer 'second' depend on rows" in refused(by_rows)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (keras.optimizers.Lion, "not with the model's Lion"),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), "clipnorm=1.0"),
        (lambda: keras.optimizers.Adam(0.1, use_ema=True), "use_ema=True"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mixed_float16"),
    ],
)
def test_an_optimizer_that_servers_do_not_have_is_refused(optimizer: Any, why: str) -> None:
    assert why in refused(lambda: one_id(optimizer()), first)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.GlorotUniform(),
        keras.initializers.GlorotNormal(),
        keras.initializers.HeUniform(),
        keras.initializers.HeNormal(seed=4),
        keras.initializers.LecunNormal(),
        keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
    ],
)
def test_rows_of_bounded_ids_begin_with_the_scale_that_keras_gives_the_whole_table(initializer: Any) -> None:
    count, dim = 3000, 16
    inputs = ids()
    with rows_elsewhere():
        model = of(inputs, K.Dense(1)(E(dim, input_dim=count, initializer=initializer, name="t")(inputs)))
    tables = Lookups(model).tables
    (rows,) = LocalRows(tables).pull(0, [np.arange(count)])
    theirs = np.asarray(initializer((count, dim)))
    assert rows.std() == pytest.approx(theirs.std(), rel=0.03)
    assert np.abs(rows).max() == pytest.approx(np.abs(theirs).max(), rel=0.25)
    assert abs(rows.mean()) < theirs.std() / 20
    ps.initializers.parse(tables[0].initializer, "t", dim)  # a server takes it


def test_an_id_out_of_bounds_is_named() -> None:
    both = beside(CASES["sum"])
    x = np.array(TOKENS)
    x[3, 2] = MANY
    with pytest.raises(DataError, match="layer 'embedding' is given the id 64; its input_dim is 64"):
        both.learner.sums(
            batch(Case(both.case.build, lambda: (x, Y, None)), 0, 12), control.write(0), 0, 0, 12
        )


def test_a_step_of_ones_own_with_rows_on_servers_is_refused() -> None:
    inputs = ids(6)
    with rows_elsewhere():
        model = OwnStep(inputs, E(2, combiner="sum")(inputs))
    model.compile(sgd(), "mse")
    with pytest.raises(ModelError, match=r"OwnStep.train_step\(\) is a step of its own"):
        OwnStepLearner(model, None, lambda v: v)


def test_without_servers_a_table_has_to_be_bounded() -> None:
    with pytest.raises(ValueError, match="has no input_dim, so any number of ids"):
        E(4)(np.array([1]))


class OnServers:
    """Rows of which not all can be had at once, as servers have them."""

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
