# SPDX-License-Identifier: Apache-2.0
"""hvd.SyncBatchNormalization for Keras 3.

Horovod's own class passes `fused` to Keras' layer and overrides a method with the arguments of Keras 2.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the statistics of all ranks while it trains.

    As in Horovod, each rank has the same weight: give all of them batches of one size.

    Args:
        fused: False or left out, as in Horovod.
        options: those of keras.layers.BatchNormalization.

    Raises:
        ValueError: `fused` is true or None.
    """

    def __init__(self, fused: bool | None = False, **options: Any):
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance over the records of all ranks, as `BatchNormalization._moments`."""
        mine, variance = super()._moments(inputs, mask)
        mean = hvd.allreduce(mine, op=hvd.Average)
        # About the mean of all ranks: Horovod subtracts squares of means, which would lose digits.
        return mean, hvd.allreduce(variance + tf.square(mine - mean), op=hvd.Average)
