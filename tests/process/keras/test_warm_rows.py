"""`checkpoint.from` of a model whose rows were on parameter servers: who takes them, and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import edl.layers
from edl.checkpoints import Store, Tensor
from edl.errors import ConfigError, ModelError
from edl.layers.embedding import rows_elsewhere, saved_tables
from tests.checkpoints import manifest_of
from tests.process.keras.rings import Case, Meeting, learner_of, parts_of, ring_step
from tests.process.keras.test_warm_start import state, warm
from tests.unit.test_rows_of_a_checkpoint import tensors as of_server
from trainer.frozen import FrozenLearner
from trainer.learner import KerasLearner
from trainer.local_rows import LocalRows
from trainer.warm_start import WarmStart, saved_counts

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
    described = zip(of.described(), of.parts(), strict=True)
    tensors = {d.name: Tensor(d.dtype, d.shape, part.data) for d, part in described}
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
    learner = FrozenLearner(model, np.asarray)
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
    assert len(np.unique(expected[-2:])) == 1, "ids that nobody knows have the same row"


@pytest.mark.parametrize("kind", ["m.keras", "checkpoints"])
def test_a_training_whose_rows_are_on_servers_is_refused_and_not_changed(
    trained: KerasLearner, tmp_path: Path, kind: str
) -> None:
    kept(trained, tmp_path / "checkpoints")
    with trained.whole():
        trained.model.save(tmp_path / "m.keras")
    with rows_elsewhere():
        ours = learner_of(CASE, Meeting())
    before, start = state(ours), warm(ours, tmp_path / kind)
    for attempt in (start.check, start.begin):
        with pytest.raises(ModelError, match="the rows of 'counts' are on parameter servers"):
            attempt()
    assert state(ours) == before


def test_rows_of_another_length_or_name_are_refused_by_name(trained: KerasLearner, tmp_path: Path) -> None:
    kept(trained, tmp_path)
    _, start = frozen(tmp_path, lambda: build(dim=3))
    with pytest.raises(ModelError, match=r"float32 \[3, 1\] here, and float32 \[2, 1\] there"):
        start.check()
    with pytest.raises(ValueError, match=r"'users' has no input_dim, and .* \(it has rows of: 'counts'\)"):
        frozen(tmp_path, lambda: build(name="users"))
    with pytest.raises(ValueError, match="train it with mode=hybrid"):
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
