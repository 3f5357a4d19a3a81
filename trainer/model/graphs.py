# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs that are called often: a step makes three calls, so their overhead counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def keep_xla_explicit() -> None:
    """Let Keras compile a model with XLA only where `jit_compile=True` says so.

    For "auto", the default, Keras takes XLA where there is a GPU. XLA compiles each size of a part anew, for
    seconds on all processors, so after each ring change (trainer/step/background_compile.py).
    """
    keras.Model._resolve_auto_jit_compile = lambda self: False


def compiled(function: Callable[..., Any], *signature: tf.TensorSpec) -> Callable[..., Any]:
    """Trace `function` into one concrete graph for tensors of these shapes and types, now.

    A concrete function skips the matching of arguments that `tf.function` does anew on each call (0.15 of
    0.37 ms, measured). Without autograph, whose tracing takes seconds where plain tracing takes tenths; Keras
    does not convert layers either, so no model needs it.
    """
    graph = concrete(function, *signature)
    return lambda *values: graph(*map(tf.convert_to_tensor, values))


def flat(graph: Any) -> Callable[..., list[tf.Tensor]]:
    """Return a function that calls a concrete function with flat tensors and returns a flat list of results.

    The tensors must have exactly the types of the graph. They are not checked, which saves three quarters of
    the time of a call.
    """
    call, captured = graph.inference_fn.call_flat, graph.captured_inputs
    return lambda *tensors: call(*tensors, *captured)


def concrete(function: Callable[..., Any], *signature: tf.TensorSpec, jit: bool = False) -> Any:
    """The concrete function itself, whose graph can be inspected."""
    return tf.function(function, autograph=False, jit_compile=jit or None).get_concrete_function(*signature)
