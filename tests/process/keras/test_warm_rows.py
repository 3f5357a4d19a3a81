# SPDX-License-Identifier: Apache-2.0
"""`initFrom.path` of a model whose rows were on parameter servers: what is loaded, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest

import edl.layers
from edl.checkpoints import Store, Tensor
from edl.errors import ConfigError, ModelError
from edl.layers.row_location import rows_elsewhere, saved_tables
from edl.trainer.checkpoint.source import saved_counts
from edl.trainer.checkpoint.warm_start import WarmStart
from edl.trainer.embedding.interfaces import Start
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.evaluation.inference import InferenceLearner, Predictor
from edl.trainer.records.batches import Batch
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.rings import Case, Meeting, learner_of, parts_of, ring_step
from tests.process.keras.test_warm_start import kept as kept_dense
from tests.process.keras.test_warm_start import state
from tests.support.checkpoints.checkpoints import manifest_of
from tests.unit.checkpoints.test_rows_of_a_checkpoint import tensors as of_server

pytestmark = pytest.mark.process
TABLE, DIM = "counts", 2
IDS = np.arange(30) * (1 << 40) - (1 << 42)
ASKED = np.concatenate([IDS, [5, -1]])  # the last ones, no training has seen


def build(dim: int = DIM, name: str = TABLE) -> keras.Model:
    keras.backend.clear_session()  # names as in a process of its own
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(edl.layers.Embedding(dim, name=name)(ids)))
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    return model


CASE = Case(build, lambda: (IDS, np.linspace(-3, 3, 30, dtype="f4")[:, None], None))


@pytest.fixture(scope="module")
def trained() -> KerasLearner:
    meeting = Meeting()
    with rows_elsewhere():
        made = learner_of(CASE, meeting)
        rows = LocalRows(made.tables)
        made.use(rows)
        for step in range(3):
            ring_step(made, meeting, parts_of(CASE, 2, 0, 30), step, rows.took)
    return made


def kept(of: KerasLearner, where: Path, step: int = 7, count: int = 30) -> Path:
    """A checkpoint of it and so many of its rows, which two servers have."""
    assert isinstance(of.lookups.rows, LocalRows)
    ids, rows = (each[:count] for each in of.lookups.rows.all_rows(0))
    specs = zip(of.variable_specs(), of.parts(), strict=True)
    tensors = {d.name: Tensor(d.dtype, d.shape, part.data) for d, part in specs}
    writing = Store.open(str(where)).begin(step, "1")
    servers = [
        writing.write_part(n + 1, 3, of_server(n, ids[n::2].copy(), rows[n::2].copy())) for n in range(2)
    ]
    mine = writing.write_part(0, 3, tensors)
    manifest = manifest_of(
        step, tensors, (mine,), state={"servers": {"count": 2, "parts": [part.name for part in servers]}}
    )
    return where / writing.commit(type(manifest)(**{**vars(manifest), "parts": (mine, *servers)})).directory


def frozen(where: Path, build: Callable[[], keras.Model] = build) -> tuple[keras.Model, WarmStart]:
    """A model of a job that evaluates or predicts, and what it is to begin with."""
    with saved_tables(lambda: saved_counts(str(where)), str(where)):
        model = build()
    learner = InferenceLearner(model, np.asarray)
    return model, WarmStart(str(where), True, model, learner, print)


@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5", "checkpoints"])
def test_a_model_without_servers_has_the_rows_that_were_there(
    trained: KerasLearner, tmp_path: Path, kind: str
) -> None:
    with trained.whole():
        expected = trained.model(ASKED).numpy()
        if kind == "m.keras":
            trained.model.save(tmp_path / kind)
        elif kind == "m.weights.h5":
            trained.model.save_weights(tmp_path / kind)
    if kind == "checkpoints":
        kept(trained, tmp_path / kind)
    model, start = frozen(tmp_path / kind)
    before = model(ASKED).numpy()
    start.check()
    np.testing.assert_array_equal(model(ASKED).numpy(), before)
    start.begin()
    np.testing.assert_array_equal(model(ASKED).numpy(), expected)
    assert len(np.unique(expected[-2:])) == 1, "unknown ids have the same row"


@pytest.mark.parametrize("kind", ["m.keras", "checkpoints"])
def test_a_model_that_is_not_trained_may_have_its_rows_on_servers_whatever_its_optimizer(
    trained: KerasLearner, tmp_path: Path, kind: str
) -> None:
    assert isinstance(trained.lookups.rows, LocalRows)
    learned = dict(zip(*trained.lookups.rows.all_rows(0), strict=True))
    with trained.whole():
        expected = trained.model(ASKED).numpy()
        trained.model.save(tmp_path / "m.keras")
    kept(trained, tmp_path / "checkpoints")
    with rows_elsewhere():
        model = build()
        model.predict_on_batch(IDS[:5])
        model.compile(keras.optimizers.RMSprop(), loss="mse")  # which no server has
        lookups = Lookups(model, trained=False)
        (table,) = lookups.tables
        assert "Zeros" in table.initializer, "as in a saved model"
        lookups.rows = LocalRows(
            lookups.tables, initial=lambda t, ids: np.array([learned.get(i, np.zeros(DIM)) for i in ids])
        )
        learner, servers = InferenceLearner(model, np.asarray, lookups.tables), Servers()
        start = WarmStart(str(tmp_path / kind), False, model, learner, print, "prediction", servers)
        start.check()
        start.begin()
        predict = Predictor(model, Batch(IDS[:5], IDS[:5], None, None), lookups)
        found = predict(Batch(ASKED, ASKED, None, None))["output"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    (begun,) = servers.starts
    assert begun.tables == (() if kind == "m.keras" else (TABLE,))
    assert begun.digest() != Start().digest()


class Servers:
    """What a training has its servers begin with."""

    def __init__(self) -> None:
        self.starts: list[Start] = []

    def begin_with(self, start: Start) -> None:
        self.starts.append(start)


def bounded() -> keras.Model:
    """The same, whose ids are few: trained in the ring."""
    keras.backend.clear_session()
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(edl.layers.Embedding(DIM, input_dim=9, name=TABLE)(ids)))
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    return model


def on_servers(where: Path) -> tuple[KerasLearner, WarmStart, Servers]:
    """A training whose rows are on servers, and what it is to begin with."""
    with rows_elsewhere():
        learner = learner_of(CASE, Meeting())
    servers = Servers()
    return learner, WarmStart(str(where), False, learner.model, learner, print, servers=servers), servers


def test_the_rows_of_a_file_are_brought_to_the_servers(trained: KerasLearner, tmp_path: Path) -> None:
    assert isinstance(trained.lookups.rows, LocalRows)
    ids, rows = trained.lookups.rows.all_rows(0)
    order = np.argsort(ids)
    with trained.whole():
        trained.model.save(tmp_path / "m.keras")
        trained.model.save_weights(tmp_path / "m.weights.h5")
    for kind in ("m.keras", "m.weights.h5"):
        ours, start, servers = on_servers(tmp_path / kind)
        start.check()
        assert not servers.starts
        start.begin()
        (begun,) = servers.starts
        assert not begun.tables
        found, values = begun.rows[0]
        np.testing.assert_array_equal(found, ids[order])
        np.testing.assert_array_equal(values, rows[order])
        dense = [v.numpy() for v in ours.model.trainable_variables]
        for value, there in zip(dense, trained.model.trainable_variables, strict=True):
            np.testing.assert_array_equal(value, there.numpy())


def test_of_a_checkpoint_the_servers_take_the_rows_themselves(trained: KerasLearner, tmp_path: Path) -> None:
    one = kept(trained, tmp_path)
    _, start, servers = on_servers(one)
    start.check()
    start.begin()
    assert servers.starts == [Start(str(tmp_path), 7, "1", False, (TABLE,))]


def test_rows_that_were_a_variable_of_few_ids_are_those_of_the_first_ids(tmp_path: Path) -> None:
    few = learner_of(Case(bounded, lambda: (np.arange(9), np.zeros((9, 1), "f4"), None)), Meeting())
    few.model.save(tmp_path / "m.keras")
    kept_dense(few, tmp_path / "checkpoints")
    with rows_elsewhere():
        ours = learner_of(CASE, Meeting())
    for kind in ("m.keras", "checkpoints"):
        servers = Servers()
        start = WarmStart(str(tmp_path / kind), False, ours.model, ours, print, servers=servers)
        start.check()
        start.begin()
        ids, rows = servers.starts[0].rows[0]
        assert ids.tolist() == list(range(9))
        np.testing.assert_array_equal(rows, few.model.get_layer(TABLE).embeddings.numpy())
    start = WarmStart(str(tmp_path / "checkpoints"), True, ours.model, ours, print, servers=servers)
    with pytest.raises(ModelError, match=r"'counts' as a variable .*initFrom.state=weights"):
        start.begin()


def test_rows_that_do_not_fit_a_table_on_servers_are_refused_by_its_name(
    trained: KerasLearner, tmp_path: Path
) -> None:
    kept(trained, tmp_path / "checkpoints")
    with trained.whole():
        trained.model.save(tmp_path / "m.keras")
    others = (
        (partial(build, name="users"), "'users' .* missing there"),
        (partial(build, 3), "'counts' .* length 2"),
    )
    for other, words in others:
        with rows_elsewhere():
            ours = learner_of(Case(other, CASE.data), Meeting())
        before, servers = state(ours), Servers()
        for kind in ("m.keras", "checkpoints"):
            start = WarmStart(str(tmp_path / kind), False, ours.model, ours, print, servers=servers)
            for attempt in (start.check, start.begin):
                with pytest.raises(ModelError, match=words):
                    attempt()
        assert state(ours) == before and not servers.starts


def test_rows_of_another_length_or_name_are_refused_by_name(trained: KerasLearner, tmp_path: Path) -> None:
    kept(trained, tmp_path)
    _, start = frozen(tmp_path, lambda: build(dim=3))
    with pytest.raises(ModelError, match=r"float32 \[3, 1\] here, and float32 \[2, 1\] there"):
        start.check()
    with pytest.raises(ValueError, match=r"'users' has no input_dim, and .* \(it has rows of: 'counts'\)"):
        frozen(tmp_path, lambda: build(name="users"))
    with pytest.raises(ValueError, match="train it with mode=auto or mode=hybrid"):
        build()


def test_what_is_not_there_is_told_when_a_layer_needs_it_and_not_to_models_without_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"none.keras: no such file on this worker"):
        frozen(tmp_path / "none.keras")
    frozen(tmp_path / "none.keras", lambda: keras.Sequential([keras.layers.Dense(1)]))


def test_a_newer_checkpoint_than_the_model_was_built_for_is_not_taken(
    trained: KerasLearner, tmp_path: Path
) -> None:
    kept(trained, tmp_path, step=7, count=20)
    model, start = frozen(tmp_path)
    kept(trained, tmp_path, step=8)
    before = model(ASKED).numpy()
    with pytest.raises(ModelError, match=r"\[30, 2\] rows .* built for \[20, 2\]. If checkpoints are still"):
        start.begin()
    np.testing.assert_array_equal(model(ASKED).numpy(), before)
