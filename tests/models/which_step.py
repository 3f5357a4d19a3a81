# SPDX-License-Identifier: Apache-2.0
"""A counting model that also says when: each weight tells in which steps its record was applied, a digit an
epoch.

The learning rate is the number of the step, and the gradient of a record's weight is minus one.
"""

from typing import Any

import keras
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from edl.zoo.counting import RECORDS, Count, MinusOutput

__all__ = ["BASE", "BATCH", "data", "feed", "model"]

BATCH, BASE = 48, 64  # float32 is exact for four digits of this base


@keras.saving.register_keras_serializable("edl")
class NumberOfTheStep(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, per_epoch: int):
        self.per_epoch = per_epoch

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "int32")
        epoch, within = step // self.per_epoch, step % self.per_epoch
        return keras.ops.cast((within + 1) * keras.ops.cast(BASE, "int32") ** epoch, "float32")

    def get_config(self) -> dict[str, object]:
        return {"per_epoch": self.per_epoch}


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    model = keras.Model(record, Count(RECORDS)(record))
    rate = NumberOfTheStep(-(-RECORDS // BATCH))
    model.compile(keras.optimizers.SGD(rate), loss=MinusOutput(reduction="sum"))
    return model
