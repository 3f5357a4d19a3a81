# SPDX-License-Identifier: Apache-2.0
"""The user's transform(): one record to one record, traced by TensorFlow once and run for each record.

Promise: what it makes of a record depends on the record, `training.seed` and the epoch only. It does not
depend on the other records of the batch, so not on the number of workers or reader processes, and a step that
is repeated has the same values. Random operations that would break this promise are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.trainer.records.arrays import standard, tensor

NAMED = ("seed", "split")  # parameters that are passed by name
MAXIMUM = 3  # other parameters: features, label, weight
CALL = "transform(features, label) or transform(features, label, weight), with seed and split after them"
# Operations whose values depend on how often they have run, and those that change variables.
_RANDOM = re.compile(
    r"(Random|Stateful|Multinomial|SampleDistorted|Rng|NonDeterministic|Assign\w*Variable"
    r"|(Parameterized)?TruncatedNormal)"
)
_MARKS = re.compile(r"\{\{.*?\}\} ?|\[\[.*?\]\]|\[Op:.*?\]")  # that TensorFlow adds to its messages


class Transform:
    """The user's transform() for the records of a split.

    Args:
        function: the user's function.
        split: the split, for a function with this parameter.
        name: the user's module, for messages.

    Raises:
        ModelError: the function cannot be called as documented.
    """

    def __init__(self, function: Callable[..., Any], split: str, name: str):
        self._count, named = parameters(function, name)
        self._function, self._name = function, name
        self._given = {"split": split} if "split" in named else {}
        self._takes_seed = "seed" in named
        self._graphs: dict[str, tuple[Any, list[Any]]] = {}  # by the structure of the records

    def __call__(self, x: Any, y: Any, weights: Any, seeds: np.ndarray, what: str) -> tuple[Any, Any, Any]:
        """Transform the records of a batch.

        Args:
            x, y, weights: features, labels and weights, with an entry for each record.
            seeds: int64 [records, 2].
            what: the records, for messages.

        Returns:
            Features, labels and weights.

        Raises:
            DataError: an operation fails, the records have no labels, or the results differ in shape.
            ModelError: the function returns something else than is documented, or draws random numbers
                without a seed.
        """
        given = (x, y, weights)
        for part, kind in zip(given[1 : self._count], ("label", "weight"), strict=False):
            if part is None:
                raise DataError(f"{self._name}: transform() takes a {kind}, and the records have none")
        taken = given[: self._count]
        arrays = [seeds, *keras.tree.flatten(taken)]
        if not all(isinstance(array, np.ndarray | tf.Tensor) for array in arrays):
            raise DataError(
                f"{self._name}: transform() takes no ragged or sparse arrays; make them in feed()"
            )
        places = keras.tree.map_structure(lambda _: 0, taken)
        if (key := repr(places)) not in self._graphs:
            self._graphs[key] = self._graph(places)
        graph, made = self._graphs[key]
        try:
            with tf.device("CPU"):
                values = graph(*map(tensor, arrays))
        except tf.errors.OpError as error:
            raise DataError(f"{self._name}: transform() of the {what}: {_reason(error)}") from error
        found = keras.tree.map_structure(_array, keras.tree.pack_sequence_as(made[-1], list(values)))
        first: tuple[Any, ...] = tuple(found) if self._count > 1 else (found,)
        x, y, weights = (*first, *given[self._count :])
        return x, y, weights

    def _graph(self, places: Any) -> tuple[Any, list[Any]]:
        """The graph for a batch of this structure, and a list of the structures that it has been traced with.

        `tf.map_fn` takes half the time of a map of tf.data for some 64 records.
        """
        made: list[Any] = []

        def one(seed: Any, *values: Any) -> list[Any]:
            record = keras.tree.pack_sequence_as(places, list(values))
            result = self._function(*record, **self._given, **({"seed": seed} if self._takes_seed else {}))
            made.append(keras.tree.map_structure(lambda _: 0, result))
            return [] if result is None else [tf.convert_to_tensor(v) for v in keras.tree.flatten(result)]

        of_one = tf.function(one)

        def batch(*arrays: Any) -> Any:
            traced = of_one.get_concrete_function(*(tf.TensorSpec(a.shape[1:], a.dtype) for a in arrays))
            self._refuse_structure(made[-1])
            self._refuse_random(traced)
            signature = [tf.TensorSpec(output.shape, output.dtype) for output in traced.outputs]
            return tf.map_fn(lambda values: traced(*values), list(arrays), fn_output_signature=signature)

        return tf.function(batch, autograph=False, reduce_retracing=True), made

    def _refuse_structure(self, made: Any) -> None:
        wanted = ("features", "label", "weight")[: self._count]
        if self._count > 1 and (not isinstance(made, tuple | list) or len(made) != self._count):
            raise ModelError(f"{self._name}: transform() must return {', '.join(wanted)}, as it takes them")

    def _refuse_random(self, traced: Any) -> None:
        graph = traced.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        for node in nodes:
            if _RANDOM.match(node.op):
                raise ModelError(
                    f"{self._name}: transform() uses {node.op}, whose values would differ from worker to "
                    "worker and when a step is repeated: take a parameter named seed, and use operations "
                    "such as tf.random.stateless_uniform(shape, seed) and "
                    "tf.image.stateless_random_flip_left_right(image, seed)"
                )


def parameters(function: Callable[..., Any], name: str) -> tuple[int, set[str]]:
    """The number of parts of a record that transform() takes, and those of `NAMED` that it takes.

    Raises:
        ModelError: it cannot be called as documented.
    """
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters
        parts = [
            p
            for p in parameters.values()
            if p.name not in NAMED and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        named = {name for name in NAMED if name in parameters}
        signature.bind(*parts, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name}: transform() is called as {CALL}: {error}") from error
    if not 1 <= len(parts) <= MAXIMUM:
        raise ModelError(f"{name}: transform{signature} is called as {CALL}")
    return len(parts), named


def _array(value: Any) -> Any:
    value = standard(value)
    return value.numpy() if tf.is_tensor(value) and value.dtype != tf.string else value


def _reason(error: Any) -> str:
    """TensorFlow's message without its stack trace and its names of operations."""
    text = _MARKS.sub("", str(error.message)).strip()
    why = " ".join(text.split("\n\n")[-1].split())
    return why + "; transform() must return one shape for all records" * ("during merge" in why)
