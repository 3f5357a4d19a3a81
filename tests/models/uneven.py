# SPDX-License-Identifier: Apache-2.0
"""A model whose records each take a while, twice as long on one worker: the first that asks for it.

It sleeps instead of computing, as if each worker had a device of its own, and one device were slower.
"""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import edl

RECORDS, SECONDS = 24_000, 0.002  # of a record


def slowness() -> int:
    try:
        os.close(os.open(Path(os.environ["EDL_BENCH"]) / "slow", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1
    return 2


@keras.saving.register_keras_serializable("edl")
class Device(keras.layers.Layer):
    def build(self, input_shape: object) -> None:
        self.slowness = slowness()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def work(records: tf.Tensor) -> np.float32:
            time.sleep(int(records) * SECONDS * self.slowness)
            return np.float32(0)

        nothing = tf.py_function(work, [tf.shape(x)[0]], tf.float32)
        return x + tf.ensure_shape(nothing, ())

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape


def model() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Device(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def data(split: str) -> edl.Reader | None:
    zeros = np.zeros((RECORDS, 4), np.float32)
    return edl.arrays(zeros, zeros[:, 0]) if split == "train" else None
