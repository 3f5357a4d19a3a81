# SPDX-License-Identifier: Apache-2.0
"""What a model may be given: text, ragged and sparse arrays, no labels, batches of any length."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from edl import arrays as in_memory
from edl.contract.layout import StepSlice
from edl.errors import DataError
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.model.user_model import UserModel
from edl.trainer.records import arrays
from edl.trainer.records.records import Records
from edl.trainer.runtime.watchdog import unwatched
from tests.process.keras.models import CLASSES, RECORDS, TAGS, TOKENS, X, Y, dense, plain, sgd, tagger
from tests.process.keras.rings import Case, Meeting, assert_same, batch, learner_of, ring_step

K = keras.layers
WORDS = np.array(["red", "green", "blue"])[CLASSES]
TEXTS = np.array([" ".join(WORDS[: 1 + i % 4]) for i in range(RECORDS)])


def of(inputs: Any, outputs: Any, loss: Any = "mse", **compiled: Any) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(sgd(), loss, **compiled)
    return model


def seeded(build: Any) -> Any:
    def built() -> keras.Model:
        keras.utils.set_random_seed(3)
        return build()

    return built


def lookup() -> keras.Model:
    text = keras.Input((), dtype="string")
    ids = K.StringLookup(vocabulary=["red", "green", "blue"])(text)
    return of(text, K.Dense(2)(K.Embedding(5, 3)(ids)))


def vectorized() -> keras.Model:
    text = keras.Input((), dtype="string")
    ids = K.TextVectorization(output_sequence_length=4, vocabulary=["red", "green", "blue"])(text)
    return of(text, K.Dense(2)(K.Flatten()(K.Embedding(6, 3)(ids))))


def feature_space() -> keras.Model:
    space = keras.utils.FeatureSpace(
        {"colour": "string_categorical", "size": "float_normalized"}, output_mode="concat"
    )
    rows = {"colour": WORDS.reshape(-1, 1), "size": X[:, :1]}
    space.adapt(tf.data.Dataset.from_tensor_slices(rows).batch(10))
    return of(space.get_inputs(), K.Dense(2)(space.get_encoded_features()))


def rows() -> Any:
    return {"colour": WORDS.reshape(-1, 1), "size": X[:, :1]}, Y, None


def ragged() -> keras.Model:
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    embedded = K.Lambda(
        lambda ids: (
            tf.reduce_mean(tf.gather(tf.eye(9), ids), axis=1).to_tensor(shape=(None, 9))
            if isinstance(tf.reduce_mean(tf.gather(tf.eye(9), ids), axis=1), tf.RaggedTensor)
            else tf.reduce_mean(tf.gather(tf.eye(9), ids), axis=1)
        ),
        output_shape=(9,),
    )(inputs)
    return of(inputs, K.Dense(2)(embedded))


def ragged_data() -> Any:
    return tf.RaggedTensor.from_tensor(TOKENS, padding=0), Y, None


def sparse() -> keras.Model:
    inputs = keras.Input((9,), sparse=True)
    return of(inputs, K.Dense(2)(inputs))


def sparse_data() -> Any:
    return tf.sparse.from_dense(np.eye(9, dtype="f4")[TOKENS[:, 0]] * 2), Y, None


class Endpoint(keras.layers.Layer):
    def call(self, targets: Any, predicted: Any) -> Any:
        self.add_loss(ops.mean(ops.square(targets - predicted)))
        return predicted


def endpoint() -> keras.Model:
    x, y = keras.Input((4,), name="x"), keras.Input((2,), name="y")
    return of({"x": x, "y": y}, Endpoint()(y, K.Dense(2)(x)), loss=None)


def autoencoder() -> keras.Model:
    x = keras.Input((4,))

    class Reconstructing(keras.Model):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            return ops.mean(ops.square(x - y_pred))

    model = Reconstructing(x, K.Dense(4)(K.Dense(2)(x)))
    model.compile(sgd())
    return model


def named_ends() -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    both = K.Concatenate()([a, b])
    model = keras.Model({"a": a, "b": b}, {"p": K.Dense(2, name="p")(both), "q": K.Dense(3, name="q")(both)})
    model.compile(sgd(), {"p": "mse", "q": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    return model


def to_longest(part: Any) -> Any:
    """As feed() pads: to the longest record of the batch."""
    x, y, weights = part
    longest = max(1, int((x > 0).sum(axis=1).max()))
    return x[:, :longest], y[:, :longest], weights


CASES = {
    "StringLookup": Case(seeded(lookup), lambda: (WORDS, Y, None)),
    "TextVectorization": Case(seeded(vectorized), lambda: (TEXTS, Y, None)),
    "FeatureSpace": Case(seeded(feature_space), rows),
    "ragged": Case(seeded(ragged), ragged_data),
    "sparse": Case(seeded(sparse), sparse_data),
    "an endpoint layer, no labels": Case(seeded(endpoint), lambda: ({"x": X, "y": Y}, None, None)),
    "an autoencoder, no labels": Case(seeded(autoencoder), lambda: (X, None, None)),
    "dicts of inputs and outputs": Case(
        seeded(named_ends), lambda: ({"a": X, "b": -X}, {"p": Y, "q": CLASSES}, None)
    ),
    "float64 arrays": Case(dense, lambda: (X.astype("f8"), Y.astype("f8"), None)),
    "padded to the longest record of a batch, masked": Case(
        tagger, lambda: (TOKENS, TAGS, None), padded=to_longest
    ),
    "run_eagerly": Case(lambda: dense(run_eagerly=True), plain),
    "run_eagerly, masked": Case(lambda: tagger(run_eagerly=True), lambda: (TOKENS, TAGS, None)),
    "jit_compile": Case(lambda: dense(jit_compile=True), plain),
    "steps_per_execution": Case(lambda: dense(steps_per_execution=4), plain),
}


@pytest.mark.filterwarnings("ignore:.*structure of `inputs`")  # of a FeatureSpace: Keras warns of its own
@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])


def test_batches_that_become_longer_are_traced_for_when_they_come() -> None:
    """The first records do not show it."""
    wide = np.zeros((RECORDS, 8), "int32")
    wide[:, 0] = 1 + CLASSES
    wide[12:, :5] = 2
    case = Case(tagger, lambda: (wide, np.where(wide > 0, 1, 0), None), padded=to_longest)
    assert_same(case)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X[:, :3], "has other shapes than the batches before it"),
        (X.astype("i8"), r"features is int64 \[any, 4\], but was float32 \[any, 4\]"),
        (X[:, :, None], r"features is float32 \[any, 4, 1\]"),
        ({"a": X}, r"has the arrays features\['a'\], labels, but the first had features, labels"),
    ],
    ids=["a dimension", "a type", "a rank", "a structure"],
)
def test_a_batch_that_is_not_like_the_first_is_refused_in_words(x: Any, words: str) -> None:
    meeting = Meeting()
    learner = learner_of(Case(dense, plain), meeting)
    with pytest.raises(DataError, match=words):
        ring_step(learner, meeting, [batch(Case(dense, lambda: (x, Y, None)), 0, 12)])


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        (lambda r: (r[0][:-1], r[1][:-1]), r"of 5, features has 4 records \(records 10, 11, 12, 13, 14\)"),
        (lambda r: (np.repeat(r[0], 2, axis=0), r[1]), "of 5, features has 10 records"),
        (lambda r: ({"a": r[0]}, r[1][:2]), "of 5, labels has 2 records"),
        (lambda r: (r[0], r[1], 0.5), "weights has a single value"),
        (lambda r: {"a": r[0]}, "must give .* not dict"),
    ],
)
def test_feed_must_keep_the_number_of_records(feed: Any, words: str) -> None:
    records = Records(in_memory(X, Y), feed, "mine")
    with pytest.raises(DataError, match=words):
        records.batch(10, 15, StepSlice.even(0, 1))


@pytest.mark.filterwarnings("ignore:.*structure of `inputs`")
@pytest.mark.parametrize(
    "name",
    [
        "StringLookup",
        "TextVectorization",
        "FeatureSpace",
        "ragged",
        "dicts of inputs and outputs",
        "an endpoint layer, no labels",
        "an autoencoder, no labels",
    ],
)
def test_the_final_evaluation_takes_what_training_takes(name: str) -> None:
    case = CASES[name]
    model, (x, y, _) = case.build(), case.data()
    module = UserModel("mine", case.build, lambda split: None, lambda r: (x_of(r), y_of(r)))

    def x_of(r: Any) -> Any:
        return keras.tree.map_structure(lambda a: arrays.cut(a, int(r[0][0]), int(r[0][-1]) + 1), x)

    def y_of(r: Any) -> Any:
        return (
            None if y is None else keras.tree.map_structure(lambda a: a[int(r[0][0]) : int(r[0][-1]) + 1], y)
        )

    got = evaluate(model, module, in_memory(np.arange(RECORDS), np.arange(RECORDS)), unwatched)
    given = keras.tree.map_structure(
        lambda a: arrays.tensor(arrays.standard(a)), (x,) if y is None else (x, y)
    )
    expected = model.evaluate(tf.data.Dataset.from_tensors(given), verbose=0, return_dict=True)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
