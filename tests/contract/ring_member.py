# SPDX-License-Identifier: Apache-2.0
"""One member of a ring that follows orders: in a thread, or as a process with Horovod.

    python -m tests.contract.ring_member STORE_PORT NAME STORE_SECRET
    python -m tests.contract.ring_member STORE_PORT --fork SOCKET STORE_SECRET

The second form imports TensorFlow and Horovod once, or neither for the ring of a script. Each line of its
standard input is the name of a member, which is forked and gets its orders from a connection to the socket.
"""

from __future__ import annotations

import functools
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from edl.contract import script_imports
from edl.trainer.ring.base import Ring, RingBroken
from edl.trainer.ring.gloo import GlooRing

if TYPE_CHECKING:  # the local ring needs no TensorFlow
    from edl.trainer.ring.graph_all_reduce import GraphAllReduce


def serve(ring: Ring, next_order: Callable[[], str], say: Callable[[str], None]) -> None:
    """Follow orders until an empty order. A broken ring is cut and closed, as a worker does."""
    while order := next_order():
        try:
            say(_obey(ring, order.split(), say))
        except RingBroken as error:
            ring.cut()
            ring.close()
            say(f"broken {error}")


def _obey(ring: Ring, order: list[str], say: Callable[[str], None]) -> str:
    match order:
        case ["form", rank, size]:
            ring.form(int(rank), int(size))
            return "formed"
        case ["sum", length, value]:
            total = ring.reduce(np.full(int(length), float(value), np.float32))
            return f"sum {np.asarray(total).tolist()}"
        case ["exact", dtype, value]:  # a sum of one value of this type
            total = ring.reduce(np.array([value], dtype))
            return f"exact {total.dtype} {total.tolist()}"
        case ["framework"]:
            return f"framework {'tensorflow' in sys.modules}"
        case ["sums"]:  # sum until the ring breaks
            _repeat(lambda: np.asarray(ring.reduce(np.ones(200_000, np.float32))), say)
        case ["graph", value]:  # two sums in one graph, the second from the result of the first
            return f"graph {_graph(ring)(float(value)).tolist()}"
        case ["graphs"]:  # run graphs until the ring breaks
            graph = _graph(ring)
            _repeat(lambda: graph(1.0), say)
        case ["twice", one, other]:  # two parallel sums in one graph; of the same tensor for equal values
            return f"twice {_two_sums(ring)(float(one), float(other))}"
        case ["many"]:  # run graphs of many sums, which many threads begin, until the ring breaks
            many = _many_sums(_in_graph(ring))
            while True:
                many()
                say("another")
        case ["half", value]:  # a sum in a graph, of a float32 that is sent as float16
            return f"half {_half(ring)(float(value))}"
        case ["kept", value]:  # the input after a sum: after a sum by itself, and after one in a graph
            return f"kept {_kept(ring, float(value))}"
        case ["room", mebibytes]:  # the growth of memory for a sum of this size in a graph
            return f"room {_room(ring, int(mebibytes))}"
        case ["broadcast", dtype, root, value]:
            data = ring.broadcast(np.full(4, int(value), dtype), int(root))
            return f"{data.dtype} {data.tolist()}"
        case ["give", *values]:
            ring.send_state([np.full(3_000_000, int(value), np.uint8) for value in values])
            return "given"
        case ["take" | "pass" as verb, giver]:

            def prepare(parts: list[np.ndarray]) -> list[tuple[int, list[int]]]:
                return [(len(p), sorted(set(p.tolist()))) for p in parts]

            coming = ring.receive_state(int(giver), prepare, forward=verb == "pass")
            total = ring.reduce(np.ones(1, np.float32))  # the ring continues meanwhile
            state = coming.result()
            assert coming.done
            return f"took {state} {np.asarray(total).tolist()}"
        case ["close"]:
            ring.close()
            return "closed"
    raise ValueError(f"unknown order {order}")


def _repeat(total: Callable[[], np.ndarray], say: Callable[[str], None]) -> NoReturn:
    """Repeat a sum, whose result is always the same, until the ring breaks."""
    expected = total()[0]
    while True:
        say("another")
        assert (total() == expected).all(), "a sum without its result was no error"


