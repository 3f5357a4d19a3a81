# SPDX-License-Identifier: Apache-2.0
"""An MLP of 25 million parameters on random records.

MLP_PRECISION sets Keras' precision policy. For rehearsals without a GPU, MLP_WIDTH sets the width, and with
MLP_NO_MEMORY a worker fails as on a GPU without free memory.
"""

import os

import keras
import numpy as np
import tensorflow as tf

import edl

WIDTH, RECORDS = int(os.environ.get("MLP_WIDTH", "3536")), 8192


NO_MEMORY = "OOM when allocating tensor with shape[3536,3536] on /device:GPU:0 by allocator GPU_0_bfc"


def model():
    if os.environ.get("MLP_NO_MEMORY"):
        raise tf.errors.ResourceExhaustedError(None, None, NO_MEMORY)
    keras.mixed_precision.set_global_policy(os.environ.get("MLP_PRECISION", "float32"))
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    built = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return built


def data(split):
    if split != "train":
        return None
    random = np.random.default_rng(1)
    return edl.arrays(random.random((RECORDS, WIDTH), np.float32), random.integers(0, 10, RECORDS))


def feed(records):
    return records[0], records[1]
