# SPDX-License-Identifier: Apache-2.0
"""Keras in own loops, on JAX and on PyTorch. Its variables on TensorFlow are TensorFlow's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from edl.trainer.model import tensors
from edl.trainer.model.adapter import Adapter, Group, viewed


class Variable:
    """A variable of Keras."""

    def __init__(self, variable: keras.Variable):
        self.names, self._variable = [variable.path], variable
        self._like = self.arrays()

    def arrays(self) -> list[np.ndarray]:
        value = self._variable.value
        return [np.array(tensors.array(value), order="C")]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return viewed(parts, self._like)

    def put(self, values: Any) -> None:
        self._variable.assign(values[0])

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class Keras(Adapter):
    """Keras, except on TensorFlow."""

    def group(self, name: str, item: Any) -> Group | None:
        if not isinstance(item, keras.Variable) or keras.backend.backend() == "tensorflow":
            return None
        return Variable(item)


ADAPTER = Keras()
