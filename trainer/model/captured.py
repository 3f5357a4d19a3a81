# SPDX-License-Identifier: Apache-2.0
"""Variables that a training step reads or assigns though neither the model nor its optimizer lists them.

A loss, a metric or a schedule may have variables of its own: a weight of the loss that a callback raises, a
counter of calls. They belong to the training state as the weights do. Keras' variables are found when the
forward pass meets them (trainer/step/forward.py); TensorFlow's are found in the graph, which captures them.

TensorFlow's variables can only be read in a forward pass: an assignment to one takes effect while the step is
computed, before the ring has agreed on it, so a step could not be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from edl.errors import ModelError


def plain(v: Any) -> tf.Variable:
    """Return TensorFlow's variable behind one of Keras; a variable of TensorFlow is returned unchanged."""
    return v._value if isinstance(v, keras.Variable) else v


def distinct(variables: Iterable[Any], without: Iterable[Any] = ()) -> list[Any]:
    """Each variable once, in the order given; Keras' and TensorFlow's variable of one value are the same."""
    left_out = {id(plain(v)) for v in without}
    found: dict[int, Any] = {}
    for v in variables:
        if id(plain(v)) not in left_out:
            found.setdefault(id(plain(v)), v)
    return list(found.values())


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """All metrics of the model and its layers, even if its `metrics` lists only some."""
    compiled = [getattr(model, name, None) for name in ("_loss_tracker", "_compile_metrics")]
    losses = getattr(getattr(model, "_compile_loss", None), "metrics", ())
    of_layers = (m for layer in model._flatten_layers() for m in layer._metrics)
    found = [*model.metrics, *of_layers, *(m for m in compiled if m is not None), *losses]
    return list({id(m): m for m in found}.values())


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of all metrics of the model and its layers, in the order of `metrics_of`."""
    return [v for metric in metrics_of(model) for v in metric.variables]


def attributes_of(model: keras.Model) -> dict[str, tf.Variable]:
    """Return TensorFlow's variables in attributes of the model and its layers, by name.

    Keras does not list them.
    """
    found = ((f"{la.name}.{name}", v) for la in model._flatten_layers() for name, v in vars(la).items())
    return {name: v for name, v in found if isinstance(v, tf.Variable)}


def read_in(graph: Any) -> list[tf.Variable]:
    """The variables that a concrete function captures, in the order of its code, so equal on all workers."""
    place = {id(handle): i for i, (handle, _) in enumerate(graph.graph.captures)}
    known = (v for v in graph.graph.variables if id(v.handle) in place)
    return sorted(known, key=lambda v: place[id(v.handle)])


def assigned_in(graph: Any, without: Iterable[int] = ()) -> list[tf.Variable]:
    """The variables of `read_in` that the concrete function assigns.

    Args:
        without: the positions of operations that do not count.
    """
    inner = {id(handle): id(placeholder) for handle, placeholder in graph.graph.captures}
    ignored = set(without)
    written = {
        id(tensor)
        for i, operation in enumerate(graph.graph.get_operations())
        if i not in ignored
        for tensor in auto_control_deps_utils.get_read_write_resource_inputs(operation)[1]
    }
    return [v for v in read_in(graph) if inner[id(v.handle)] in written]


def depends_on(result: Any, variables: Iterable[Any]) -> bool:
    """Whether a tensor of a graph was computed from the value of one of the variables."""
    handles = {id(plain(v).handle) for v in variables}
    wanted = {id(inner) for handle, inner in result.graph.captures if id(handle) in handles}
    seen, ahead = set[int](), [result]
    while ahead:
        tensor = ahead.pop()
        if id(tensor) in wanted:
            return True
        if id(tensor.op) not in seen:
            seen.add(id(tensor.op))
            ahead.extend(tensor.op.inputs)
    return False


def is_generator(v: tf.Variable) -> bool:
    """Whether it is the state of a tf.random.Generator."""
    name = v.name.rpartition("/")[2].partition(":")[0]
    return name == "StateVar" and bool(v.dtype.is_integer)


def refuse_assigned(graph: Any, without: Iterable[Any] = ()) -> None:
    """Refuse a forward pass that assigns a variable of TensorFlow's.

    A tf.random.Generator is let through: its state is each worker's own.

    Args:
        without: variables that are none of the model's.

    Raises:
        ModelError: the graph assigns one.
    """
    for v in distinct(assigned_in(graph), without):
        if not is_generator(v):
            raise ModelError(
                f"the model, its loss or a metric assigns tf.Variable {v.name.partition(':')[0]!r} while a "
                "step is computed, which cannot be taken back when the step has to be repeated. Use a "
                "keras.Variable, or add_weight(trainable=False) in a layer"
            )


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """On exit, restore each of Keras' variables that was assigned inside.

    Metrics, losses and layers may assign variables that no object lists. Each is noted when it is assigned.
    """
    before: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
    assign = keras.Variable._direct_assign

    def noted(variable: keras.Variable, value: Any) -> None:
        v = variable._value
        if id(v) not in before:
            with tf.init_scope():  # a layer may be a graph of its own
                before[id(v)] = v, v.read_value()
        assign(variable, value)

    keras.Variable._direct_assign = noted
    try:
        yield
    finally:
        keras.Variable._direct_assign = assign
        for v, value in before.values():
            v.assign(value)
