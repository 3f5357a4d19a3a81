# SPDX-License-Identifier: Apache-2.0
"""A sum over the ring inside a step's TensorFlow graph.

The ring's `reduce` is called by an operation of the graph. Promise: the sums of a graph are made one
at a time, in the order in which the code made them, so in the same order on all ranks; none is left
out; and a ring that breaks in one raises `RingBroken` where the graph is run, not an error of TensorFlow.

    total = InnerSum(ring.reduce)
    graph = compiled(lambda x: total(work(x)), ...)
    with total.ring_errors():
        graph(batch)

TensorFlow runs operations as soon as their inputs are there. It keeps those in order that touch one
resource, also in loops, in branches and in functions that the graph calls; that is what the variable
`_turn` is for: each sum reads it and then writes it.

`reduce` runs on a thread of TensorFlow's pool, which it blocks. So it must not itself need one: with
one such thread it would wait for ever. HorovodRing sees to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import tensorflow as tf

from edl.trainer.ring.base import RingBroken, Vector

ROUNDED = ("float16", "bfloat16")  # types that hold less than the numbers that travel in them


class RingAllReduce(Protocol):
    """Sums over the ring, made by a graph (trainer/ring/graph_all_reduce.py, trainer/step/inner_sum.py)."""

    WIRES: tuple[str, ...]  # the types as which numbers can travel

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """The ring's own, which a graph with sums captures; they are not the model's."""
        ...

    def __call__(self, tensor: tf.Tensor, /, name: str, wire: str = "float32") -> tf.Tensor:
        """Return the sum over all ranks.

        Args:
            wire: the type as which the numbers travel.
        """
        ...

    def next_call(self) -> int:
        """Count a call of the graph: returns its number."""
        ...

    def mark(self, call: tf.Tensor) -> None:
        """Let the graph note that this call waits for a sum and computes nothing; 0: it computes.

        The note is for the watchdog (trainer/runtime/watchdog.py). It is no part of the step.
        """
        ...

    def ring_errors(self) -> AbstractContextManager[None]:
        """Raise the ring's error, and not what TensorFlow makes of it, if one breaks the call of a graph."""
        ...


class InnerSum:
    """Sums over the ring, made by a graph or by code that runs eagerly.

    Args:
        reduce: of the ring (trainer/ring/base.py), in its generation at the time of the call.
    """

    WIRES: tuple[str, ...] = ("float32",)

    def __init__(self, reduce: Callable[[Vector], Vector]):
        self._reduce = reduce
        self._broken: RingBroken | None = None
        self._turn = tf.Variable(0, dtype=tf.int64, trainable=False, name="turn_of_the_ring")

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables that a graph with sums captures, and that are not the model's."""
        return (self._turn,)

    def __call__(self, vector: tf.Tensor, name: str = "", wire: str = "float32") -> tf.Tensor:
        """The sum over all ranks of `vector`, of the same shape on all. It has no gradient.

        Args:
            name: not needed here, where the order says which sums belong together.
            wire: the type of the numbers that are summed: here they are rounded to what it can hold.
        """
        if wire in ROUNDED:
            return _rounded(self(_rounded(vector, wire), name), wire)
        if tf.executing_eagerly():
            # On another thread, as the graphs of the other ranks: on the main one a ring may make its sums by
            # a graph, whose operation has another name to Horovod, and both would wait for ever.
            with ThreadPoolExecutor(1) as beside:
                return tf.convert_to_tensor(beside.submit(self._reduce, vector).result())
        turn = self._turn.read_value()
        total = tf.py_function(self._in_turn, [tf.stop_gradient(vector), turn], vector.dtype)
        total.set_shape(vector.shape)
        with tf.control_dependencies([total]):
            self._turn.assign(turn + 1)
        return tf.stop_gradient(total)

    def next_call(self) -> int:
        return 0

    def mark(self, call: tf.Tensor) -> None:
        """Nothing to do: while a sum is awaited, a thread is in `reduce`."""

    @contextlib.contextmanager
    def made_by(self, reduce: Callable[[Vector], Vector]) -> Iterator[None]:
        """Inside this context, a different function makes the sums, to try what a ring would get."""
        before, self._reduce = self._reduce, reduce
        try:
            yield
        finally:
            self._reduce = before

    def differentiable(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum with its gradient: the all-reduced gradient from above.

        Each rank's loss depends on each rank's vector, so the gradient is another sum, and all ranks
        must differentiate, or none.
        """

        @tf.custom_gradient
        def summed(vector: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self(vector), self

        return summed(vector)

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        """Raise the ring's error, and not what TensorFlow makes of it, if one breaks the call of a graph.

        Raises:
            RingBroken: the ring broke in one of the graph's sums; what the graph changed before that sum
                stays changed.
            OpError: TensorFlow's error, if the ring did not break.
        """
        self._broken = None
        try:
            yield
        except tf.errors.OpError:
            if self._broken is None:
                raise
            raise self._broken from self._broken.__cause__  # what TensorFlow has made of it says less

    def _in_turn(self, vector: tf.Tensor, turn: tf.Tensor) -> Vector:
        try:
            return self._reduce(vector)
        except RingBroken as error:
            self._broken = error  # TensorFlow makes an error of its own of it, with our traceback as its text
            raise


class Alone(InnerSum):
    """The sums of a process that is in no ring: what it brings."""

    def __init__(self) -> None:
        super().__init__(lambda vector: vector)

    def __call__(self, vector: tf.Tensor, name: str = "", wire: str = "float32") -> tf.Tensor:
        return tf.stop_gradient(vector)


def _rounded(tensor: tf.Tensor, wire: str) -> tf.Tensor:
    return tf.cast(tf.cast(tensor, wire), tf.float32)
