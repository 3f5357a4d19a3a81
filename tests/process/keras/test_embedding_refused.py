# SPDX-License-Identifier: Apache-2.0
"""What no rows on servers can be made of is refused, with what to write instead."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.layers.row_location import rows_elsewhere
from edl.ps.table import initializers
from edl.trainer.agreement import control
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.step.own_step import OwnStepLearner
from tests.process.keras.embedding_models import CASES, MANY, E, K, beside, first, ids, of, one_id, tokens
from tests.process.keras.models import TOKENS, Y, sgd
from tests.process.keras.rings import Case, Meeting, batch, learner_of


def refused(build: Any, data: Any = tokens) -> str:
    with pytest.raises(ModelError) as error, rows_elsewhere():
        learner_of(Case(build, data), Meeting())
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
    initializers.parse(tables[0].initializer, "t", dim)  # a server takes it


def test_an_id_out_of_bounds_is_named() -> None:
    both = beside(CASES["sum"])
    x = np.array(TOKENS)
    x[3, 2] = MANY
    with pytest.raises(DataError, match="layer 'embedding' is given the id 64; its input_dim is 64"):
        both.learner.allreduce_step(
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
