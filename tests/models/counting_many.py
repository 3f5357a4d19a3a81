# SPDX-License-Identifier: Apache-2.0
"""A counting model of several weights that a ring sums one by one, and that must agree in the end.

So a step is several collectives, and most of its time is spent between the first and the last of them: where
there are 16,384 records or more, each weight is a sum of its own. Their gradients are one and the same: what
TensorFlow might take for one sum must be as many as the ranks expect.

The backward pass comes by one weight after the other. A file `<process id>.between` in the directory
EDL_FAULTS names one of them: there the worker kills itself, when the sums of the weights before it are under
way or back, and those that follow have not begun.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import keras
import tensorflow as tf
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from edl.zoo.counting import RECORDS, Count, MinusOutput

__all__ = ["data", "feed", "model"]

COUNTS = 6
UNDER_WAY_SECONDS = 0.01  # in which the sums that have begun may come back


@keras.saving.register_keras_serializable("edl")
class Between(keras.layers.Layer):
    """What goes in comes out. On the way back the worker may end here."""

    def __init__(self, place: int, **kwargs: object):
        super().__init__(**kwargs)
        self.place = place

    def call(self, x: object) -> object:
        @tf.custom_gradient
        def through(x: object) -> tuple[object, object]:
            return tf.identity(x), self.gradient

        return through(x)

    def gradient(self, above: tf.Tensor) -> tf.Tensor:
        passed = tf.py_function(self.pass_by, [above], above.dtype)
        passed.set_shape(above.shape)
        return passed

    def pass_by(self, above: tf.Tensor) -> tf.Tensor:
        order = Path(os.environ.get("EDL_FAULTS", ".")) / f"{os.getpid()}.between"
        with contextlib.suppress(FileNotFoundError):
            if order.read_text() == str(self.place):
                order.unlink()
                time.sleep(UNDER_WAY_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)
        return above

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "place": self.place}


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    x = None
    for place in range(COUNTS, 0, -1):  # the way back goes from 1 to COUNTS
        count = Count(max(RECORDS, 1), name=f"count_{place}")(record)
        x = Between(place)(count if x is None else keras.layers.Add()([count, x]))
    model = keras.Model(record, x)
    model.compile(keras.optimizers.SGD(1.0), MinusOutput(reduction="sum"))
    return model
