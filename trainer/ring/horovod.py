"""The ring on Horovod's Gloo engine, with sums over NCCL on a GPU. The only module that knows Horovod.

Facts that shape it, each with its incident in docs/horovod-patches.md:
- Horovod pairs operations by name. A sum that is asked for by `reduce` has one name, and they come one at a
  time; those of a graph (`in_graph`) each have their own, and come in any order.
- A broken ring is cut: the sockets that appeared while it was formed are shut down, so that
  every rank's collective fails in milliseconds and not after Gloo's timeout. While a broken
  ring is still being formed, connections keep appearing, so the cut is repeated.
- Connections of NCCL are not cut, since nothing tells them from those of the user's code. A cut aborts
  NCCL's communicators (patch 14), which also works where ranks share memory and have no connections.
- Liveness is the master's business, so Gloo's own timeout is long: a rank may take minutes
  for a step without being called dead.
- Its background thread asks all ranks what can be summed when this process has something (patch 12), and
  otherwise at times: so an idle ring learns that it is cut or that a rank has left it.
- Only RANK and SIZE are set in the environment ("flat"): half the connections.
- Nothing of `horovod.runner` is ever imported or started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from types import FrameType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import psutil
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _allreduce, _basics
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context as tf_context

from edl.contract.exit_codes import WorkerExit
from edl.trainer.model import snapshot
from edl.trainer.model.graphs import compiled
from edl.trainer.ring.base import Prepare, RingBroken
from edl.trainer.ring.transfer import Giver, Offer, TransferFailed, give_way, take
from edl.trainer.runtime.termination import leave, shielded

LOOPBACK = "lo"
INTERNET = (socket.AF_INET, socket.AF_INET6)
NO_PORT = -1
CUT_AGAIN_SECONDS = 0.1
HUNG_SECONDS = 10.0
OVERDUE = 10  # times the longest graph so far: a smaller ring has larger parts
IDLE = 0.3  # of a core, that a process uses which only waits


class HorovodRing:
    """One member's end of a Gloo ring.

    Args:
        store_port: of the loopback rendezvous store of this process.
        interface: network interface that the members reach each other by.
        name: of this worker, unique in the job.
        master_port: where the worker's link connects to, at any time: its socket is never the ring's.
        store_secret: with which each path of the store begins.
    """

    def __init__(
        self,
        store_port: int,
        interface: str,
        name: str,
        master_port: int | None = None,
        store_secret: str = "",
    ):
        os.environ.update(
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_GLOO_IFACE=interface,
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(store_port),
            HOROVOD_GLOO_TIMEOUT_SECONDS=os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "600"),
            HOROVOD_HOSTNAME=name,
            HOROVOD_IDLE_CYCLE_TIME=os.environ.get("HOROVOD_IDLE_CYCLE_TIME", "10"),
            HOROVOD_ELASTIC="0",  # it would ask the store for what only Horovod's own launcher puts there
            NCCL_SOCKET_IFNAME=os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"),
            # What goes wrong in the engine is told as RingBroken; a ring that is cut is no error to show.
            HOROVOD_LOG_LEVEL=os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),
        )
        if interface == LOOPBACK:
            # All workers of a machine use its first GPU, and NCCL refuses two ranks of one host on one GPU.
            os.environ.setdefault("NCCL_HOSTID", name)
        self._store_port, self._master_port, self._interface = store_port, master_port, interface
        self._store_secret = store_secret
        self._rank, self._size = 0, 0
        self._is_alone = False  # in a ring that has made a sum: all that a larger one needs was touched
        self._transfers: list[Giver | Taking] = []  # of this ring
        self._lock = threading.Lock()
        self._outside: frozenset[tuple[int, str]] = frozenset()  # sockets from before this ring
        self._sockets: frozenset[tuple[int, str]] | None = None  # of this ring, once it is formed
        self._is_cut = threading.Event()
        self._closed = threading.Event()
        self._closed.set()
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None  # traced when a ring is up
        self.in_graph = GraphSums()

    def form(self, rank: int, size: int) -> None:
        with self._lock:
            self._outside, self._sockets = frozenset(_open_sockets()), None
            self._is_cut.clear()
            self._closed.clear()
        self._rank, self._size, self._is_alone = rank, size, False
        os.environ.update(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size))
        if size > 1:
            # Horovod asks http://ADDRESS:PORT/SCOPE/KEY: with a path in its address, each key begins with it.
            os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = f"127.0.0.1:{self._store_port}/{self._store_secret}"
        else:  # a ring of one asks nobody; with an address set it would ask itself
            os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR", None)
        with _broken("hvd.init"), shielded():  # Gloo takes an interrupted wait for a broken connection
            hvd.init()
        with self._lock:
            self._sockets = frozenset(_open_sockets()) - self._outside
        if self._is_cut.is_set():
            raise RingBroken("the ring was cut while it was being formed")
        self.in_graph.formed(size)

    def reduce(self, vector: tf.Tensor) -> tf.Tensor:
        if self._is_alone and not self._is_cut.is_set():
            return tf.convert_to_tensor(vector)
        total = self._reduce(vector)
        self._is_alone = self._size == 1
        return total

    def _reduce(self, vector: tf.Tensor) -> tf.Tensor:
        with _broken("allreduce"):
            if threading.current_thread() is not threading.main_thread():
                # An operation of a graph asks (trainer/step/inner_sum.py), on a thread of TensorFlow's pool.
                # A graph would need another one, and there may be none; a single operation needs none.
                return _sum(vector)
            if self._sum is None:
                self._sum = compiled(_sum, tf.TensorSpec([None], tf.float32))
            return self._sum(vector)

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        with _broken("broadcast"):
            return np.asarray(hvd.broadcast(tf.constant(data), root, name="state"))

    def give(self, parts: Sequence[np.ndarray]) -> None:
        giver = Giver(_address_of(self._interface), parts)
        self._transfers.append(giver)
        self._store("PUT", self._rank, giver.address)

    def take(self, giver: int, prepare: Prepare, passes_on: bool = False) -> Taking:
        onward = Offer(_address_of(self._interface)) if passes_on else None
        taking = Taking(lambda: self._store("GET", giver), prepare, onward)
        self._transfers.append(taking)
        if onward is not None:
            self._store("PUT", self._rank, onward.address)
        return taking

    def room(self, nbytes: int) -> np.ndarray:
        return snapshot.room(nbytes)

    def _store(self, method: str, rank: int, address: str = "") -> str:
        """A question to the rendezvous store. GET waits until the rank has put its address.

        The key is not named after the rank alone, as are those that Horovod puts (trainer/session/client.py).
        """
        connection = HTTPConnection("127.0.0.1", self._store_port)
        with contextlib.closing(connection):
            connection.request(method, f"/{self._store_secret}/state/of-{rank}", address or None)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != HTTPStatus.OK:
            raise RingBroken("the ring was called off while a state was to be sent")
        return text

    def cut(self) -> None:
        if self._closed.is_set() or self._is_cut.is_set():
            return
        self._is_cut.set()
        self._break_off()
        self._cut_once()
        threading.Thread(target=self._keep_cutting, name="cut", daemon=True).start()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._break_off()
        self._transfers.clear()
        hvd.shutdown()
        self._closed.set()

    def _break_off(self) -> None:
        """No state is sent any more."""
        for transfer in list(self._transfers):
            transfer.close()

    def _cut_once(self) -> None:
        with self._lock:
            if not self._is_cut.is_set():  # meanwhile the next ring is being formed
                return
            if _abort_nccl is not None:
                _abort_nccl()
            ours = self._sockets if self._sockets is not None else frozenset(_open_sockets()) - self._outside
            for fd, inode in ours:
                self._shut_down(fd, inode)

    def _shut_down(self, fd: int, inode: str) -> None:
        """shutdown(2) the socket, unless its descriptor was reused, or it is not Gloo's.

        While a ring is formed, questions to the rendezvous store come and go (they are answered
        with 410, which is quicker than a broken connection), and the link may find a new master.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.readlink(f"/proc/self/fd/{copy.fileno()}") != inode or copy.family not in INTERNET:
                return
            here, there = copy.getsockname()[1], NO_PORT
            with contextlib.suppress(OSError):  # one that listens has no peer
                there = copy.getpeername()[1]
            if self._store_port not in (here, there) and there != self._master_port:
                copy.shutdown(socket.SHUT_RDWR)

    def _keep_cutting(self) -> None:
        """Until the ring is closed. A process that cannot get out of it ends itself."""
        hung, used, cut_at = 0.0, time.process_time(), time.monotonic()
        while not self._closed.wait(CUT_AGAIN_SECONDS):
            self._cut_once()
            before, used = used, time.process_time()
            # In a graph the model computes, too: it hangs where nothing does, or where that takes too long.
            idle = self.in_graph.runs and used - before < IDLE * CUT_AGAIN_SECONDS
            hung = hung + CUT_AGAIN_SECONDS if idle or self._in_engine() else 0.0
            if hung >= HUNG_SECONDS or self.in_graph.overdue(cut_at, time.monotonic()):
                print(f"still inside a broken ring, {HUNG_SECONDS:g} s after it was cut", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                leave(WorkerExit.PEER_BROKEN)

    @property
    def waits(self) -> bool:
        """True while this process has computed its part of a sum, and waits for the other members."""
        return self.in_graph.waits or self._in_engine()

    def _in_engine(self) -> bool:
        """Whether a thread waits in this module, and not in the user's code."""
        others = {thread.ident for thread in threading.enumerate() if thread.name == "cut"}
        others.add(threading.get_ident())  # which asks
        for thread, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            while frame is not None and thread not in others:
                if frame.f_code.co_filename == __file__:
                    return True
                frame = frame.f_back
        return False


class Taking:
    """A state that is on its way, on a thread of its own.

    Args:
        address: asks for the giver's; may wait.
        prepare: see `take`.
        onward: where it is passed on, if it is.
    """

    def __init__(self, address: Callable[[], str], prepare: Prepare, onward: Offer | None):
        self._done = threading.Event()
        self._prepare, self._onward, self._state = prepare, onward, None
        self._error: Exception | None = None
        self._connection: socket.socket | None = None
        threading.Thread(target=self._take, args=(address,), name="take", daemon=True).start()

    @property
    def here(self) -> bool:
        return self._done.is_set()

    def state(self) -> Any:
        self._done.wait()
        if isinstance(self._error, (TransferFailed, RingBroken, OSError, HTTPException)):
            raise RingBroken(f"the state did not come: {self._error}") from self._error
        if self._error is not None:
            raise self._error  # this worker's own trouble, or its network's: it is to be replaced
        state, self._state = self._state, None
        return state

    def close(self) -> None:
        if self._onward is not None:
            self._onward.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _take(self, address: Callable[[], str]) -> None:
        give_way()
        try:
            self._state = self._prepare(take(address(), self._is_connected, self._onward, snapshot.room))
        except Exception as error:  # for who waits for it
            self._error = error
        self._done.set()

    def _is_connected(self, connection: socket.socket) -> None:
        self._connection = connection


def _address_of(interface: str) -> str:
    """An address at which the other members reach this machine: as Gloo does it, the interface's first."""
    found = psutil.net_if_addrs().get(interface, ())
    addresses = [a.address for a in found if a.family in INTERNET and not a.address.startswith("fe80:")]
    if not addresses:
        raise RingBroken(f"the network interface {interface} has no address")
    return addresses[0]


def _sum(vector: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(vector, op=hvd.Sum, name="step", ignore_name_scope=True)


class GraphSums:
    """Sums over the ring that a graph makes by operations of its own, while it goes on computing.

    Promise: a sum is made, whatever TensorFlow makes of the graph. The operation is not marked as having an
    effect: two with equal inputs would be made one, and one of a constant would be computed while the graph
    is optimized; on some ranks, and the others would wait for ever. So each carries its name as an
    attribute, by which it differs from all others. That no input is a constant is the caller's business.
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
        """There is a ring of so many."""
        self._size = size
        self._alone.assign(False)

    WIRES: tuple[str, ...] = ("float32", "float16")  # types that Gloo sums

    def __call__(self, tensor: tf.Tensor, name: str, wire: str = "float32") -> tf.Tensor:
        """The sum over all ranks of a float32 tensor; shape and name are the same on all ranks. It has no
        gradient.

        Args:
            wire: the type as which it travels, one of WIRES.
        """
        with _without_callbacks():
            # In a ring of one it is the tensor itself. (A branch would be a graph of its own, to be traced.)
            ours, mine = tf.raw_ops.Switch(data=tf.stop_gradient(tensor), pred=self._alone)
            total = _allreduce(tf.cast(ours, wire), name=f"{NAMED}{name}", op=hvd.Sum, ignore_name_scope=True)
            total.op._set_attr(ATTRIBUTE, attr_value_pb2.AttrValue(s=name.encode()))
            found, _ = tf.raw_ops.Merge(inputs=[tf.cast(total, tensor.dtype), mine])
        return found

    def next_call(self) -> int:
        self._call += 1
        return self._call

    def mark(self, call: tf.Tensor) -> None:
        self._waiting.assign(call)

    @property
    def waits(self) -> bool:
        """True while the graph that runs has nothing left to compute before a sum comes back."""
        return self.runs and int(self._waiting.numpy()) == self._call

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        """Around the call of a graph.

        Raises:
            RingBroken: one of its sums did not come back.
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
            raise RingBroken(f"allreduce: {_why(error)}") from error
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


# Only a Horovod for a GPU that has patch 14 has this. It returns at once.
_abort_nccl: Callable[[], None] | None = getattr(_basics.MPI_LIB_CTYPES, "horovod_abort", None)
NAMED = "sum_of_ring_"
ATTRIBUTE = "_sum_of_ring"


@contextlib.contextmanager
def _broken(what: str) -> Iterator[None]:
    """Nothing but Horovod runs inside: an error is the ring's. Keeps the cause."""
    try:
        yield
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise RingBroken(f"{what}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """What an error says, in one line. Of one in a graph TensorFlow says before it where the operation was
    made, and after it which one it was, in [[ ]]."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((number for number, line in enumerate(lines) if "[[" in line), 0)
    return lines[max(0, named - 1)][:200] if lines else type(error).__name__


def _open_sockets() -> Iterator[tuple[int, str]]:
    """This process's sockets as (descriptor, inode); a descriptor's number alone may be reused."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name), os.readlink(f"/proc/self/fd/{name}")
