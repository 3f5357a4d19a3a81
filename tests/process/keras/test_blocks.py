# SPDX-License-Identifier: Apache-2.0
"""training.deterministic: the same bits in rings of any sizes and any history."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import optimizers as o

import edl.layers
from edl import config
from edl.config import values
from edl.contract.layout import StepSlice
from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.exact_sums import BLOCKS
from edl.trainer.ring.local import LocalRing
from edl.trainer.start import build_learner
from edl.trainer.step.blocks import KEPT, BlockLearner, refuse
from tests.process.keras.models import by_weights, dense, plain, tagged, tagger, weighted
from tests.process.keras.ranks import on_ranks
from tests.process.keras.rings import Case, batch

STEPS = ((0, 12), (12, 23), (23, 30), (0, 3))  # the last one has fewer records than blocks


def wide(optimizer: Any = None) -> keras.Model:
    """A model with large gradients, random layers, and statistics of the batch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(160, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(160),
            layers.Reshape((2, 80)),
            layers.Dense(210),  # its gradient is no single product of matrices
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer or o.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae", "mse"])
    return model


CASES = {
    "SGD": Case(dense, plain),
    "weights, Adam": Case(lambda: dense(o.Adam(0.01), metrics=["mae"]), weighted),
    "a table, Adam": Case(lambda: tagger(None, o.Adam(0.01), mask=False), tagged),
    "a masked mean": Case(lambda: tagger(metrics=["accuracy"]), tagged),
    "a mean by weights, Adam": Case(lambda: dense(o.Adam(0.01), by_weights()), weighted),
    "large gradients, dropout, BatchNormalization, clipping": Case(wide, plain),
}


def learner_of(case: Case, ring: LocalRing) -> BlockLearner:
    return BlockLearner(case.build(), batch(case, 0, 5), (), ring.reduce)


def part_of(case: Case, start: int, stop: int, part: StepSlice) -> Any:
    first, end = part.in_blocks(BLOCKS).of(stop - start)
    if first == end:
        return None
    return replace(batch(case, start + first, start + end), place=(first, stop - start))


@pytest.mark.parametrize("name", CASES)
def test_rings_of_any_sizes_have_the_same_bits(name: str) -> None:
    """Rings change between steps and within them; a joining member applies its first step later."""
    case, seed = CASES[name], random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    rings = [LocalRing() for _ in range(5)]
    learners = [learner_of(case, ring) for ring in rings]
    begin = learners[0].state()
    found = []
    for sizes in ((1,) * 4, (2, 3, 3, 5), [chance.randint(1, 5) for _ in STEPS]):
        learners[0].load(begin)
        digests, state = [], learners[0].state()
        for step, (size, (start, stop)) in enumerate(zip(sizes, STEPS, strict=True)):
            shares = tuple(chance.randint(1, 9) for _ in range(size))

            for learner in learners[:size]:
                learner.load(state)
            if size > 1:  # this member has no state yet
                learners[size - 1].load(begin)
                shares = (*shares[:-1], 0)

            def sums(rank: int, step=step, start=start, stop=stop, shares=shares):  # type: ignore[no-untyped-def]
                part = part_of(case, start, stop, StepSlice(rank, shares))
                return learners[rank].allreduce_step(part, control.write(step), step, rank, stop - start)

            results = on_ranks(rings[:size], sums)
            learners[size - 1].load(state)
            for learner, result in zip(learners, results, strict=False):
                assert (result.agreed.records, result.agreed.nonfinite) == (stop - start, False)
                learner.apply(result)
            assert len({learner.digest() for learner in learners[:size]}) == 1
            state = learners[0].state()
            digests.append((learners[0].digest(), results[0].agreed.loss))
        found.append((digests, learners[0].take_metrics()))
    assert found[0] == found[1] == found[2]
    assert len({digest for digest, _ in found[0][0]}) == len(STEPS)


def noisy(x: Any) -> Any:
    """Augmentation that is drawn once, while the graph is traced."""
    return x * np.random.normal(1.0, 0.1)


REFUSED = {
    "takes the whole step": Case(lambda: dense(layers=[layers.BatchNormalization(synchronized=True)]), plain),
    "jit_compile=True": Case(lambda: dense(jit_compile=True), plain),
    "run_eagerly=True": Case(lambda: dense(run_eagerly=True), plain),
    "NumPy's global random numbers": Case(lambda: dense(layers=[layers.Lambda(noisy)]), plain),
    "scales the loss": Case(lambda: dense(o.LossScaleOptimizer(o.SGD())), plain),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_depends_on_the_ring_is_refused_by_name(why: str) -> None:
    with pytest.raises(ModelError, match=f"training.deterministic must be false for this model.*{why}"):
        learner_of(REFUSED[why], LocalRing())


def test_a_step_of_its_own_rows_on_servers_and_gpus_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            raise NotImplementedError

    own = dense()
    own = Own(own.inputs, own.outputs)
    own.compile("sgd", "mse")
    training = config.parse(values.load([], ["training.deterministic=true"])).training
    with pytest.raises(
        ModelError, match=r"deterministic must be false .* own train_step\(\); .* compute_loss"
    ):
        build_learner.learner_of(own, [batch(CASES["SGD"], 0, 5)], build_learner.Alone(), training, print)
    rows = edl.layers.Embedding(2, input_dim=9)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), rows, layers.Flatten(), layers.Dense(2)])
    model.compile("sgd", "mse")
    rows.on_servers = True  # as in mode=hybrid
    with pytest.raises(ModelError, match=r"deterministic must be false .* set mode=train"):
        refuse(model)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    with pytest.raises(ModelError, match=r"TensorFlow sees a GPU; CUDA_VISIBLE_DEVICES=-1 hides it"):
        refuse(model)


