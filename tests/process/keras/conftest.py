# SPDX-License-Identifier: Apache-2.0
"""Ranks of a ring are threads here, and each may wait inside a graph of TensorFlow's pool."""

import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(8)
