# SPDX-License-Identifier: Apache-2.0
"""A convolutional variational autoencoder: its step draws, and returns three losses."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import edl

LATENT = 2


@keras.saving.register_keras_serializable()
class Sample(layers.Layer):
    """A point of the latent space, drawn about its mean."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(11)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        return mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seed)


@keras.saving.register_keras_serializable()
class VAE(keras.Model):
    def __init__(self, encoder: keras.Model, decoder: keras.Model, **options: Any):
        super().__init__(**options)
        self.encoder, self.decoder = encoder, decoder
        names = ("total_loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"encoder": self.encoder, "decoder": self.decoder}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{name: keras.saving.deserialize_keras_object(part) for name, part in config.items()})

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, images: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, log_variance, point = self.encoder(images)
            unlike = keras.losses.binary_crossentropy(images, self.decoder(point))
            reconstruction = ops.mean(ops.sum(unlike, axis=(1, 2)))
            divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
            kl = ops.mean(ops.sum(divergence, axis=1)) / 2
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (total, reconstruction, kl), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def encoder() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Dense(32, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    return keras.Model(inputs, [mean, log_variance, Sample()([mean, log_variance])])


def decoder() -> keras.Model:
    inputs = keras.Input((LATENT,))
    x = layers.Reshape((4, 4, 16))(layers.Dense(4 * 4 * 16, activation="relu")(inputs))
    x = layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x))


def model() -> keras.Model:
    made = VAE(encoder(), decoder())
    made.compile(optimizer=keras.optimizers.Adam(0.005))
    return made


def data(split: str) -> Any:
    images = (load_digits().images[..., None] / 16).astype("f4")
    return edl.arrays(images) if split == "train" else None


def feed(records: Any) -> Any:
    return (records[0] if isinstance(records, tuple) else records), None
