# SPDX-License-Identifier: Apache-2.0
"""The ring for Keras jobs: Horovod's operations of TensorFlow, over Gloo, or over NCCL on a GPU.

Only this module and `graph_all_reduce` import Horovod's Python package; `gloo` has all that needs no
TensorFlow.

- The sums of a graph (`in_graph`) have a name each, and come in any order.
- Connections of NCCL are not cut, since nothing tells them from those of the user's code. A cut aborts
  NCCL's communicators (patch 14), which also works where ranks share memory and have no connections.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _basics, init, shutdown  # a script's own hvd.init is ours

from edl.trainer.model import snapshot
from edl.trainer.model.graphs import compiled
from edl.trainer.ring import gloo
from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.gloo import GlooRing
from edl.trainer.ring.graph_all_reduce import GraphAllReduce, error_line

LOOPBACK = "lo"
IDLE = 0.3  # of a core: a process that uses less only waits


class HorovodRing(GlooRing):
    """One member's end of a ring, whose `reduce` takes and returns tensors.

    Args:
        store_port, interface, name, master_port, store_secret: see GlooRing.
        graphs: whether graphs make sums by `in_graph`. Its variables start TensorFlow's runtime, and after
            that no GPU can be configured.
    """

    _modules = frozenset({__file__, gloo.__file__})

    def __init__(
        self,
        store_port: int,
        interface: str,
        name: str,
        master_port: int | None = None,
        store_secret: str = "",
        graphs: bool = True,
    ):
        super().__init__(store_port, interface, name, master_port, store_secret)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if interface == LOOPBACK:
            # Workers of a machine may share a GPU, and NCCL refuses two ranks of one host on one GPU. Where
            # `edl run` deals out GPUs, it has set the variable.
            os.environ.setdefault("NCCL_HOSTID", name)
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None  # traced when a ring is up
        self.in_graph = GraphAllReduce() if graphs else None

    def form(self, rank: int, size: int) -> None:
        super().form(rank, size)
        if self.in_graph is not None:
            self.in_graph.formed(size)

    def reduce(self, vector: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(super().reduce(vector))

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        with _broken("broadcast"):
            return np.asarray(hvd.broadcast(tf.constant(data), root, name="state"))

    def allocate(self, nbytes: int) -> np.ndarray:
        return snapshot.allocate(nbytes)

    @property
    def waits(self) -> bool:
        return (self.in_graph is not None and self.in_graph.waits) or super().waits

    def _initialize(self) -> None:
        with _broken("hvd.init"):
            init()

    def _shut_engine_down(self) -> None:
        shutdown()

    def _reduce(self, vector: tf.Tensor) -> tf.Tensor:
        with _broken("allreduce"):
            if threading.current_thread() is not threading.main_thread():
                # The caller is a graph's operation (trainer/step/inner_sum.py) on a thread of TensorFlow's
                # pool. A graph would need a further thread, and all may be busy. A single operation does not.
                return _sum(vector)
            if self._sum is None:
                self._sum = compiled(_sum, tf.TensorSpec([None], tf.float32))
            return self._sum(vector)

    def _abort(self) -> None:
        if _abort_nccl is not None:
            _abort_nccl()

    # In a graph the model computes, too: it hangs where nothing does, or where that takes too long.

    def _is_stuck(self, used: float) -> bool:
        return self.in_graph is not None and self.in_graph.runs and used < IDLE

    def _is_overdue(self, cut_at: float) -> bool:
        return self.in_graph is not None and self.in_graph.overdue(cut_at, time.monotonic())


def _sum(vector: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(vector, op=hvd.Sum, name="step", ignore_name_scope=True)


# Only a Horovod for a GPU that has patch 14 has this. It returns at once.
_abort_nccl: Callable[[], None] | None = getattr(_basics.MPI_LIB_CTYPES, "horovod_abort", None)


@contextlib.contextmanager
def _broken(what: str) -> Iterator[None]:
    """Raise errors of Horovod as RingBroken; no other code runs inside. The cause is kept.

    Raises:
        RingBroken: Horovod has raised an error.
    """
    try:
        yield
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise RingBroken(f"{what}: {error_line(error)}") from error
