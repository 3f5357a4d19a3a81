# SPDX-License-Identifier: Apache-2.0
"""A network with two outputs, for jobs whose time matters, and not what they learn: most of a step is
sleep, and an epoch takes about a minute."""

import time

import keras
import numpy as np

import edl

TRAINED, HELD_OUT, FEATURES, CLASSES = 100_000, 2_000, 16, 4
SLEEP = 0.02  # seconds, for the records of a worker's part of a step


def model() -> keras.Model:
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((FEATURES,))
    for _ in range(2):
        x = keras.layers.BatchNormalization()(keras.layers.Dense(128, "relu")(x))
    outputs = {
        "value": keras.layers.Dense(1, name="value")(x),
        "kind": keras.layers.Dense(CLASSES, name="kind")(x),
    }
    model = keras.Model(inputs, outputs)
    losses = {"value": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(keras.optimizers.Adam(1e-4), losses, metrics={"kind": ["accuracy"]})
    return model


def data(split: str) -> edl.Reader | None:
    if split not in ("train", "validation"):
        return None
    some, many = np.random.default_rng(1), TRAINED if split == "train" else HELD_OUT
    x = some.normal(size=(many, FEATURES)).astype(np.float32)
    return edl.arrays(x, x[:, :1], np.argmax(x[:, :CLASSES], axis=1))


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    time.sleep(SLEEP)
    x, value, kind = records
    return x, {"value": value, "kind": kind}
