# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a student learns from labels and from a teacher, by `compute_loss` and `call`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import edl


@keras.saving.register_keras_serializable()
class Distiller(keras.Model):
    def __init__(self, student: keras.Model, teacher: keras.Model, **options: Any):
        super().__init__(**options)
        self.student, self.teacher = student, teacher

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"student": self.student, "teacher": self.teacher}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{name: keras.saving.deserialize_keras_object(part) for name, part in config.items()})

    def compile(self, student_loss_fn: Any, alpha: float, temperature: float, **options: Any) -> None:
        super().compile(**options)
        self.student_loss_fn, self.alpha, self.temperature = student_loss_fn, alpha, temperature
        self.distillation_loss_fn = keras.losses.KLDivergence()

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        allow_empty: Any = 0,
    ) -> Any:
        taught = self.teacher(x, training=False) / self.temperature
        student = ops.softmax(y_pred / self.temperature, axis=1)
        distillation = self.distillation_loss_fn(ops.softmax(taught, axis=1), student) * self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation

    def call(self, x: Any) -> Any:
        return self.student(x)


def network(filters: int, name: str) -> keras.Model:
    x = inputs = keras.Input((8, 8, 1))
    for factor in (1, 2):
        x = layers.Conv2D(filters * factor, 3, strides=2, padding="same")(x)
        x = layers.LeakyReLU(negative_slope=0.2)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)), name=name)


def model() -> keras.Model:
    teacher, student = network(8, "teacher"), network(2, "student")
    teacher.trainable = False
    made = Distiller(student, teacher)
    made.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        alpha=0.1,
        temperature=10,
    )
    return made


def arrays() -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    return chance.uniform(size=(48, 8, 8, 1)).astype("f4"), chance.integers(0, 3, 48)


def data(split: str) -> Any:
    return edl.arrays(*arrays()) if split == "train" else None  # random labels cannot be predicted
