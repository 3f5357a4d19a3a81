# SPDX-License-Identifier: Apache-2.0
"""Models that override `train_step`: as `fit` trains them, on rings of any size, and all or nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.epochs import Epochs
from edl.trainer.ring.base import RingBroken
from tests.process.keras import own_models as zoo
from tests.process.keras.own_step_cases import (
    CUTS,
    DRAWING,
    MEANS,
    RECORDS,
    STEPS,
    Case,
    Plain,
    Rank,
    X,
    compiled,
    new_ranks,
    seeded,
    train,
)
from tests.process.keras.ranks import on_ranks


@functools.cache
def as_keras_does_it(name: str) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    case = MEANS[name]
    model = case.build()
    history = model.fit(case.x, case.y, batch_size=RECORDS, epochs=STEPS, shuffle=False, verbose=0)
    return weights(model), history.history


def weights(model: keras.Model) -> list[np.ndarray]:
    metrics = {id(v) for m in model.metrics for v in m.variables}
    return [v.numpy() for v in model.variables if id(v) not in metrics and v.name != "seed_generator_state"]


# --- all or nothing


def two_with_a_step_behind_them(case: Case) -> list[Rank]:
    ranks = new_ranks(case, 2)
    train(ranks, [0, 5, 12], steps=1)
    return ranks


@pytest.mark.parametrize("name", ["DCGAN that draws", "contrastive learning"])
def test_a_ring_that_breaks_in_any_sum_of_a_step_leaves_the_model_as_it_was(name: str) -> None:
    """The repeated step is the same one, with the same random numbers."""
    unbroken = two_with_a_step_behind_them(DRAWING[name])
    train(unbroken, [0, 5, 12])
    expected = unbroken[0].learner.digest()
    ranks = two_with_a_step_behind_them(DRAWING[name])
    before = ranks[0].learner.digest()
    for dying, which in ((0, 1), (1, 2), (0, 3)):  # two optimizers' sums, and the worker's own
        ranks[dying].fails_at = ranks[dying].sums + which
        with pytest.raises(RingBroken):
            train(ranks, [0, 5, 12])
        assert [rank.learner.digest() for rank in ranks] == [before] * 2, f"rank {dying}, sum {which}"
        ranks[dying].fails_at = None
    train(ranks, [0, 5, 12])
    assert {rank.learner.digest() for rank in ranks} == {expected}


def test_who_has_not_the_last_sum_is_a_step_behind_and_takes_over_the_state() -> None:
    first, second = ranks = two_with_a_step_behind_them(DRAWING["DCGAN that draws"])
    before = second.learner.digest()

    def work(rank: int) -> None:
        batch = first.case.batch(*[(0, 5), (5, 12)][rank])
        told = control.write(0)
        total = ranks[rank].reduce(ranks[rank].learner.gradients(batch, told, 1, rank))
        if rank == 0:  # for the other one the ring breaks here
            ranks[rank].learner.update(total)

    on_ranks([r.ring for r in ranks], work)
    assert second.learner.digest() == before
    assert first.learner.digest() != before
    second.learner.load(first.learner.state())
    assert second.learner.digest() == first.learner.digest()
    train(ranks, [0, 5, 12])
    assert second.learner.digest() == first.learner.digest()


@pytest.mark.parametrize(
    ("batch", "nonfinite"), [((5, 12), True), (None, False)], ids=["not finite", "no records"]
)
def test_a_step_that_is_not_accepted_has_not_happened(batch: tuple[int, int] | None, nonfinite: bool) -> None:
    case = MEANS["DCGAN"]
    ranks = two_with_a_step_behind_them(case)
    before = ranks[0].learner.digest()
    bad = replace(case, x=np.where(np.arange(RECORDS)[:, None] == 7, np.float32("nan"), X))
    given = bad.batch(*batch) if batch else None
    heard = on_ranks(
        [r.ring for r in ranks], lambda rank: ranks[rank].step(1, rank, 2, given if rank else None)
    )
    assert [agreed.nonfinite for agreed in heard] == [nonfinite] * 2
    for rank in ranks:
        # The model itself: it may be saved now.
        found = [v.numpy() for v in rank.model.discriminator.variables]
        assert rank.learner.digest() == before
        for now, then in zip(rank.model.discriminator.variables, found, strict=True):
            np.testing.assert_array_equal(now.numpy(), then)


# --- what else is in a step


@pytest.mark.parametrize("name", ["VAE that draws", "a generator of TensorFlow's"])
def test_seeds_differ_by_rank_and_step_and_not_when_a_step_is_made_again(name: str) -> None:
    [alone] = new_ranks(DRAWING[name], 1)
    told = control.write(0)

    def made(step: int, rank: int) -> bytes:
        vector = on_ranks(
            [alone.ring], lambda _: alone.learner.gradients(alone.case.batch(0, 12), told, step, rank)
        )
        return np.asarray(vector[0]).tobytes()

    vectors = [made(step, rank) for step, rank in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert vectors[3] == vectors[0]
    assert len(set(vectors)) == 3


def test_what_a_step_assigns_by_itself_is_averaged_by_records_and_counters_count() -> None:
    alone = [spread_of_one_alone(0, 0, 4), spread_of_one_alone(1, 4, 12)]
    ranks = new_ranks(DRAWING["contrastive learning"], 3)

    def work(rank: int) -> None:
        batch = [ranks[0].case.batch(0, 4), ranks[0].case.batch(4, 12), None][rank]
        ranks[rank].step(0, rank, 3, batch)

    on_ranks([r.ring for r in ranks], work)
    spreads = [float(r.model.spread.numpy()) for r in ranks]
    assert len(set(spreads)) == 1
    np.testing.assert_allclose(spreads[0], (4 * alone[0] + 8 * alone[1]) / 12, rtol=1e-5)
    assert [int(r.model.steps.numpy()) for r in ranks] == [1] * 3


def spread_of_one_alone(rank: int, start: int, stop: int) -> float:
    """What one rank makes of its part of the batch, before it hears of the others."""
    [alone] = new_ranks(DRAWING["contrastive learning"], 1)
    told = control.write(0)
    on_ranks([alone.ring], lambda _: alone.learner.gradients(alone.case.batch(start, stop), told, 0, rank))
    return float(alone.model.spread.numpy())


# --- rings


# Their graphs are the largest, and each rank traces its own. Ranks without records are those of the others.
LARGE = ("WGAN-GP", "functions in the step", "compiled metrics")


@pytest.mark.parametrize(("name", "cuts"), [*((name, CUTS) for name in MEANS), ("VAE", [0, 12])])
def test_a_ring_trains_as_fit_does(name: str, cuts: list[int]) -> None:
    reference, history = as_keras_does_it(name)
    ranks = new_ranks(MEANS[name], len(cuts) - (name in LARGE))  # but for these, the last one has no records
    heard = train(ranks, cuts, STEPS - 1)
    for rank in ranks:
        rank.learner.take_metrics()  # each step is an epoch to Keras
    heard = [first + last for first, last in zip(heard, train(ranks, cuts, 1), strict=True)]
    for rank in ranks:
        rank.learner.finish_training()
        for ours, theirs in zip(weights(rank.model), reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert len({rank.learner.digest() for rank in ranks}) == 1
    loss = history["loss" if "loss" in history else next(iter(history))]
    np.testing.assert_allclose([agreed.loss for agreed in heard[-1]], loss, rtol=1e-5)
    assert heard[-1][-1].records == RECORDS
    for rank in ranks:  # all that the step returns
        told = {name: values[-1] for name, values in history.items()}
        assert rank.learner.take_metrics() == pytest.approx(told, rel=1e-5)
        assert rank.learner.take_metrics() == {}


class Tells(Plain):
    """Returns the result of a metric by another name, the loss of the step itself, and a vector."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.total_loss_tracker.update_state(loss)
        scores = {"each": tf.reduce_mean(tf.square(data), 0)}
        return {"d_loss": loss, "tracked": self.total_loss_tracker.result(), "scores": scores}


