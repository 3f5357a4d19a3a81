# SPDX-License-Identifier: Apache-2.0
"""Sixteen bits: the ring scales and skips as Keras does; the arithmetic has three digits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.process.keras.models import X, Y, dense, plain, tagged, tagger
from tests.process.keras.rings import Case, Meeting, assert_same, batch, learner_of, parts_of, ring_step

HALF = 2e-4


def under(policy: str, build: Any) -> Any:
    def built() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return build()
        finally:
            keras.config.set_dtype_policy(before)

    return built


def growing() -> keras.optimizers.Optimizer:
    """Doubles its scale after each step, so that it soon is too large."""
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**22, dynamic_growth_steps=1
    )


CASES = {
    "mixed_float16": Case(under("mixed_float16", dense), plain, tolerance=HALF),
    "mixed_float16, masked": Case(under("mixed_float16", tagger), tagged, tolerance=HALF),
    "mixed_bfloat16": Case(under("mixed_bfloat16", dense), plain, tolerance=3e-3),
    "float32 with a scaled loss": Case(
        lambda: dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))), plain
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])


def test_a_scale_that_is_too_large_is_halved_on_all_ranks_as_keras_does() -> None:
    case, meeting = Case(under("mixed_float16", lambda: dense(growing())), plain, tolerance=HALF), Meeting()
    reference, learner = case.build(), learner_of(case, meeting)
    reference.set_weights(learner.model.get_weights())
    scales = []
    for step in range(6):
        whole = batch(case, 0, 12)
        reference.train_on_batch(whole.x, whole.y)
        agreed = ring_step(learner, meeting, parts_of(case, 3, 0, 12), step)
        assert not agreed.nonfinite  # only a gradient is too large: the step is not refused
        scales.append(float(learner.model.optimizer.dynamic_scale.numpy()))
        assert scales[-1] == float(reference.optimizer.dynamic_scale.numpy()), scales
    assert min(scales) < 2.0**22, "no step was too large"
    assert int(learner.model.optimizer.iterations) == int(reference.optimizer.iterations) < 6
    for ours, theirs in zip(learner.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-2)


def test_a_loss_that_is_not_finite_is_flagged_all_the_same() -> None:
    x = X.copy()
    x[3, 0] = np.nan
    case, meeting = Case(under("mixed_float16", dense), lambda: (x, Y, None)), Meeting()
    assert ring_step(learner_of(case, meeting), meeting, parts_of(case, 2, 0, 12)).nonfinite
