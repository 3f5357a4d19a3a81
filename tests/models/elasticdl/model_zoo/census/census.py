# SPDX-License-Identifier: Apache-2.0
"""In the form of ElasticDL's census_subclass: feature columns, a loss for each record."""

import tensorflow as tf
from model_zoo.census.columns import NUMBERS, TEXTS, get_feature_columns
from tensorflow.python.keras.metrics import accuracy


class CustomModel(tf.keras.Model):
    def __init__(self, feature_columns):
        super().__init__(name="census")
        self.feature_layer = tf.keras.layers.DenseFeatures(feature_columns)
        self.dense = tf.keras.layers.Dense(6, activation="relu")
        self.output_layer = tf.keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs, training=None):
        return self.output_layer(self.dense(self.feature_layer(inputs)))


def custom_model():
    return CustomModel(get_feature_columns())


def loss(labels, predictions):
    labels = tf.expand_dims(labels, axis=1)
    return tf.keras.losses.binary_crossentropy(labels, predictions)


def optimizer():
    return tf.keras.optimizers.Adam()


def eval_metrics_fn():
    return {
        "accuracy": lambda labels, predictions: accuracy(
            tf.cast(tf.squeeze(tf.round(predictions)), tf.int32), tf.cast(labels, tf.int32)
        )
    }


def feed(dataset, mode, _):
    def _parse_data(record):
        features = {key: tf.io.FixedLenFeature([], tf.string) for key in TEXTS}
        features |= {key: tf.io.FixedLenFeature([], tf.float32) for key in NUMBERS}
        parsed = tf.io.parse_single_example(record, features | {"label": tf.io.FixedLenFeature([], tf.int64)})
        return parsed, parsed.pop("label")

    return dataset.map(_parse_data)