def test_a_gradient_that_is_too_large_for_its_quantum_is_computed_again() -> None:
    """The exponent is a part of the state, so a step at a wrong one is no less exact."""
    case, ring = Case(lambda: wide(o.SGD(0.01)), plain), LocalRing()
    learner = learner_of(case, ring)
    part = part_of(case, 0, 12, StepSlice(0, (1,)))
    before, found = learner.state(), []
    for exponent, forced in ((30, True), (18, False)):
        learner.load(before)
        ours: Any = learner._step._ours
        ours.exponents.assign(np.full(ours.exponents.shape, exponent, np.int32))
        [sums] = on_ranks([ring], lambda _: learner.allreduce_step(part, control.write(0), 0, 0, 12))
        assert not sums.agreed.nonfinite
        assert (np.asarray(sums.given[-1]) != KEPT).all() == forced
        learner.apply(sums)
        found.append([learner.model.get_weights(), ours.exponents.numpy()[learner._step.layout.large]])
    for a, b in zip(*(weights for weights, _ in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert (found[0][1] == found[1][1]).all()


def test_a_gradient_that_is_not_finite_is_told() -> None:
    x = np.array(plain()[0])
    x[1, 1] = np.nan
    case, ring = CASES["large gradients, dropout, BatchNormalization, clipping"], LocalRing()
    learner = learner_of(case, ring)
    part = part_of(Case(wide, lambda: (x, *plain()[1:])), 0, 12, StepSlice(0, (1,)))
    [sums] = on_ranks([ring], lambda _: learner.allreduce_step(part, control.write(0), 0, 0, 12))
    assert (sums.agreed.nonfinite, sums.at_fault) == (True, True)


def deep(dtype: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(256, "relu", dtype=dtype) for _ in range(3)]
    model = keras.Sequential([keras.Input((4,), dtype=dtype), *hidden, layers.Dense(2, dtype=dtype)])
    model.compile(o.SGD(1.0), "mse")
    return model


def test_a_rounded_gradient_is_that_of_float64_within_a_ten_thousandth() -> None:
    """docs/ring.md says what the rounding costs; only gradients of 64 KiB or more are rounded so."""
    case, ring = Case(lambda: deep("float32"), plain), LocalRing()
    learner, exact = learner_of(case, ring), deep("float64")
    before = learner.model.get_weights()
    exact.set_weights(before)
    part = part_of(case, 0, 30, StepSlice(0, (1,)))
    [sums] = on_ranks([ring], lambda _: learner.allreduce_step(part, control.write(0), 0, 0, 30))
    learner.apply(sums)
    exact.train_on_batch(*(np.float64(array) for array in plain()[:2]))
    for was, ours, true in zip(before, learner.model.get_weights(), exact.get_weights(), strict=True):
        gradient = was - true
        assert np.linalg.norm(was - ours - gradient) < 1e-4 * np.linalg.norm(gradient)
