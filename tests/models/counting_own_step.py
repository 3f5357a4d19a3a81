# SPDX-License-Identifier: Apache-2.0
"""A counting model with its own training step: two networks that count, each with its optimizer.

The gradient of a record that is in the step is so large that clipping makes it one, however many records
there are; of one that is not, it is zero. So each optimizer raises the weights of the step's records by one.
The second network's gradients are zero where the first has not counted: a step where the ring had
the first sum and not the second, or the second without the first, could not be hidden.
"""

import keras
import tensorflow as tf
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from edl.zoo.counting import RECORDS, Count

__all__ = ["data", "feed", "model"]

LARGE = 1e6


@keras.saving.register_keras_serializable("edl")
class CountTwice(keras.Model):
    def train_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        records, _ = batch
        first, second = self.get_layer("first"), self.get_layer("second")
        self.count(first, self.optimizer, records, tf.constant(LARGE))
        ahead = tf.reduce_min(first(records)) - tf.reduce_max(second(records))
        return {"loss": self.count(second, self.second_optimizer, records, LARGE * ahead)}

    def count(
        self, layer: Count, optimizer: keras.optimizers.Optimizer, records: tf.Tensor, factor: tf.Tensor
    ) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -factor * keras.ops.mean(layer(records))
        optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return loss


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    counts = [Count(max(RECORDS, 1), name=name)(record) for name in ("first", "second")]
    model = CountTwice(record, counts)
    model.compile(keras.optimizers.SGD(1.0, clipvalue=1.0))
    model.second_optimizer = keras.optimizers.SGD(1.0, clipvalue=1.0)
    return model
