# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's operations on symbolic tensors of Keras, and the layer DenseFeatures.

Keras 2 turned `tf.reshape(symbolic, ...)` into a layer; Keras 3 refuses it. TensorFlow asks its dispatchers
about each operation, so one dispatcher is enough to make the layer again. It acts only inside `dispatched()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import serialization_lib
from tensorflow.python.feature_column import feature_column_v2, serialization
from tensorflow.python.util import dispatch, tf_export

from edl.compat.elasticdl.columns import COLUMNS
from edl.errors import ModelError

PACKAGE = "edl.elasticdl"
SLOT = "edl_tensor"  # key of a placeholder for the nth tensor among an operation's arguments


@keras.saving.register_keras_serializable(package=PACKAGE)
class Operation(keras.layers.Layer):
    """A layer that calls an operation of TensorFlow.

    Args:
        operation: the operation, or its public name such as "math.reduce_sum".
        arguments: its arguments and keyword arguments; a dict {SLOT: n} stands for the nth tensor.
    """

    def __init__(self, operation: Any, arguments: Any, **others: Any):
        super().__init__(**others)
        self.autocast = False  # an operation takes its tensors in their own types
        self.operation = _by_name(operation) if isinstance(operation, str) else operation
        self.arguments = arguments

    def call(self, *tensors: Any) -> Any:
        args, named = _filled(self.arguments, tensors)
        return self.operation(*args, **named)

    def compute_output_spec(self, *tensors: Any) -> Any:
        # Keras 3.15 marks the product of a number and a dense tensor as sparse.
        return super().compute_output_spec(*(keras.KerasTensor(t.shape, t.dtype) for t in tensors))

    def get_config(self) -> dict[str, Any]:
        name = tf_export.get_canonical_name_for_symbol(self.operation)
        if name is None:
            raise ModelError(f"{self.operation} has no public name in TensorFlow, so it cannot be saved")
        arguments = serialization_lib.serialize_keras_object(self.arguments)
        return {**super().get_config(), "operation": name, "arguments": arguments}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Operation:
        arguments = serialization_lib.deserialize_keras_object(config.pop("arguments"))
        return cls(arguments=arguments, **config)


def _by_name(name: str) -> Callable[..., Any]:
    found: Any = tf
    for part in name.split("."):
        found = getattr(found, part)
    operation: Callable[..., Any] = found
    return operation


def _filled(value: Any, tensors: Any) -> Any:
    """The value with the tensors in place of their placeholders."""
    if isinstance(value, dict):
        if SLOT in value:
            return tensors[value[SLOT]]
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, tensors) for part in value)
    return value


def _emptied(value: Any, tensors: list[Any]) -> Any:
    """The value with placeholders in place of symbolic tensors, which are appended to `tensors`."""
    if isinstance(value, keras.KerasTensor):
        tensors.append(value)
        return {SLOT: len(tensors) - 1}
    if isinstance(value, dict):
        return {key: _emptied(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_emptied(part, tensors) for part in value)
    return value


class _Dispatcher(dispatch.GlobalOpDispatcher):
    def handle(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not _active.depth:
            return self.NOT_SUPPORTED
        tensors: list[Any] = []
        arguments = [_emptied(list(args), tensors), _emptied(dict(kwargs), tensors)]
        return Operation(op, arguments)(*tensors) if tensors else self.NOT_SUPPORTED


class _Active(threading.local):
    depth = 0


_active = _Active()
_Dispatcher().register()


@contextmanager
def dispatched() -> Iterator[None]:
    """Inside this context, and on this thread, TensorFlow's operations take symbolic tensors of Keras."""
    _active.depth += 1
    try:
        yield
    finally:
        _active.depth -= 1


class _Variables(feature_column_v2.StateManager):
    """The variables of feature columns, as variables of a layer."""

    def __init__(self, layer: keras.layers.Layer):
        self._layer = layer
        self._variables: dict[Any, keras.Variable] = {}
        self._resources: dict[Any, Any] = {}

    def create_variable(
        self,
        feature_column: Any,
        name: str,
        shape: Any,
        dtype: Any = None,
        trainable: bool = True,
        use_resource: bool = True,
        initializer: Any = None,
    ) -> None:
        def initial(shape: Any, dtype: Any = None) -> Any:
            return initializer(shape, dtype=tf.as_dtype(dtype or "float32"))

        self._variables[feature_column, name] = self._layer.add_weight(
            shape=tuple(shape),
            initializer=initial if callable(initializer) else initializer or "glorot_uniform",
            trainable=trainable and self._layer.trainable,
            name=f"{feature_column.name.replace('/', '_')}_{name}",
        )

    def get_variable(self, feature_column: Any, name: str) -> Any:
        return tf.convert_to_tensor(self._variables[feature_column, name])

    def add_resource(self, feature_column: Any, name: str, resource: Any) -> None:
        # As an attribute of the layer, which a SavedModel keeps.
        setattr(self._layer, f"resource_{len(self._resources)}", resource)
        self._resources[feature_column, name] = resource

    def has_resource(self, feature_column: Any, name: str) -> bool:
        return (feature_column, name) in self._resources

    def get_resource(self, feature_column: Any, name: str) -> Any:
        return self._resources[feature_column, name]


@keras.saving.register_keras_serializable(package=PACKAGE)
class DenseFeatures(keras.layers.Layer):
    """The layer of Keras 2 that turns feature columns into one dense tensor, float32 [batch, n].

    Args:
        feature_columns: columns of tf.feature_column; their order does not matter, as in Keras 2.
    """

    def __init__(self, feature_columns: Any, trainable: bool = True, **others: Any):
        super().__init__(trainable=trainable, **others)
        self.autocast = False
        columns = feature_column_v2._normalize_feature_columns(feature_columns)
        self._columns = sorted(columns, key=lambda column: column.name)
        self._state = _Variables(self)

    def build(self, input_shape: Any = None) -> None:
        for column in self._columns:
            column.create_state(self._state)
        self.built = True

    def call(self, features: Any) -> Any:
        wide = {name: tf.expand_dims(t, -1) if t.shape.rank == 1 else t for name, t in features.items()}
        cache = feature_column_v2.FeatureTransformationCache(wide)
        found = [column.get_dense_tensor(cache, self._state) for column in self._columns]
        return tf.concat(
            [tf.reshape(t, [-1, _width(c)]) for t, c in zip(found, self._columns, strict=True)], -1
        )

    def compute_output_spec(self, features: Any) -> Any:
        return keras.KerasTensor((None, sum(map(_width, self._columns))))

    def get_config(self) -> dict[str, Any]:
        columns = serialization.serialize_feature_columns(self._columns)
        return {**super().get_config(), "feature_columns": columns}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DenseFeatures:
        columns = serialization.deserialize_feature_columns(config.pop("feature_columns"), COLUMNS)
        return cls(columns, **config)


def _width(column: Any) -> int:
    width: int = column.variable_shape.num_elements()
    return width
