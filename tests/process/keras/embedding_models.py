# SPDX-License-Identifier: Apache-2.0
"""Models whose rows are on servers, for tests: each beside the same model with an ordinary table.

Here the rows are in this process (trainer/embedding/local_rows.py), and begin as those of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import edl.layers
from edl.layers.row_location import rows_elsewhere
from edl.trainer.agreement import control
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.models import TOKENS, WEIGHTS, Y, sgd
from tests.process.keras.rings import STEPS, Case, Meeting, batch, learner_of, parts_of, ring_step
from tests.process.keras.rings import _given as tensor

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


def one_id(optimizer: Any = None) -> keras.Model:
    inputs = ids()
    return of(inputs, K.Dense(2)(E(4, input_dim=MANY)(inputs)), optimizer)


def combined(combiner: str, **options: Any) -> keras.Model:
    inputs = ids(6)
    return of(inputs, K.Dense(2)(E(4, combiner=combiner, input_dim=MANY, **options)(inputs)))


def every_combiner() -> keras.Model:
    """Rows in a row, their mean without padding, and their sum with weights: three tables."""
    inputs, by = ids(6), keras.Input((6,))
    rows = [
        K.Flatten()(E(4, input_dim=MANY)(inputs)),
        E(4, combiner="mean", mask_zero=True, input_dim=MANY)(inputs),
        E(4, combiner="sqrtn", input_dim=MANY)(inputs, by),
    ]
    return of([inputs, by], K.Dense(2)(K.Concatenate()(rows)))


def every_input() -> keras.Model:
    """Ids in ragged and sparse tensors, and texts: three tables."""
    inputs = ids(None, ragged=True), ids(6, sparse=True), ids(6, dtype="string")
    rows = [
        E(4, combiner="mean", input_dim=MANY)(inputs[0]),
        E(4, combiner="sum", input_dim=MANY)(inputs[1]),
        E(4, combiner="sum", mask_zero=True, input_dim=MANY)(inputs[2]),
    ]
    return of([*inputs], K.Dense(2)(K.Concatenate()(rows)))


def of_every_input() -> Any:
    ragged, sparse = tf.RaggedTensor.from_tensor(TOKENS, padding=0), tf.sparse.from_dense(TOKENS)
    return [ragged, sparse, WORDS], Y, None


def shared() -> keras.Model:
    """One table for two features, and one of its own."""
    a, b = ids(3), ids(3)
    table, other = E(4, input_dim=MANY), E(3, combiner="sum", input_dim=MANY)
    x = K.Concatenate()([K.Flatten()(table(a)), K.Flatten()(table(b)), other(b)])
    return of([a, b], K.Dense(2)(x))


def frozen() -> keras.Model:
    """One table that is trained, and one that stays as it begins, though Ftrl would change it."""
    a, b = ids(1), ids(1)
    table, other = E(4, combiner="sum", input_dim=MANY), E(3, combiner="sum", input_dim=MANY, trainable=False)
    x = K.Concatenate()([table(a), other(b)])
    return of([a, b], K.Dense(2)(x), keras.optimizers.Ftrl(0.1))


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
    """A model whose rows Adam updates one by one."""
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
    return one_id(keras.optimizers.Adagrad(schedule))


def tokens() -> Any:
    return TOKENS, Y, None


def first() -> Any:
    return TOKENS[:, 0], Y, None


def all_weighted() -> Any:
    return TOKENS, Y, WEIGHTS


def all_each_step() -> Any:
    return EACH_STEP, Y, None


EACH_STEP = np.arange(30) % 4  # ids that are all in each step
FACTORS = np.random.default_rng(2).random((30, 6)).astype("f4")
CASES = {
    "sum": Case(lambda: combined("sum"), tokens),
    "several ids, mean without padding, sqrtn with weights": Case(
        every_combiner, lambda: ([TOKENS, FACTORS], Y, None)
    ),
    "ragged, sparse, texts": Case(every_input, of_every_input),
    "records of unlike weight": Case(lambda: combined("mean"), all_weighted),
    "a shared table": Case(shared, lambda: ([TOKENS[:, :3], TOKENS[:, 3:]], Y, None)),
    "a nested model": Case(nested, tokens),
    "a model by subclassing": Case(subclassed, tokens),
    "run_eagerly": Case(eager, tokens),
    "mask_zero": Case(masked, tokens),
    "BatchNormalization(synchronized=True)": Case(normalized, tokens),
    "beside keras.layers.Embedding": Case(beside_an_ordinary_one, tokens),
    "nothing but rows": Case(only_rows, tokens),
    "SGD with momentum, all ids in each step": Case(
        lambda: one_id(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)), all_each_step
    ),
    "Adam, all ids in each step": Case(lambda: one_id(keras.optimizers.Adam(0.1)), all_each_step),
    "Ftrl, all ids in each step": Case(lambda: one_id(keras.optimizers.Ftrl(0.1)), all_each_step),
    "Adagrad, a learning rate that decays": Case(decaying, first),
    "a table that is not trained": Case(frozen, lambda: ([EACH_STEP[:, None]] * 2, Y, None)),
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

    def step(self, size: int, nth: int, bad: int = 0) -> control.Agreed:
        parts = parts_of(self.case, size, *STEPS[nth], nth)
        return ring_step(self.learner, self.meeting, parts, nth, self.rows.took, bad)

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
