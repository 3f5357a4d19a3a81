# SPDX-License-Identifier: Apache-2.0
"""TensorFlow in own loops: variables, also those of Keras on TensorFlow, and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from edl.trainer.model import snapshot
from edl.trainer.model.adapter import Adapter, Group, Spec


class Variable:
    """A variable of TensorFlow."""

    def __init__(self, name: str, variable: tf.Variable):
        self.names, self._variables = [name], [variable]

    def arrays(self) -> list[np.ndarray]:
        return [snapshot.array(v.read_value()) for v in self._variables]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return snapshot.prepared(self._variables, parts)

    def put(self, values: Any) -> None:
        snapshot.take_over(self._variables, values)

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class TensorFlow(Adapter):
    """TensorFlow."""

    def array(self, value: Any) -> np.ndarray | None:
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        return snapshot.array(value) if tf.is_tensor(value) else None

    def spec(self, value: Any) -> Spec | None:
        if not (tf.is_tensor(value) or isinstance(value, tf.IndexedSlices)):
            return None
        dtype = value.dtype

        def restore(mean: np.ndarray) -> Any:
            with tf.device("CPU:0"):
                found = tf.experimental.dlpack.from_dlpack(mean.__dlpack__())
                return found if found.dtype == dtype else tf.cast(found, dtype)

        return Spec(tuple(value.shape), dtype.name, dtype.is_floating, restore)

    def identity(self, item: Any) -> Any:
        value = getattr(item, "_value", None)
        return value if isinstance(value, tf.Variable) else item

    def group(self, name: str, item: Any) -> Group | None:
        variable = self.identity(item)
        if not isinstance(variable, tf.Variable):
            return None
        return Variable(str(getattr(item, "path", item.name)).partition(":")[0], variable)

    def is_symbolic(self, value: Any) -> bool:
        value = value.values if isinstance(value, tf.IndexedSlices) else value
        return tf.is_tensor(value) and not hasattr(value, "numpy")


ADAPTER = TensorFlow()
