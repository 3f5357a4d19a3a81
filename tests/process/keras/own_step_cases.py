# SPDX-License-Identifier: Apache-2.0
"""Models that override `train_step`, with their data, and ranks that train them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.records.batches import Batch
from edl.trainer.ring.local import LocalRing
from edl.trainer.step.own_step import OwnStepLearner
from tests.process.keras import own_models as zoo
from tests.process.keras.ranks import on_ranks

RECORDS, STEPS = 12, 4
CUTS = [0, 1, 12]  # ranks with one record, with the others, and with none


@dataclass(frozen=True)
class Case:
    build: Callable[[], keras.Model]
    x: np.ndarray | tuple[np.ndarray, ...]
    y: np.ndarray | None = None

    def batch(self, start: int, stop: int) -> Batch:
        x, y = keras.tree.map_structure(lambda a: None if a is None else a[start:stop], (self.x, self.y))
        return Batch(np.arange(start, stop), x, y, None)


@dataclass
class Rank:
    """One learner, in a ring that fails on request."""

    case: Case
    sums: int = 0  # made so far
    fails_at: int | None = None  # the sum in which this rank dies
    ring: LocalRing = field(default_factory=LocalRing)

    def __post_init__(self) -> None:
        self.model = self.case.build()
        self.learner = OwnStepLearner(self.model, self.case.batch(0, 5), self.reduce, inexact="allow")

    def reduce(self, vector: Any) -> Any:
        self.sums += 1
        if self.sums == self.fails_at:
            self.ring.cut()
        return self.ring.reduce(vector)

    def step(self, step: int, rank: int, size: int, batch: Batch | None) -> control.Agreed:
        """As a worker makes it."""
        sums = self.learner.allreduce_step(batch, control.write(0), step, rank, RECORDS)
        if sums.agreed.records and not sums.agreed.nonfinite:
            self.learner.apply(sums)
        return sums.agreed


_built: dict[int, tuple[Case, list[Rank], np.ndarray]] = {}


def _build(case: Case) -> tuple[Case, list[Rank], np.ndarray]:
    rank = Rank(case)
    return _built.setdefault(id(case), (case, [rank], rank.learner.state()))


def new_ranks(case: Case, size: int) -> list[Rank]:
    """Ranks with the model as it was built: made once for each case, since tracing takes the time."""
    _, ranks, initial = _built.get(id(case)) or _build(case)
    ranks += [Rank(case) for _ in range(size - len(ranks))]
    for rank in ranks[:size]:
        rank.learner.load(initial)
    return ranks[:size]


def train(ranks: list[Rank], cuts: list[int], steps: int = STEPS) -> list[list[control.Agreed]]:
    """Some steps in one ring, whose last rank may have no part of the batch; what each rank has heard."""
    case = ranks[0].case
    batches: list[Batch | None] = [case.batch(a, b) for a, b in itertools.pairwise(cuts)]
    batches += [None] * (len(ranks) - len(batches))
    return on_ranks(
        [r.ring for r in ranks],
        lambda rank: [ranks[rank].step(s, rank, len(ranks), batches[rank]) for s in range(steps)],
    )


X, Y, Z = zoo.features(RECORDS), zoo.labels(RECORDS, 3), zoo.points(RECORDS)
MEANS = {
    "VAE": Case(lambda: zoo.vae(noise=0.0), X),
    "DCGAN": Case(lambda: zoo.gan(draws=False), X, Z),
    "WGAN-GP": Case(lambda: zoo.gan(draws=False, kind=zoo.WGAN), X, Z),
    "distillation": Case(zoo.distiller, X, Y),
    "compiled metrics": Case(zoo.guided, X, Z),
}
DRAWING = {
    "VAE that draws": Case(lambda: zoo.vae(noise=1.0), X),
    "DCGAN that draws": Case(lambda: zoo.gan(draws=True), X, Z),
    "contrastive learning": Case(zoo.contrastive, X, zoo.labels(RECORDS, 2)),
}


class Eager(zoo.WGAN):
    """Its losses are Python's numbers, which no graph could have."""

    def train_step(self, data: Any) -> Any:
        return {name: float(value) for name, value in super().train_step(data).items()}


