# SPDX-License-Identifier: Apache-2.0
"""The ring on Horovod's Gloo engine, over arrays in host memory. It needs no framework.

Facts that shape it, each with its incident in patches/README.md:
- Horovod pairs operations by name. The sums of `reduce` share one name, and come one at a time.
- A broken ring is cut: the sockets that appeared while it was formed are shut down. So every rank's
  collective fails in milliseconds and not after Gloo's timeout. While a broken ring is still being formed,
  connections keep appearing, so the cut is repeated.
- The master watches liveness, so Gloo's own timeout is long: a rank may take minutes for a step.
- Horovod's background thread asks all ranks what can be summed when this process has a tensor (patch 12), and
  otherwise now and then. So an idle ring notices that it is cut or that a rank has left.
- Only RANK and SIZE are set in the environment ("flat"): half the connections.
- Nothing of `horovod.runner` is ever imported or started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil

from edl.contract.exit_codes import WorkerExit
from edl.errors import EdlError
from edl.trainer.ring.base import Prepare, RingBroken
from edl.trainer.ring.transfer import (
    PeerListener,
    StateSender,
    TransferFailed,
    allocate,
    lower_priority,
    receive_state,
)
from edl.trainer.runtime.termination import leave, shielded

INTERNET = (socket.AF_INET, socket.AF_INET6)
NO_PORT = -1
CUT_AGAIN_SECONDS = 0.1
HUNG_SECONDS = 10.0  # inside a ring that was cut
REASON = 1024  # bytes of an error of Horovod
# Horovod's numbers of the types of values (horovod/common/message.h)
DTYPES = {"uint8": 0, "int32": 4, "int64": 5, "float32": 7, "float64": 8}


class GlooRing:
    """One member's end of a Gloo ring. `reduce` sums in the memory of its argument.

    Args:
        store_port: the port of the loopback rendezvous store of this process.
        interface: network interface by which the members reach each other.
        name: the name of this worker, unique in the job.
        master_port: the port of the worker's stream to the master, whose socket a cut must spare.
        store_secret: the prefix of each path of the store.
    """

    _modules = frozenset({__file__})  # a thread with a frame of these is inside the engine

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
            HOROVOD_ELASTIC="0",  # else it asks the store for keys of Horovod's own launcher
            # The engine's errors are raised as RingBroken, and a cut ring is no error to show.
            HOROVOD_LOG_LEVEL=os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),
        )
        self._store_port, self._master_port, self._interface = store_port, master_port, interface
        self._store_secret = store_secret
        self._rank, self._size = 0, 0
        self._is_alone = False  # in a ring that has made a sum: all that a larger one needs was touched
        self._transfers: list[StateSender | StateReceiver] = []  # of this ring
        self._lock = threading.Lock()
        self._outside: frozenset[tuple[int, str]] = frozenset()  # sockets from before this ring
        self._sockets: frozenset[tuple[int, str]] | None = None  # of this ring, once it is formed
        self._is_cut = threading.Event()
        self._closed = threading.Event()
        self._closed.set()

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
        else:  # a ring of one needs no rendezvous; with an address set it would ask itself
            os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR", None)
        with shielded():  # Gloo takes an interrupted wait for a broken connection
            self._initialize()
        with self._lock:
            self._sockets = frozenset(_open_sockets()) - self._outside
        if self._is_cut.is_set():
            raise RingBroken("the ring was cut while it was being formed")

    def reduce(self, vector: Any) -> Any:
        if self._is_alone and not self._is_cut.is_set():
            return vector
        total = self._reduce(vector)
        self._is_alone = self._size == 1
        return total

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        found = np.array(data, order="C")
        self._call("broadcast", "horovod_broadcast_buffer", found, root)
        return found

    def _initialize(self) -> None:
        """Meet the other members.

        Raises:
            RingBroken: the engine could not be initialized.
        """
        if not library().horovod_init(None, 0, None, None, 0):
            raise RingBroken("hvd.init: a member died, or the generation was called off")

    def _shut_engine_down(self) -> None:
        library().horovod_shutdown()

    def _reduce(self, vector: Any) -> Any:
        self._call("allreduce", "horovod_allreduce_buffer", vector)
        return vector

    def _call(self, what: str, function: str, array: np.ndarray, *arguments: int) -> None:
        """Call an operation on an array in place.

        Raises:
            RingBroken: the operation has failed.
        """
        assert array.flags.c_contiguous and array.flags.writeable, "summed in place"
        reason = ctypes.create_string_buffer(REASON)
        operation = getattr(library(), function)
        dtype = DTYPES[array.dtype.name]
        if operation(array.ctypes.data, array.size, dtype, *arguments, b"step", reason, REASON):
            raise RingBroken(f"{what}: {reason.value.decode(errors='replace').partition(chr(10))[0][:200]}")

    def send_state(self, parts: Sequence[np.ndarray]) -> None:
        sender = StateSender(_address_of(self._interface), parts)
        self._transfers.append(sender)
        self._store("PUT", self._rank, sender.address)

    def receive_state(self, source: int, prepare: Prepare, forward: bool = False) -> StateReceiver:
        forward_to = PeerListener(_address_of(self._interface)) if forward else None
        receiver = StateReceiver(lambda: self._store("GET", source), prepare, forward_to, self.allocate)
        self._transfers.append(receiver)
        if forward_to is not None:
            self._store("PUT", self._rank, forward_to.address)
        return receiver

    def allocate(self, nbytes: int) -> np.ndarray:
        return allocate(nbytes)

    def _store(self, method: str, rank: int, address: str = "") -> str:
        """Ask the rendezvous store. GET waits until the rank has put its address.

        Horovod's own keys are named after the rank alone (trainer/session/client.py), so this key is not.

        Raises:
            RingBroken: the master has called the ring off.
        """
        connection = HTTPConnection("127.0.0.1", self._store_port)
        with contextlib.closing(connection):
            connection.request(method, f"/{self._store_secret}/state/of-{rank}", address or None)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != HTTPStatus.OK:
            raise RingBroken("the ring was called off before a state was sent")
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
        self._shut_engine_down()
        self._closed.set()

    def _break_off(self) -> None:
        """Break off all transfers of states."""
        for transfer in list(self._transfers):
            transfer.close()

    def _cut_once(self) -> None:
        with self._lock:
            if not self._is_cut.is_set():  # meanwhile the next ring is being formed
                return
            self._abort()
            ours = self._sockets if self._sockets is not None else frozenset(_open_sockets()) - self._outside
            for fd, inode in ours:
                self._shut_down(fd, inode)

    def _shut_down(self, fd: int, inode: str) -> None:
        """shutdown(2) the socket, unless its descriptor was reused, or it is not Gloo's.

        While a ring is formed, requests to the rendezvous store come and go (they are answered with 410,
        which is quicker than a broken connection), and the stream may find a new master.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.readlink(f"/proc/self/fd/{copy.fileno()}") != inode or copy.family not in INTERNET:
                return
            here, there = copy.getsockname()[1], NO_PORT
            with contextlib.suppress(OSError):  # one that listens has no peer
                there = copy.getpeername()[1]
            if self._store_port not in (here, there) and there != self._master_port:
                copy.shutdown(socket.SHUT_RDWR)

    def _abort(self) -> None:
        """End waits that no connection ends; without NCCL no wait is of this kind."""

    def _is_stuck(self, used: float) -> bool:
        """Whether a graph waits for the ring. A ring without a framework has no graphs.

        Args:
            used: processor time of this process lately, in cores.
        """
        return False

    def _is_overdue(self, cut_at: float) -> bool:
        """Whether a graph has run for too long since the ring was cut."""
        return False

    def _keep_cutting(self) -> None:
        """Repeat the cut until the ring is closed. End the process if it cannot leave the ring."""
        hung, used, cut_at = 0.0, time.process_time(), time.monotonic()
        while not self._closed.wait(CUT_AGAIN_SECONDS):
            self._cut_once()
            before, used = used, time.process_time()
            stuck = self._in_engine() or self._is_stuck((used - before) / CUT_AGAIN_SECONDS)
            hung = hung + CUT_AGAIN_SECONDS if stuck else 0.0
            if hung >= HUNG_SECONDS or self._is_overdue(cut_at):
                print(f"still inside a broken ring, {HUNG_SECONDS:g} s after it was cut", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                leave(WorkerExit.PEER_BROKEN)

    @property
    def waits(self) -> bool:
        """True while this process has computed its part of a sum, and waits for the other members."""
        return self._in_engine()

    def _in_engine(self) -> bool:
        """Whether a thread waits in a ring's module, and not in the user's code."""
        others = {thread.ident for thread in threading.enumerate() if thread.name == "cut"}
        others.add(threading.get_ident())  # the thread that asks
        for thread, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            while frame is not None and thread not in others:
                if frame.f_code.co_filename in self._modules:
                    return True
                frame = frame.f_back
        return False


class StateReceiver:
    """Receives a state on a thread of its own (a `StateFuture`).

    Args:
        address: asks for the source's address; may wait.
        prepare: see `receive_state`.
        forward_to: the listener whose peer the state is forwarded to; None to forward it nowhere.
        allocate: returns memory for a part.
    """

    def __init__(
        self,
        address: Callable[[], str],
        prepare: Prepare,
        forward_to: PeerListener | None,
        allocate: Callable[[int], np.ndarray],
    ):
        self._done, self._allocate = threading.Event(), allocate
        self._prepare, self._forward_to, self._state = prepare, forward_to, None
        self._error: Exception | None = None
        self._connection: socket.socket | None = None
        threading.Thread(target=self._receive, args=(address,), name="receive", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        self._done.wait()
        if isinstance(self._error, (TransferFailed, RingBroken, OSError, HTTPException)):
            raise RingBroken(f"the state was not received: {self._error}") from self._error
        if self._error is not None:
            raise self._error  # an error of this worker or its network: the master replaces the worker
        state, self._state = self._state, None
        return state

    def close(self) -> None:
        if self._forward_to is not None:
            self._forward_to.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, address: Callable[[], str]) -> None:
        lower_priority()
        try:
            self._state = self._prepare(
                receive_state(address(), self._is_connected, self._forward_to, self._allocate)
            )
        except Exception as error:  # raised by `result`
            self._error = error
        self._done.set()

    def _is_connected(self, connection: socket.socket) -> None:
        self._connection = connection


def _address_of(interface: str) -> str:
    """Return the address at which the other members reach this machine.

    It is the interface's first, as Gloo chooses it.

    Raises:
        RingBroken: the interface has no address.
    """
    found = psutil.net_if_addrs().get(interface, ())
    addresses = [a.address for a in found if a.family in INTERNET and not a.address.startswith("fe80:")]
    if not addresses:
        raise RingBroken(f"the network interface {interface} has no address")
    return addresses[0]


@functools.cache
def library() -> ctypes.CDLL:
    """Horovod's engine without a framework (patch 16), loaded when it is first used.

    Raises:
        EdlError: the installed Horovod has no such library.
    """
    found = importlib.util.find_spec("horovod")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    library = next((file for place in places for file in place.glob("tensorflow/host_buffers*.so")), None)
    if library is None:
        raise EdlError(
            "a script's workers need the Horovod that is built with edl's patches (patches/README.md), and "
            f"{'none' if found is None else 'a different one'} is installed: pip install edl-horovod"
        )
    engine = ctypes.CDLL(str(library))
    engine.horovod_init.restype = ctypes.c_bool
    pointer, count, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
    engine.horovod_allreduce_buffer.argtypes = [pointer, count, number, text, text, number]
    engine.horovod_broadcast_buffer.argtypes = [pointer, count, number, number, text, text, number]
    atexit.register(engine.horovod_shutdown)  # its thread must not outlive what it uses
    return engine


def _open_sockets() -> Iterator[tuple[int, str]]:
    """This process's sockets as (descriptor, inode); a descriptor's number alone may be reused."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name), os.readlink(f"/proc/self/fd/{name}")
