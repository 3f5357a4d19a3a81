# SPDX-License-Identifier: Apache-2.0
"""Sums over the ring by operations of TensorFlow's graphs. `horovod` has the ring itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _allreduce
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context as tf_context

from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.gloo import HUNG_SECONDS

OVERDUE = 10  # times the longest graph so far: parts grow when a ring shrinks


class GraphAllReduce:
    """Sums over the ring by operations of a graph, while the graph continues to compute.

    Promise: TensorFlow's graph optimizer removes no sum. The operation is not
    marked as having an effect. So two operations with equal inputs would be merged, and one with a constant
    input would be computed while the graph is optimized: on some ranks, and the other ranks would wait for
    ever. Therefore each operation carries its name as an attribute, by which it differs from all others. The
    caller must see to it that no input is a constant.
    """

    def __init__(self) -> None:
        self._began: float | None = None  # a graph with sums, which runs; on the monotonic clock
        self._longest = 0.0  # seconds of one that returned
        self._size = 0  # of the ring
        self._call = 0  # of the graph, so many in this process
        with tf.device("CPU:0"):  # from where a branch is decided: of a GPU it would be asked for each sum
            self._alone = tf.Variable(False, trainable=False, name="alone_in_the_ring")
            self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name="waits_for_the_ring")

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables that a graph with sums captures, and that are not the model's."""
        return self._alone, self._waiting

    def formed(self, size: int) -> None:
        """A ring of this size was formed."""
        self._size = size
        self._alone.assign(False)

    WIRES: tuple[str, ...] = ("float32", "float16")  # types that Gloo sums

    def __call__(self, tensor: tf.Tensor, name: str, wire: str = "float32") -> tf.Tensor:
        """Return the sum over all ranks of a float32 tensor, without a gradient.

        Shape and name must be the same on all ranks.

        Args:
            wire: the type in which the tensor travels, one of WIRES.
        """
        with _without_callbacks():
            # In a ring of one it is the tensor itself. (A branch would be a graph of its own, to be traced.)
            ours, mine = tf.raw_ops.Switch(data=tf.stop_gradient(tensor), pred=self._alone)
            total = _allreduce(tf.cast(ours, wire), name=f"{NAMED}{name}", op=hvd.Sum, ignore_name_scope=True)
            total.op._set_attr(ATTRIBUTE, attr_value_pb2.AttrValue(s=name.encode()))
            found, _ = tf.raw_ops.Merge(inputs=[tf.cast(total, tensor.dtype), mine])
        return found

    def next_call(self) -> int:
        """Number the next call of a graph with sums."""
        self._call += 1
        return self._call

    def mark(self, call: tf.Tensor) -> None:
        """Run by the graph: call `call` has computed all that it can before a sum arrives."""
        self._waiting.assign(call)

    @property
    def waits(self) -> bool:
        """True while the running graph has nothing left to compute before a sum comes back."""
        return self.runs and int(self._waiting.numpy()) == self._call

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        """Run a graph inside this context.

        Raises:
            RingBroken: one of its sums did not come back.
            OpError: the model's own error.
        """
        self._began = time.monotonic()
        try:
            yield
            self._longest = max(self._longest, time.monotonic() - self._began)
            if self._size == 1:  # after one step: with it, all that a larger ring needs has been touched
                self._size = 0
                self._alone.assign(True)
        except tf.errors.OpError as error:
            if NAMED not in error.message:  # the model's own: TensorFlow names the operation that failed
                raise
            raise RingBroken(f"allreduce: {error_line(error)}") from error
        finally:
            self._began = None

    @property
    def runs(self) -> bool:
        """Whether a graph with sums runs."""
        return self._began is not None

    def overdue(self, cut_at: float, now: float) -> bool:
        """Whether a graph has run for too long since its ring was cut. From then on its sums fail at once.

        Args:
            cut_at: when the ring was cut, on the monotonic clock, as is `now`.
        """
        began = self._began
        return began is not None and now - max(began, cut_at) > HUNG_SECONDS + OVERDUE * self._longest


@contextlib.contextmanager
def _without_callbacks() -> Iterator[None]:
    """Inside, TensorFlow's debugger adds no operations, as `tf.debugging.enable_check_numerics` does.

    An operation with an effect on the side of the switch that is not taken would keep the graph from
    returning any result.
    """
    context = tf_context.context()
    before, context.invoking_op_callbacks = context.invoking_op_callbacks, True
    try:
        yield
    finally:
        context.invoking_op_callbacks = before


NAMED = "sum_of_ring_"
ATTRIBUTE = "_sum_of_ring"


def error_line(error: Exception) -> str:
    """An error's text in one line.

    For an error in a graph, TensorFlow puts before it where the operation was made, and after it which one it
    was, in [[ ]].
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((number for number, line in enumerate(lines) if "[[" in line), 0)
    return lines[max(0, named - 1)][:200] if lines else type(error).__name__