class InFunctions(zoo.VAE):
    """Its step calls functions with graphs of their own, the optimizer in one of them."""

    @tf.function
    def losses(self, data: Any) -> Any:
        z_mean, _, z = self.encoder(data)
        return tf.reduce_mean(tf.square(data - self.decoder(z))) + tf.reduce_mean(tf.square(z_mean))

    @tf.function
    def learn(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))  # noqa: B905

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.losses(data)
        self.learn(tape.gradient(loss, self.trainable_weights))
        return {"loss": loss}


class Plain(zoo.VAE):
    """A model with a loss that depends on every weight."""

    def loss_of(self, data: Any) -> Any:
        z_mean, z_log_var, _ = self.encoder(data)
        return tf.reduce_mean(tf.square(data - self.decoder(z_mean + 0.1 * z_log_var)))


class Scaled(Plain):
    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class Noisy(Plain):
    """Draws with a generator of TensorFlow's, whose state moves with the number of records."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.generator = tf.random.Generator.from_seed(5)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data + self.generator.normal(tf.shape(data)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class Normalized(zoo.Distiller):
    """Its student's statistics are those of all records."""

    def __init__(self) -> None:
        super().__init__()
        normalize = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
        layers = [keras.layers.Dense(4), normalize, keras.layers.ReLU(), keras.layers.Dense(3)]
        self.student = keras.Sequential([keras.Input((zoo.WIDTH,)), *layers])


def normalized() -> keras.Model:
    model = Normalized()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss, keras.losses.KLDivergence(), optimizer=keras.optimizers.SGD(0.1))
    return model


def compiled(model: keras.Model, optimizer: Any = None, **options: Any) -> keras.Model:
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **options)
    return model


def seeded(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def seed_and_build() -> keras.Model:
        keras.utils.set_random_seed(3)
        return build()

    return seed_and_build


def eager_gan() -> keras.Model:
    model = zoo.gan(draws=False, kind=Eager)
    model.run_eagerly = True
    return model


def loss_scaled(scale: float) -> keras.Model:
    inner = keras.optimizers.Adam(0.01, clipnorm=0.1)
    return compiled(
        Scaled(0.0), keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=2)
    )


MEANS |= {
    "run eagerly": Case(eager_gan, X, Z),
    "functions in the step": Case(seeded(lambda: compiled(InFunctions(0.0))), X),
    "loss scaling": Case(seeded(lambda: loss_scaled(8.0)), X),
    "loss scaling that overflows": Case(seeded(lambda: loss_scaled(2.0**127)), X),
    "accumulated gradients": Case(
        seeded(lambda: compiled(zoo.VAE(0.0), keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))), X
    ),
    "synchronized BatchNormalization": Case(seeded(normalized), X, Y),
    "averaged weights": Case(
        seeded(
            lambda: compiled(
                zoo.VAE(0.0), keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3)
            )
        ),
        X,
    ),
}


class OfTokens(keras.Model):
    """Looks up rows of a table several times in a batch, and in the parts of several ranks; and those of
    a table of places once in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = keras.layers.Embedding(5, 4), keras.layers.Dense(3)
        self.places = keras.layers.Embedding(3, 4)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            places = self.places(keras.ops.arange(keras.ops.shape(x)[1]))
            logits = self.last(keras.ops.mean(keras.ops.tanh(self.table(x) + places), axis=1))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"nll": loss}


TOKENS = np.random.default_rng(4).integers(0, 5, (RECORDS, 3))
MEANS |= {
    "rows of an Embedding": Case(seeded(lambda: compiled(OfTokens())), TOKENS, Y),
    "rows of an Embedding, run eagerly": Case(
        seeded(lambda: compiled(OfTokens(), keras.optimizers.Adagrad(0.1), run_eagerly=True)), TOKENS, Y
    ),
}


DRAWING["a generator of TensorFlow's"] = Case(seeded(lambda: compiled(Noisy())), X)
