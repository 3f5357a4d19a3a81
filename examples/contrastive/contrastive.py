# SPDX-License-Identifier: Apache-2.0
"""SimCLR: two views of each image, told from those of all others in a batch; a linear probe beside it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import edl

TEMPERATURE = 0.1


class ContrastiveModel(keras.Model):
    def __init__(self, **options: Any):
        super().__init__(**options)
        flips = [layers.RandomFlip("horizontal", seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)]
        self.augmenter = keras.Sequential(
            [keras.Input((8, 8, 1)), *flips, layers.RandomBrightness(0.3, value_range=(0, 1), seed=3)]
        )
        convolutions = [layers.Conv2D(8, 3, strides=2, activation="relu") for _ in range(2)]
        encoding = [*convolutions, layers.Flatten(), layers.Dense(8, activation="relu")]
        self.encoder = keras.Sequential([keras.Input((8, 8, 1)), *encoding])
        projections = [layers.Dense(8, activation="relu"), layers.Dense(8)]
        self.projection_head = keras.Sequential([keras.Input((8,)), *projections])
        self.linear_probe = keras.Sequential([keras.Input((8,)), layers.Dense(10)])

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("c_loss", "p_loss")]
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self) -> list[Any]:
        return [*self.trackers, self.accuracy]

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
        alike = ops.matmul(one, ops.transpose(other)) / TEMPERATURE
        own = ops.arange(ops.shape(one)[0])
        ways = (alike, ops.transpose(alike))
        entropy = keras.losses.sparse_categorical_crossentropy
        return sum(ops.mean(entropy(own, way, from_logits=True)) for way in ways) / 2

    def train_step(self, data: Any) -> Any:
        images, labels = data
        views = [self.augmenter(images, training=True) for _ in range(2)]
        learning = [*self.encoder.trainable_weights, *self.projection_head.trainable_weights]
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(*(self.projection_head(self.encoder(view)) for view in views))
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, learning), learning, strict=True))
        probing = self.linear_probe.trainable_weights
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(self.augmenter(images, training=True), training=False))
            probe_loss = self.probe_loss(labels, logits)
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, probing), probing, strict=True))
        for tracker, value in zip(self.trackers, (loss, probe_loss), strict=True):
            tracker.update_state(value)
        self.accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}


def model() -> keras.Model:
    made = ContrastiveModel()
    made.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    return made


def data(split: str) -> Any:
    images = (load_digits().images[..., None] / 16).astype("f4")
    labels = load_digits().target
    return edl.arrays(images, labels) if split == "train" else None
