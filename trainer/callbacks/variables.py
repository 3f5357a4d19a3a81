# SPDX-License-Identifier: Apache-2.0
"""Variables that callbacks can reach by themselves, to find out whether they change what no worker is sent.

A callback changes the training through variables of the training state, which are compared and sent to all
workers. A variable that no step reads in its graph (one that a `tf.numpy_function` reads, or that is only the
memory of the callback) is not in the state: its change would stay on the one worker that calls the callbacks.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from edl.trainer.model.captured import attributes_of, distinct, metric_variables, plain

DEPTH = 3  # of objects within objects
MAXIMUM = 1000  # elements of a list that are looked at: more are data
# Not looked into: what a callback computes with, made anew in each process (a metric or a model of its own).
CLOSED = (type, types.ModuleType, keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)


def reachable(
    callbacks: Iterable[keras.callbacks.Callback], model: keras.Model, state: Iterable[Any]
) -> dict[str, Any]:
    """Return the variables that callbacks can reach, by where each was found.

    The search covers attributes, globals and closures of callbacks, and attributes of layers.

    Args:
        state: variables that are in the training state, which are left out, as metrics are.
    """
    found: dict[str, Any] = {}
    for callback in callbacks:
        seen: set[int] = set()
        name = type(callback).__name__
        attributes = {n: v for n, v in vars(callback).items() if n not in ("_model", "params")}
        for where, v in _in(attributes, name, seen, DEPTH):
            found.setdefault(where, v)
        for cls in type(callback).__mro__:
            if cls.__module__.partition(".")[0] not in ("keras", "builtins"):
                for where, v in _in(list(vars(cls).values()), name, seen, DEPTH):
                    found.setdefault(where, v)
    found.update(attributes_of(model))
    known = [*state, *metric_variables(model)]
    kept = {id(plain(v)) for v in distinct(found.values(), without=known)}
    return {where: v for where, v in found.items() if id(plain(v)) in kept}


def _in(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or isinstance(value, CLOSED):
        return
    seen.add(id(value))
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, tf.Variable | keras.Variable):
        if getattr(value, "_value", value) is not None:
            yield name, value
    elif isinstance(value, types.FunctionType):
        inner = ((f"{name}: {n}", v) for n, v in _named(value))
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        inner = [(name, value.__func__)]
    elif isinstance(value, property):
        inner = [(name, value.fget)]
    elif depth == 0:
        return
    elif isinstance(value, dict):
        inner = [(f"{name}.{key}", v) for key, v in value.items()] if len(value) <= MAXIMUM else []
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [(name, v) for v in value] if len(value) <= MAXIMUM else []
    elif hasattr(value, "__dict__"):
        inner = [(f"{name}.{key}", v) for key, v in vars(value).items()]
    for where, v in inner:
        yield from _in(v, where, seen, depth - (not isinstance(value, types.MethodType)))


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and the closure of a function, and variables of modules that it names."""
    names = set(_names(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            attributes = ((n, vars(value).get(n)) for n in sorted(names))
            yield from ((n, v) for n, v in attributes if isinstance(v, tf.Variable | keras.Variable))
        else:
            yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function within it
            yield from _names(constant)
