# SPDX-License-Identifier: Apache-2.0
"""A module of ElasticDL's zoo that counts its records: each in a row of a table, and all in a weight.

The table is on parameter servers, if the job has them, and the weight in the ring. Training idles until a
file exists.
"""

import os
import time

import tensorflow as tf
from elasticdl.python.common.constants import Mode
from elasticdl.python.elasticdl.layers.embedding import Embedding

GO = "/data/go"  # on the volume of the data, for all workers at once
IDLE_SECONDS = 0.5  # in each step
IDS = 1 << 16  # records at most
BATCH = 256.0  # records of a step, of whose losses the mean is minimized


def custom_model():
    ids = tf.keras.Input(shape=(), dtype="int64", name="id")
    row = Embedding(2, input_dim=IDS, embeddings_initializer="zeros", name="counts")(ids)
    one = tf.cast(tf.ones_like(tf.expand_dims(ids, 1)), tf.float32)
    total = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="total")(one)
    return tf.keras.Model(inputs=ids, outputs=tf.concat([row, total], axis=1), name="counting")


def loss(labels, predictions):
    return -tf.reduce_mean(tf.reduce_sum(predictions, axis=1))


def optimizer():
    """Each record adds one to each number."""
    return tf.keras.optimizers.SGD(BATCH)


def feed(dataset, mode, _):
    def _idle():
        if not os.path.exists(GO):
            time.sleep(IDLE_SECONDS)

    def _parse_data(records):
        idle = [tf.py_function(_idle, [], [])] if mode == Mode.TRAINING else []
        with tf.control_dependencies(idle):
            ids = tf.strings.to_number(records, tf.int64)
        return {"id": ids}, tf.zeros_like(ids)

    return dataset.batch(1 << 24).map(_parse_data).unbatch()


def eval_metrics_fn():
    return {"counted": lambda labels, predictions: tf.reduce_mean(predictions[:, :2], axis=1)}
