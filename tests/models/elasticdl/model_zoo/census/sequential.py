# SPDX-License-Identifier: Apache-2.0
"""In the form of ElasticDL's census_sequential: a Sequential whose input is a dict of features."""

import tensorflow as tf
from model_zoo.census.census import eval_metrics_fn, feed, loss, optimizer  # noqa: F401
from model_zoo.census.columns import get_feature_columns


def custom_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.DenseFeatures(feature_columns=get_feature_columns()),
            tf.keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
