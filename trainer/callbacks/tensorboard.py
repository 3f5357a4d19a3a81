# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard shows of a job: a point for each epoch.

    train, validation   loss, metrics and learning rate, by the names that Keras' callback gives them
    ring                ring_size at the epoch's last step; ring_changes, stall_seconds and goodput since
                        the first step of the worker that writes

The files are written with TensorFlow alone; the package `tensorboard` is needed only to look at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from edl.trainer.agreement.metric_values import as_numbers, values_of

VALIDATION = "val_"


class Scalars(keras.callbacks.Callback):
    """Replaces keras.callbacks.TensorBoard.

    Args:
        directory: its `log_dir`.
    """

    def __init__(self, directory: str):
        super().__init__()
        self._directory = Path(directory)
        self._writers: dict[str, Any] = {}
        self._facts: Mapping[str, float] = {}

    def tell(self, facts: Mapping[str, float]) -> None:
        """Set facts about the ring, to be logged with the next epoch."""
        self._facts = facts

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        values = {**as_numbers(values_of(logs or {})), **_learning_rates(self.model)}
        of_train = {k: v for k, v in values.items() if not k.startswith(VALIDATION)}
        of_validation = {k.removeprefix(VALIDATION): v for k, v in values.items() if k not in of_train}
        self._write("train", epoch, {f"epoch_{k}": v for k, v in of_train.items()})
        self._write("validation", epoch, {f"epoch_{k}": v for k, v in of_validation.items()})
        self._write("ring", epoch, self._facts)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self, run: str, epoch: int, values: Mapping[str, float]) -> None:
        if not values:
            return
        if run not in self._writers:  # on the worker that writes, once there is something to write
            self._writers[run] = tf.summary.create_file_writer(str(self._directory / run))
        kind = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
        metadata = tf.compat.v1.SummaryMetadata(plugin_data=kind)
        with self._writers[run].as_default():
            for name, value in values.items():
                tf.summary.write(name, tf.constant(value, tf.float32), step=epoch, metadata=metadata)
        self._writers[run].flush()


def _learning_rates(model: keras.Model) -> dict[str, float]:
    """The learning rates, as Keras' callback determines them."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if several := getattr(optimizer, "optimizers", None):
        return {f"learning_rate_{one.name}": _number(one.learning_rate) for one in several}
    return {"learning_rate": _number(optimizer.learning_rate)} if hasattr(optimizer, "learning_rate") else {}


def _number(tensor: Any) -> float:
    return float(keras.ops.convert_to_numpy(tensor))
