# SPDX-License-Identifier: Apache-2.0
"""Modules of ElasticDL's model zoo, run as they lie in their folder (docs/coming-from-elasticdl.md).

contract      the functions of a module, as the functions that edl calls
model         the user's Keras model, with the user's loss and metrics
records       the records that a module's feed() parses
stand_ins     the packages elasticdl and elasticdl_preprocessing, as far as modules of the zoo import them
preprocessing the layers of elasticdl_preprocessing
columns       its feature column
operations    TensorFlow's operations on symbolic tensors of Keras, and DenseFeatures
"""
