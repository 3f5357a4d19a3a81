# SPDX-License-Identifier: Apache-2.0
"""Models with their own training steps, written as Keras' examples write them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WIDTH = 6


def network(name: str, *sizes: int, inputs: int = WIDTH, last: str | None = None) -> keras.Model:
    dense = [layers.Dense(n, activation="tanh") for n in sizes[:-1]]
    return keras.Sequential(
        [keras.Input((inputs,)), *dense, layers.Dense(sizes[-1], activation=last)], name=name
    )


class Sampling(layers.Layer):
    """A point of the latent space; `noise` scales what is drawn, zero draws nothing."""

    def __init__(self, noise: float, **options: Any):
        super().__init__(**options)
        self.noise = noise
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(ops.shape(z_mean), dtype=z_mean.dtype, seed=self.seed_generator)
        return z_mean + self.noise * ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    """A variational autoencoder; its one optimizer is the compiled one."""

    def __init__(self, noise: float, **options: Any):
        super().__init__(**options)
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(5, activation="relu")(inputs)
        z_mean, z_log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
        self.encoder = keras.Model(inputs, [z_mean, z_log_var, Sampling(noise)([z_mean, z_log_var])])
        self.decoder = network("decoder", 5, WIDTH, inputs=2, last="sigmoid")
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(ops.sum(ops.square(data - reconstruction), axis=1))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))  # noqa: B905
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


class GAN(keras.Model):
    """A DCGAN: two networks, each with its optimizer. The latent points lie in the data, or are drawn."""

    def __init__(self, draws: bool, **options: Any):
        super().__init__(**options)
        self.discriminator = network("discriminator", 8, 1)
        if draws:
            hidden = [layers.Dense(8), layers.BatchNormalization(), layers.LeakyReLU()]
            self.discriminator = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(1)])
        self.generator = network("generator", 8, WIDTH, inputs=3)
        self.draws = draws
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any, **options: Any) -> None:
        super().compile(**options)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def latent(self, given: Any) -> Any:
        if not self.draws:
            return given
        return keras.random.normal(shape=(ops.shape(given)[0], 3), seed=self.seed_generator)

    def train_step(self, data: Any) -> Any:
        real, given = data
        batch_size = ops.shape(real)[0]
        generated = self.generator(self.latent(given))
        combined = ops.concatenate([generated, real], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined, training=True))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))  # noqa: B905

        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading, self.discriminator(self.generator(self.latent(given))))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))  # noqa: B905

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(GAN):
    """Several critic steps with a gradient penalty for each of the generator's, one dict of optimizers."""

    critic_steps = 2
    metrics: Any = ()

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any = None, **options: Any) -> None:
        super().compile(None, None, loss_fn, **options)
        self.optimizers = {"critic": [d_optimizer], "generator": [g_optimizer]}

    def gradient_penalty(self, real: Any, fake: Any, alpha: Any) -> Any:
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = tape.gradient(pred, [interpolated])[0]
        return ops.mean((ops.sqrt(ops.sum(ops.square(grads), axis=1)) - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        real, given = data
        for i in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(self.latent(given), training=True)
                d_loss = ops.mean(self.discriminator(fake, training=True)) - ops.mean(
                    self.discriminator(real, training=True)
                )
                d_loss = d_loss + 10.0 * self.gradient_penalty(real, fake, (i + 1) / 4)
            grads = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.optimizers["critic"][0].apply(grads, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(
                self.discriminator(self.generator(self.latent(given), training=True), training=True)
            )
        grads = tape.gradient(g_loss, self.generator.trainable_variables)
        self.optimizers["generator"][0].apply(grads, self.generator.trainable_variables)
        return {"d_loss": d_loss, "g_loss": g_loss}


class Distiller(keras.Model):
    """A small network learns from its labels and from a big one that stays as it is."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.teacher, self.student = network("teacher", 16, 3), network("student", 4, 3)

    def compile(self, student_loss_fn: Any, distillation_loss_fn: Any, **options: Any) -> None:
        super().compile(**options)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, predictions)
            distillation_loss = self.distillation_loss_fn(
                ops.softmax(teacher_predictions / 3.0, axis=1), ops.softmax(predictions / 3.0, axis=1)
            )
            loss = 0.1 * student_loss + 0.9 * distillation_loss * 9.0
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables))  # noqa: B905
        results = self.compute_metrics(x, y, predictions, sample_weight=None)
        return {**results, "student_loss": student_loss, "distillation_loss": distillation_loss}


class Contrastive(keras.Model):
    """SimCLR: two drawn views of each record, a contrastive optimizer and a linear probe with another.

    Its averaged encoder follows the encoder by assignments of the step's own.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.encoder, self.averaged = network("encoder", 8, 4), network("averaged", 8, 4)
        self.averaged.trainable = False
        self.augment = layers.GaussianNoise(0.3, seed=7)
        self.probe = network("probe", 2, inputs=4)
        self.steps = self.add_weight(
            name="steps", shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.spread = tf.Variable(1.0, trainable=False)

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            one, other = (
                ops.normalize(self.encoder(self.augment(x, training=True), training=True), axis=1)
                for _ in range(2)
            )
            similarities = ops.matmul(one, ops.transpose(other)) / 0.1
            labels = ops.arange(ops.shape(x)[0])
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
                + keras.losses.sparse_categorical_crossentropy(
                    labels, ops.transpose(similarities), from_logits=True
                )
            )
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, self.encoder.trainable_weights))  # noqa: B905
        for follower, leader in zip(self.averaged.weights, self.encoder.weights, strict=True):
            follower.assign(0.9 * follower + 0.1 * leader)
        with tf.GradientTape() as tape:
            class_logits = self.probe(self.encoder(x, training=False), training=True)
            probe_loss = self.probe_loss(y, class_logits)
        gradients = tape.gradient(probe_loss, self.probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.probe.trainable_weights))  # noqa: B905
        self.probe_accuracy.update_state(y, class_logits)
        self.steps.assign_add(1)
        self.spread.assign(0.5 * self.spread + 0.5 * ops.std(similarities))
        return {"c_loss": loss, "p_loss": probe_loss, "p_acc": self.probe_accuracy.result()}


class Guided(keras.Model):
    """The steps of Keras' guide: what they return has the results of the compiled metrics within it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("inner", 5, 3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training=training)

    def measured(self, x: Any, y: Any, y_pred: Any) -> Any:
        loss = self.compute_loss(x, y, y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return loss

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.measured(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.measured(x, y, self(x, training=False))
        return {m.name: m.result() for m in self.metrics}


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, clipnorm=1.0)


def vae(noise: float) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = VAE(noise)
    model.compile(optimizer=adam())
    return model


def gan(draws: bool, kind: type[GAN] = GAN) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = kind(draws)
    model.compile(adam(), keras.optimizers.RMSprop(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def distiller() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Distiller()
    model.compile(
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def guided() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Guided()
    model.compile(adam(), "mse", metrics=["mae"])
    return model


def contrastive() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Contrastive()
    model.compile(adam(), adam())
    return model


def features(records: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(size=(records, WIDTH)).astype("f4")


def labels(records: int, classes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, records)


def points(records: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(records, 3)).astype("f4")