@pytest.mark.parametrize("eager", [False, True])
def test_an_epoch_of_several_steps_has_the_logs_that_fit_has(eager: bool) -> None:
    case = Case(seeded(lambda: compiled(Tells(0.0), run_eagerly=eager)), X)
    ranks, half = [Rank(case), Rank(case)], RECORDS // 2
    model = case.build()
    model.set_weights(ranks[0].model.get_weights())
    history = model.fit(X, batch_size=half, epochs=1, shuffle=False, verbose=0).history
    parts = [[case.batch(start, start + 2), case.batch(start + 2, start + half)] for start in (0, half)]
    on_ranks(
        [r.ring for r in ranks],
        lambda rank: [ranks[rank].step(s, rank, 2, part[rank]) for s, part in enumerate(parts)],
    )
    entry = Epochs(loss=1.0, records=RECORDS).whole(
        ranks[0].learner.take_metrics(), ranks[0].learner.has_loss
    )
    assert entry.history[0].keys() == history.keys()
    for name, value in entry.history[0].items():
        np.testing.assert_allclose(value, history[name][0], rtol=1e-5)


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_differs_and_the_models_do_not(name: str) -> None:
    ranks = new_ranks(DRAWING[name], len(CUTS))
    before = weights(ranks[0].model)
    heard = train(ranks, CUTS)
    assert len({rank.learner.digest() for rank in ranks}) == 1
    after = weights(ranks[0].model)
    assert all(np.isfinite(w).all() for w in after)
    assert any((a != b).any() for a, b in zip(before, after, strict=True))
    assert all(np.isfinite(agreed.loss) for agreed in heard[0])


