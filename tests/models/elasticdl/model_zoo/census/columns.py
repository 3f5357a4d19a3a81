# SPDX-License-Identifier: Apache-2.0
"""The feature columns of census.py, which imports this file by the name of its zoo."""

import tensorflow as tf
from elasticdl.python.elasticdl.feature_column import feature_column
from elasticdl_preprocessing.feature_column import feature_column as concatenated

TEXTS, NUMBERS = ["workclass", "native-country"], ["age", "hours-per-week"]


def get_feature_columns():
    known = tf.feature_column.categorical_column_with_vocabulary_list("workclass", ["Private", "State-gov"])
    hashed = [tf.feature_column.categorical_column_with_hash_bucket(key, hash_bucket_size=8) for key in TEXTS]
    return [
        *(tf.feature_column.numeric_column(key) for key in NUMBERS),
        *(feature_column.embedding_column(column, dimension=3) for column in hashed),
        tf.feature_column.embedding_column(
            concatenated.concatenated_categorical_column([hashed[1], known]), dimension=2
        ),
    ]
