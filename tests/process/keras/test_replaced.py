# SPDX-License-Identifier: Apache-2.0
"""Large embeddings of Keras as rows on servers, in models that do not know of these: ps.replaceEmbeddings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import edl.layers
from edl.errors import ModelError
from edl.layers.row_location import rows_elsewhere, saved_tables
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.replacement import replaced
from edl.trainer.embedding.saved_rows import counted_in_file
from edl.trainer.export import saved_file
from tests.process.keras.rings import Case, Meeting, learner_of, parts_of, ring_step

pytestmark = pytest.mark.process
WORDS, LENGTH, LARGE = 50, 7, 50 * 4
ROWS = keras.initializers.Constant(0.5)


def functional() -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int64")
    x = layers.Embedding(WORDS, 4, embeddings_initializer=ROWS, mask_zero=True)(ids)
    return keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def sequential() -> keras.Model:
    """A model whose ids are floats, as those of an Input without a dtype."""
    table = layers.Embedding(input_dim=WORDS, output_dim=4, embeddings_initializer=ROWS)
    return keras.Sequential([keras.Input((LENGTH,)), table, layers.Flatten(), layers.Dense(1)])


class Tower(layers.Layer):
    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.words = layers.Embedding(WORDS, 4, embeddings_initializer=ROWS)

    def call(self, ids: Any) -> Any:
        return keras.ops.mean(self.words(ids), 1)


class Subclassed(keras.Model):
    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.tower, self.bias = Tower(), layers.Embedding(WORDS, 1)  # which is small
        self.out = layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.out(self.tower(ids)) + keras.ops.mean(self.bias(ids), 1)


def compiled(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        keras.utils.set_random_seed(3)
        keras.backend.clear_session()  # names as in a process of its own
        model = build()
        model.compile(keras.optimizers.SGD(0.5), loss="mse")
        return model

    return made


def data() -> tuple[Any, Any, None]:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, WORDS, (30, LENGTH))
    return ids, ids.mean(1, keepdims=True).astype(np.float32) / WORDS, None


@pytest.mark.parametrize("build", [functional, sequential, Subclassed])
def test_a_model_learns_the_same_with_its_large_tables_replaced(build: Callable[[], keras.Model]) -> None:
    ids = data()[0]

    def trained(least: int) -> tuple[np.ndarray, Any, list[str]]:
        meeting = Meeting()
        with rows_elsewhere(), replaced(least) as told:
            case = Case(compiled(build), data)
            learner = learner_of(case, meeting)
        rows = LocalRows(learner.tables)
        learner.use(rows)
        for step in range(3):
            ring_step(learner, meeting, parts_of(case, 2, 0, 30), step, rows.took)
        with learner.whole():
            return learner.model.predict(ids, verbose=0), learner, told

    expected, plain, told = trained(0)
    assert not plain.tables and not told
    outputs, ours, told = trained(LARGE)
    (table,) = ours.tables
    assert [line.endswith(f"edl.layers.Embedding (ps.replaceEmbeddings is {LARGE})") for line in told] == [
        True
    ]
    assert f"layer {table.name!r}, keras.layers.Embedding({WORDS}, 4)," in told[0]
    assert table.name in {layer.name for layer in plain.model._flatten_layers()}, "names stay as they were"
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


class AllRows(LocalRows):
    """Rows as servers have them, with initial rows for unlearned ids."""

    def rows_of(self, table: int, ids: np.ndarray) -> np.ndarray:
        nothing = np.zeros(0, np.int64)
        return self.pull(0, [ids if n == table else nothing for n in range(len(self._tables))])[table]


@pytest.mark.parametrize("build", [functional, sequential, Subclassed])
def test_what_is_saved_has_the_layer_that_the_model_had(
    build: Callable[[], keras.Model], tmp_path: Path
) -> None:
    meeting, ids = Meeting(), data()[0]
    with rows_elsewhere(), replaced(LARGE):
        learner = learner_of(Case(compiled(build), data), meeting)
    rows = AllRows(learner.tables)
    learner.use(rows)
    ring_step(learner, meeting, parts_of(Case(compiled(build), data), 1, 0, 5), 0, rows.took)
    assert len(rows.all_rows(0)[0]) < WORDS, "some ids are not to be learned"
    path = tmp_path / "m.keras"
    with learner.whole():
        expected = learner.model.predict(ids, verbose=0)
        saved_file.save(learner.model, path)
        weights = saved_file.weights_digest(learner.model)
    assert [item.name for item in tmp_path.iterdir()] == ["m.keras"]
    custom = {each.__name__: each for each in (Tower, Subclassed)}
    with warnings.catch_warnings():  # the layer's rows have no slots in the optimizer
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        loaded: Any = keras.models.load_model(path, custom_objects=custom)
    kinds = {type(layer) for layer in loaded._flatten_layers()}
    assert layers.Embedding in kinds and edl.layers.Embedding not in kinds
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), expected, rtol=1e-6)
    assert saved_file.weights_digest(loaded) == weights
    if build is not Subclassed:
        assert saved_file.note(path) == "", "nothing but Keras is needed"


def test_what_is_saved_begins_an_evaluation_with_the_layers_replaced_or_not(tmp_path: Path) -> None:
    meeting, ids, path = Meeting(), data()[0], tmp_path / "m.keras"
    with rows_elsewhere(), replaced(LARGE):
        learner = learner_of(Case(compiled(functional), data), meeting)
    rows = AllRows(learner.tables)
    learner.use(rows)
    ring_step(learner, meeting, parts_of(Case(compiled(functional), data), 1, 0, 30), 0, rows.took)
    with learner.whole():
        expected = learner.model.predict(ids, verbose=0)
        saved_file.save(learner.model, path)
    for least in (0, LARGE):
        with saved_tables(lambda: counted_in_file(path)), replaced(least):
            evaluated = compiled(functional)()
        evaluated.load_weights(path)
        np.testing.assert_allclose(evaluated.predict(ids, verbose=0), expected, rtol=1e-6)


def test_what_rows_on_servers_cannot_have_is_refused_by_name_and_small_ones_never() -> None:
    with replaced(LARGE) as told:
        for argument in ("embeddings_regularizer", "embeddings_constraint"):
            value = "l2" if argument.endswith("regularizer") else "non_neg"
            with pytest.raises(ModelError, match=rf"Embedding\(50, 4\) 'words': .* not know {argument}"):
                layers.Embedding(WORDS, 4, name="words", **{argument: value})
            assert isinstance(layers.Embedding(WORDS, 3, **{argument: value}), layers.Embedding)
        kept = layers.Embedding(WORDS, 4, weights=[np.ones((WORDS, 4))], name="given")
        assert kept.embeddings.shape == (WORDS, 4) and "'given' stays a variable: it is given" in told[0]
        assert isinstance(layers.Embedding(WORDS, 4, trainable=False), layers.Embedding)
        with pytest.raises(ValueError, match="input_dim"):
            layers.Embedding(0, 4)
        assert isinstance(layers.Embedding(WORDS, 4), edl.layers.Embedding)
        assert len(told) == 3
        counted_by_numpy = layers.Embedding(np.int64(WORDS), np.int32(4))
        assert isinstance(counted_by_numpy, edl.layers.Embedding) and len(told) == 4
    assert isinstance(layers.Embedding(WORDS, 4), layers.Embedding), "the context has ended"
    assert layers.Embedding(WORDS, 4)(np.zeros((2, 3))).shape == (2, 3, 4)


def test_a_table_that_model_loads_from_a_file_stays_the_variable_that_has_its_weights(tmp_path: Path) -> None:
    compiled(functional)().save(tmp_path / "m.keras")
    with rows_elsewhere(), replaced(LARGE) as told:
        loaded: Any = keras.models.load_model(tmp_path / "m.keras")
    assert [layer for layer in loaded.layers if isinstance(layer, layers.Embedding)]
    assert ["stays a variable: it is loaded with its weights" in line for line in told] == [True]