# --- what is refused


class WithoutOptimizer(zoo.VAE):
    def train_step(self, data: Any) -> Any:
        for v in self.trainable_weights:
            v.assign(0.9 * v)
        return {"loss": 0.0}


class Sometimes(Plain):
    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)

        def learn() -> tf.Tensor:
            self.optimizer.apply(gradients, self.trainable_weights)
            return loss

        return {"loss": tf.cond(loss > 0.0, learn, lambda: loss)}


class SometimesEagerly(Plain):
    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        for _ in range(1 if len(data) == 5 else 2):
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Double(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=(), dtype="float64")

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.weight * tf.cast(data, tf.float64))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class Silent(zoo.VAE):
    def train_step(self, data: Any) -> Any:
        super().train_step(data)


class Uneven(zoo.VAE):
    """Counts its records in whole numbers."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.seen = self.add_weight(
            name="seen", shape=(), dtype="int64", initializer="zeros", trainable=False
        )

    def train_step(self, data: Any) -> Any:
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(data)[0], "int64"))
        return super().train_step(data)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: WithoutOptimizer(0.0), r"WithoutOptimizer.train_step\(\) calls no Keras optimizer"),
        (lambda: Sometimes(0.0), "calls optimizer 'adam.*' depending on the data"),
        (lambda: Silent(0.0), r"must return a dict of its losses, e.g. \{'loss': loss\}, not None"),
        (Double, "gradient of type float64"),
    ],
    ids=["no optimizer", "sometimes", "no losses", "float64"],
)
def test_what_cannot_be_trained_is_refused_in_words(build: Callable[[], keras.Model], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Rank(Case(seeded(lambda: compiled(build())), X))


def test_a_step_run_eagerly_that_calls_otherwise_than_at_first_is_refused() -> None:
    rank = Rank(Case(seeded(lambda: compiled(SometimesEagerly(0.0), run_eagerly=True)), X))
    before = rank.learner.digest()
    with pytest.raises(ModelError, match=r"calls optimizer 'adam.*' depending on the data"):
        train([rank], [0, 12], steps=1)
    assert rank.learner.digest() == before


def test_whole_numbers_that_change_differently_are_refused() -> None:
    ranks = [Rank(Case(seeded(lambda: compiled(Uneven())), X)) for _ in range(2)]
    with pytest.raises(ModelError, match="changes uneven/seen differently on different workers"):
        train(ranks, [0, 5, 12], steps=1)
    train(ranks, [0, 6, 12], steps=1)
    assert [int(r.model.seen.numpy()) for r in ranks] == [6, 6]
