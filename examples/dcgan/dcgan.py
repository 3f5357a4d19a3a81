# SPDX-License-Identifier: Apache-2.0
"""A DCGAN: two networks against each other, two optimizers, labels with noise, several draws in one step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import edl

LATENT = 16


@keras.saving.register_keras_serializable()
class GAN(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model, **options: Any):
        super().__init__(**options)
        self.discriminator, self.generator = discriminator, generator
        self.seed = keras.random.SeedGenerator(1337)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"discriminator": self.discriminator, "generator": self.generator}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{name: keras.saving.deserialize_keras_object(part) for name, part in config.items()})

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def fakes(self, count: Any) -> Any:
        return self.generator(keras.random.normal((count, LATENT), seed=self.seed))

    def train_step(self, real: Any) -> Any:
        count = ops.shape(real)[0]
        both = ops.concatenate([self.fakes(count), real], axis=0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((count, 1)), self.discriminator(self.fakes(count)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def discriminator() -> keras.Model:
    x = inputs = keras.Input((8, 8, 1))
    for filters in (16, 32):
        x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(filters, 4, strides=2, padding="same")(x))
    x = layers.Dropout(0.2)(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))


def generator() -> keras.Model:
    inputs = keras.Input((LATENT,))
    x = layers.Reshape((2, 2, 32))(layers.Dense(2 * 2 * 32)(inputs))
    for filters in (32, 16):
        x = layers.Conv2DTranspose(filters, 4, strides=2, padding="same")(x)
        x = layers.LeakyReLU(negative_slope=0.2)(x)
    return keras.Model(inputs, layers.Conv2D(1, 5, padding="same", activation="sigmoid")(x))


def model() -> keras.Model:
    made = GAN(discriminator(), generator())
    first, second = (keras.optimizers.Adam(learning_rate=5e-4, beta_1=0.5) for _ in range(2))
    made.compile(first, second, loss_fn=keras.losses.BinaryCrossentropy())
    return made


def data(split: str) -> Any:
    images = (load_digits().images[..., None] / 16).astype("f4")
    return edl.arrays(images) if split == "train" else None


def feed(records: Any) -> Any:
    return (records[0] if isinstance(records, tuple) else records), None
