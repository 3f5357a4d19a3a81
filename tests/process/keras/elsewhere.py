# SPDX-License-Identifier: Apache-2.0
"""Steps of a model whose variables are on another device than the first: the second of two CPUs.

As of a GPU, nothing of it may be taken to be where Python reads arrays. Prints, of each device, where the
variables are and the digest of the state after three steps in a ring of one.
"""

import keras
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.step.layout import SMALL
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.models import plain
from tests.process.keras.rings import STEPS, Case, batch

UNITS = SMALL // 8  # the first kernel is large, and its gradient a product of matrices


def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(UNITS, activation="tanh")(x)
    made = keras.Model(inputs, keras.layers.Dense(2)(x))
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def main() -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], 2 * [tf.config.LogicalDeviceConfiguration()]
    )
    ring = HorovodRing(0, "lo", "alone")
    ring.form(0, 1)
    case = Case(model, plain)
    for device in ("CPU:0", "CPU:1"):
        with tf.device(device):
            learner = KerasLearner(case.build(), batch(case, 0, 5), (), ring.reduce, in_graph=ring.in_graph)
            for step, (start, stop) in enumerate(STEPS):
                part = batch(case, start, stop)
                summed = learner.allreduce_step(part, control.write(step), step, 0, stop - start)
                assert summed.agreed.records == stop - start, summed.agreed
                learner.apply(summed)
        where = {v.value.device.rpartition("/device:")[2] for v in learner.model.trainable_variables}
        print(*where, learner.digest(), flush=True)
    ring.close()


if __name__ == "__main__":
    main()
