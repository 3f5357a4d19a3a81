# SPDX-License-Identifier: Apache-2.0
"""Traces the graphs of one model's step, and notes the variables that they capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from edl.trainer.model.captured import distinct, read_in, refuse_assigned
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.step.background_compile import BackgroundCompiled

Graph = Callable[..., list[tf.Tensor]]

# The graphs and the forward pass, in the order in which their variables are in the state.
ORDER = ("ids", "forward", "layers", "update", "step", "carry", "last", "totals")


class Tracer:
    """Traces the graphs of one model's step.

    Args:
        of_ring: the variables of the ring's sums, which graphs capture, and which are none of the model's.
    """

    def __init__(self, model: keras.Model, of_ring: Iterable[tf.Variable]):
        self._model, self._of_ring = model, [*of_ring]
        self._found: dict[str, list[Any]] = {}

    def graph(
        self,
        name: str,
        function: Callable[..., Any],
        *signature: tf.TensorSpec,
        changes_nothing: bool = True,
        jit: bool = False,
    ) -> Graph:
        """Return the function as a graph, or as it is if the model runs eagerly; its results are flat.

        Args:
            name: one of `ORDER`.
            changes_nothing: whether the graph may assign no variable.
            jit: compile it with XLA, in the background.

        Raises:
            ModelError: it should change nothing, and assigns a variable.
        """
        if self._model.run_eagerly:
            return lambda *values: tf.nest.flatten(function(*map(tf.convert_to_tensor, values)))
        graph = concrete(function, *signature)
        if changes_nothing:
            refuse_assigned(graph, self._of_ring)
        self.note(name, distinct(read_in(graph), without=self._of_ring))
        return BackgroundCompiled(graph, signature) if jit else flat(graph)

    def note(self, name: str, variables: list[Any]) -> None:
        """Note variables that the step uses. The name is one of `ORDER`."""
        self._found[name] = variables

    @property
    def captured(self) -> list[Any]:
        """All noted variables, those of losses, metrics and schedules among them, which no model lists."""
        return distinct(v for name in ORDER for v in self._found.get(name, ()))