def _graph(ring: Ring) -> Callable[[float], np.ndarray]:
    import tensorflow as tf

    from edl.trainer.model.graphs import compiled
    from edl.trainer.step.inner_sum import InnerSum

    total = InnerSum(ring.reduce)
    graph = compiled(lambda x: total(total(x) + 1.0), tf.TensorSpec([1], tf.float32))

    def call(value: float) -> np.ndarray:
        with total.ring_errors():
            return np.asarray(graph(np.array([value], np.float32)))

    return call


def _in_graph(ring: Ring) -> GraphAllReduce:
    from edl.trainer.ring.horovod import HorovodRing

    assert isinstance(ring, HorovodRing) and ring.in_graph is not None
    return ring.in_graph


def _two_sums(ring: Ring) -> Callable[[float, float], list[float]]:
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete

    total = _in_graph(ring)

    def call(one: float, other: float) -> list[float]:
        def sums(x: tf.Tensor) -> list[tf.Tensor]:
            return [total(x, "one"), total(x if one == other else x * (other / one), "other")]

        graph = concrete(sums, tf.TensorSpec([1], tf.float32))
        with total.ring_errors():
            return [float(found[0]) for found in graph(tf.constant([one]))]

    return call


@functools.cache
def _many_sums(total: GraphAllReduce) -> Callable[[], None]:
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete

    graph = concrete(
        lambda x: [total(x + i, f"many_{i}") for i in range(100)], tf.TensorSpec([1], tf.float32)
    )

    def call() -> None:
        with total.ring_errors():
            graph(tf.constant([1.0]))

    return call


def _half(ring: Ring) -> Callable[[float], float]:
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete

    total = _in_graph(ring)

    def call(value: float) -> float:
        graph = concrete(lambda x: total(x, "half", "float16"), tf.TensorSpec([1], tf.float32))
        with total.ring_errors():
            return float(graph(tf.constant([value]))[0])

    return call


def _kept(ring: Ring, value: float) -> list[float]:
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete

    total = _in_graph(ring)

    def both(x: tf.Tensor) -> list[tf.Tensor]:
        made = x + 1.0
        return [total(made, "kept"), made]

    ours = tf.constant([value])
    ring.reduce(ours)
    graph = concrete(both, tf.TensorSpec([1], tf.float32))
    with total.ring_errors():
        return [float(ours[0]), *(float(found[0]) for found in graph(ours)), float(ours[0])]


def _room(ring: Ring, mebibytes: int) -> int:
    """Return the growth of memory during a sum in a graph, in MiB."""
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete

    total = _in_graph(ring)

    def summed(x: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        return total(tf.fill([count], x), "room")[0]

    graph = concrete(summed, tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32))
    for count in (1, mebibytes << 18):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the resident size
        before = _peak()
        with total.ring_errors():
            graph(tf.constant(1.0), tf.constant(count))
    return (_peak() - before) >> 10


def _peak() -> int:
    """The peak resident size, in KiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", HOROVOD_GLOO_TIMEOUT_SECONDS="60")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")  # the least that a job can have
    match sys.argv[1:]:
        case [port, "--fork", address, secret]:
            _fork_members(int(port), address, secret)
        case [port, name, secret]:
            _be_member(int(port), name, secret)


def _fork_members(port: int, address: str, secret: str) -> None:
    from edl.trainer.start.preimport import import_all

    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:  # one at a time, so no member inherits a line that was read ahead
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address)
            os.dup2(connection.fileno(), 0)
            os.dup2(connection.fileno(), 1)
            connection.close()
            try:
                _be_member(port, line.strip(), secret)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)


def _be_member(port: int, name: str, secret: str) -> None:
    engine: type[GlooRing] = GlooRing
    if script_imports.VARIABLE not in os.environ:
        from edl.trainer.ring.horovod import HorovodRing

        engine = HorovodRing
    ring = engine(port, os.environ.get("EDL_RING_INTERFACE", "lo"), name, store_secret=secret)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    speaking = threading.Lock()  # two threads print, and print() writes a line and its end separately

    def say(text: str) -> None:
        with speaking:
            print(text, flush=True)

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "cut":
                ring.cut()  # at once, even while the main thread waits
                say("cut")
            else:
                orders.put(line)
        orders.put("")  # no further orders follow

    threading.Thread(target=listen, daemon=True).start()
    say(f"here {os.getpid()}")
    serve(ring, orders.get, say)


if __name__ == "__main__":
    main()
