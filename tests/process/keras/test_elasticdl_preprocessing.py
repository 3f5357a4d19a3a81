# SPDX-License-Identifier: Apache-2.0
"""The layers of elasticdl_preprocessing, for dense, sparse and ragged tensors, as in a module of the zoo."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.compat.elasticdl import preprocessing, stand_ins
from edl.errors import ModelError

pytestmark = pytest.mark.process

LAYERS = "elasticdl_preprocessing.layers"
NUMBERS = [[1.2, 1.6], [0.2, 3.1], [100.0, 2.0]]
TEXTS = [["A", "B"], ["D", "C"], ["", "A"]]
HERE = [[True, False], [True, True], [False, True]]  # the values of the sparse and the ragged tensor
# The modules of the layers, their arguments, an input, and what ElasticDL's layers make of it.
CASES: dict[str, tuple[str, dict[str, Any], list[list[Any]], list[list[Any]]]] = {
    "Discretization": ("discretization", {"bins": [0.2, 2, 3]}, NUMBERS, [[1, 1], [1, 3], [3, 2]]),
    "Hashing": ("hashing", {"num_bins": 3}, [["A", "B"], ["C", "D"], ["E", "A"]], [[1, 0], [1, 1], [2, 1]]),
    "IndexLookup": ("index_lookup", {"vocabulary": ["A", "B", "C"]}, TEXTS, [[0, 1], [3, 2], [3, 0]]),
    "LogRound": ("log_round", {"num_bins": 16, "base": 2}, NUMBERS, [[0, 1], [0, 2], [7, 1]]),
    "Normalizer": (
        "normalizer",
        {"subtractor": 1.0, "divisor": 2.0},
        [[3, 5], [7, 1], [0, 2]],
        [[1.0, 2.0], [3.0, 0.0], [-0.5, 0.5]],
    ),
    "RoundIdentity": (
        "round_identity",
        {"num_buckets": 4, "default_value": 3},
        NUMBERS,
        [[1, 2], [0, 3], [3, 2]],
    ),
    "ToNumber": (
        "to_number",
        {"out_type": tf.float32, "default_value": -1},
        [["1", ""], ["2.5", "3"], ["", "4"]],
        [[1.0, -1.0], [2.5, 3.0], [-1.0, 4.0]],
    ),
}
OTHERS = {"ConcatenateWithOffset", "SparseEmbedding", "ToRagged", "ToSparse"}


def imported(module: str, name: str) -> Any:
    """Import a layer from the package and from its module, as the zoo does; they are the same."""
    with stand_ins.importable():
        of_package = getattr(importlib.import_module(LAYERS), name)
        of_module = getattr(importlib.import_module(f"{LAYERS}.{module}"), name)
    assert of_package is of_module
    return of_module


def kinds(dense: tf.Tensor) -> dict[str, Any]:
    """The values as tensors of each kind."""
    where = np.argwhere(HERE)
    sparse = tf.SparseTensor(where, tf.gather_nd(dense, where), tf.shape(dense, out_type=tf.int64))
    return {"dense": dense, "sparse": sparse, "ragged": tf.ragged.boolean_mask(dense, HERE)}


def as_list(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.values.numpy().tolist()
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


def saved_and_loaded(model: keras.Model, folder: Path) -> keras.Model:
    model.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def test_there_are_no_other_layers() -> None:
    assert {*preprocessing.LAYERS} == CASES.keys() | OTHERS
    with stand_ins.importable(), pytest.raises(ModelError, match=r"layers\.Other: edl has no .*\.to_sparse"):
        importlib.import_module(f"{LAYERS}.Other")


@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_the_values_of_elasticdl(name: str, tmp_path: Path) -> None:
    module, arguments, values, expected = CASES[name]
    layer = imported(module, name)(**arguments)
    for kind, given in kinds(tf.constant(values)).items():
        found = layer(given)
        assert isinstance(found, type(given))
        assert found.dtype == (tf.float32 if isinstance(expected[0][0], float) else tf.int64)
        assert as_list(found) == as_list(kinds(tf.constant(expected))[kind])

    inputs = keras.Input((2,), dtype=tf.constant(values).dtype.name)
    loaded = saved_and_loaded(keras.Model(inputs, layer(inputs)), tmp_path)
    assert as_list(loaded(tf.constant(values))) == expected


def test_values_are_left_out_of_ragged_and_sparse_tensors() -> None:
    to_ragged, to_sparse = imported("to_ragged", "ToRagged"), imported("to_sparse", "ToSparse")
    ids, texts = tf.constant([[1, -1], [0, 4]], tf.int64), tf.constant(TEXTS)
    assert to_ragged()(ids).to_list() == [[1], [0, 4]]
    assert to_ragged()(texts).to_list() == [[b"A", b"B"], [b"D", b"C"], [b"A"]]
    assert to_ragged(ignore_value="A")(texts).to_list() == [[b"B"], [b"D", b"C"], [b""]]
    assert to_ragged()(tf.constant([[0.0, -1.0]])).to_list() == [[0.0, -1.0]]
    found = to_sparse()(ids)
    assert found.indices.numpy().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert as_list(found) == [1, 0, 4] and found.dense_shape.numpy().tolist() == [2, 2]
    assert as_list(to_sparse()(texts)) == [b"A", b"B", b"D", b"C", b"A"]
    assert as_list(to_sparse()(tf.constant([[0.0, -1.0]]))) == [-1.0]
    assert as_list(to_sparse(ignore_value=4)(ids)) == [1, -1, 0]


def test_ids_of_several_columns_share_one_embedding(tmp_path: Path) -> None:
    """The transformations of ElasticDL's wide_deep_functional_keras, of two columns."""
    to_sparse, hashing = imported("to_sparse", "ToSparse"), imported("hashing", "Hashing")
    discretization = imported("discretization", "Discretization")
    concatenate = imported("concatenate_with_offset", "ConcatenateWithOffset")
    embedding = imported("sparse_embedding", "SparseEmbedding")
    job, age = keras.Input((1,), dtype="string", name="job"), keras.Input((1,), name="age")
    buckets = discretization([30, 60])
    columns = [hashing(5)(to_sparse()(job)), buckets(to_sparse()(age))]
    ids = concatenate([0, 5])(columns)
    vectors = embedding(input_dim=5 + buckets.num_bins(), output_dim=3)(ids)
    model = keras.Model([job, age], vectors)

    given = [tf.constant([["A"], [""], ["B"]]), tf.constant([[25.0], [70.0], [0.0]])]
    [table] = model.get_weights()
    a, b = tf.strings.to_hash_bucket_fast(["A", "B"], 5).numpy()
    expected = [(table[a] + table[5]) / 2, table[7], table[b]]  # neither "" nor an age of 0 has an id
    np.testing.assert_allclose(model(given), expected, rtol=1e-6)
    np.testing.assert_allclose(saved_and_loaded(model, tmp_path)(given), expected, rtol=1e-6)

    dense = concatenate([0, 10], axis=1)([tf.constant([[1], [2]]), tf.constant([[3], [4]])])
    assert as_list(dense) == [[1, 13], [2, 14]]
    assert as_list(concatenate(None)([tf.constant([[1]]), tf.constant([[2]])])) == [[1, 2]]
    with pytest.raises(ModelError, match="ConcatenateWithOffset: 1 offsets for 2 tensors"):
        concatenate([0])([dense, dense])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Hashing", {"num_bins": 0}, "Hashing: num_bins is 0, expected a positive number"),
        ("Normalizer", {"subtractor": 1, "divisor": 0}, "Normalizer: divisor is 0"),
        ("IndexLookup", {"vocabulary": ["A", "B", "A"]}, "IndexLookup: the vocabulary has 'A' more than onc"),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        preprocessing.LAYERS[name](**arguments)


def test_a_vocabulary_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("A\nB \n")
    layer = preprocessing.LAYERS["IndexLookup"](str(tmp_path / "words.txt"), num_oov_tokens=0)
    assert as_list(layer(tf.constant(["B", "C"]))) == [1, -1] and layer.vocab_size() == 2
