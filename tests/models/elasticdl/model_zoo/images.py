# SPDX-License-Identifier: Apache-2.0
"""In the form of ElasticDL's mnist_functional_api: one feature, a mean as loss, shuffling in feed().

The layers are those of TensorFlow's private Keras, as in resnet50_subclass.
"""

import tensorflow as tf
from elasticdl.python.common.constants import Mode
from tensorflow.python.keras import layers, regularizers


def custom_model():
    inputs = tf.keras.Input(shape=(4, 4), name="image")
    x = layers.Reshape((4, 4, 1))(inputs)
    x = layers.Conv2D(4, kernel_size=(2, 2), activation="relu")(x)
    x = layers.Flatten()(x)
    outputs = layers.Dense(3, kernel_regularizer=regularizers.l2(0.01))(x)
    return tf.keras.Model(inputs=inputs, outputs=outputs, name="images")


def loss(labels, predictions):
    labels = tf.reshape(labels, [-1])
    return tf.reduce_mean(
        input_tensor=tf.nn.sparse_softmax_cross_entropy_with_logits(logits=predictions, labels=labels)
    )


def optimizer(lr=0.1):
    return tf.optimizers.SGD(lr)


def feed(dataset, mode, _):
    def _parse_data(record):
        if mode == Mode.PREDICTION:
            features = {"image": tf.io.FixedLenFeature([4, 4], tf.float32)}
        else:
            features = {
                "image": tf.io.FixedLenFeature([4, 4], tf.float32),
                "label": tf.io.FixedLenFeature([1], tf.int64),
            }
        r = tf.io.parse_single_example(record, features)
        features = {"image": tf.math.divide(tf.cast(r["image"], tf.float32), 255.0)}
        if mode == Mode.PREDICTION:
            return features
        return features, tf.cast(r["label"], tf.int32)

    dataset = dataset.map(_parse_data)
    if mode == Mode.TRAINING:
        dataset = dataset.shuffle(buffer_size=1024)
    return dataset


def eval_metrics_fn():
    return {
        "accuracy": lambda labels, predictions: tf.equal(
            tf.argmax(predictions, 1, output_type=tf.int32),
            tf.cast(tf.reshape(labels, [-1]), tf.int32),
        )
    }
