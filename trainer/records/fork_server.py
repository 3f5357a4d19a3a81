# SPDX-License-Identifier: Apache-2.0
"""The process that a worker's reader processes are forked from.

    python -m edl.trainer.records.fork_server DESCRIPTOR MODULE:CLASS SPEC

A worker has TensorFlow's and gRPC's threads, and a process with threads must not be forked. This process has
one thread: it has imported the libraries of a reader, and runs nothing. Forked from here, a reader is ready
in milliseconds, and shares the memory of what was imported. The user's module and data are opened in the
reader itself, as in a worker: an open file must not be shared.

Most workers are forked themselves, from a process that has imported TensorFlow. Such a worker forks this
process before its first thread (`prepare`), so nothing is imported again, and sends {"serve": MODULE:CLASS,
"spec": SPEC, "environment": {...}} first. Other workers start it by exec, and it imports for seconds.

Over the socket the worker sends one JSON line per order: {"fork": true}, with a socket that becomes the
reader's, or {"wait": PID, "parent": PID}. The answers are {"pid": PID, "parent": PID} and {"code": CODE}
(negative: a signal; null: the parent of the reader has ended). Each repeats the number of its order.

To import again after this process was killed would take seconds, in which the ring waits for records. So this
process forks a spare, which waits for its end, sends {"successor": PID} and carries out the orders from then
on. A spare that ends is replaced. Only if both end at once, the worker starts a process by exec.

Readers never outlive their worker. This process and its spare end when the socket is closed, or when the
worker ends. The kernel kills the readers when this process ends (PR_SET_PDEATHSIG), also when it is killed
itself. CLASS(**SPEC) makes what answers the worker's requests (trainer/records/reader_process.py).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from edl.trainer.records.reader_process import serve
from edl.trainer.runtime.termination import PR_SET_PDEATHSIG, name_process, prctl

NAME = "edl-readers"  # of this process and of readers, in `ps` and `top`
SPARE = "edl-spare"  # of the process that waits for the end of this one
IMPORTED = "edl.trainer.model.records_service"  # the last module that a process which forks workers imports


class Forked:
    """A child process, with the methods of `subprocess.Popen` that its starter needs."""

    def __init__(self, pid: int):
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal); None while the process runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        code = self._look(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # a different thread has waited for it
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


_prepared: list[tuple[Forked, socket.socket]] = []  # at most one


def prepare() -> None:
    """Fork this process from a worker that has no thread yet, if the worker was forked with all imports."""
    if IMPORTED not in sys.modules or len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    ours, theirs = socket.socketpair()
    worker, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        try:
            os.setpgid(0, 0)  # as with exec (trainer/records/processes.py)
            _run(theirs, worker, None)
        finally:
            os._exit(0)
    theirs.close()
    _prepared.append((Forked(pid), ours))


def take_prepared() -> tuple[Forked, socket.socket] | None:
    """Return the process that `prepare` has forked, once; None without one."""
    return _prepared.pop() if _prepared else None


def drop_prepared() -> None:
    """End the process that `prepare` has forked: this worker has no readers."""
    if (prepared := take_prepared()) is not None:
        process, connection = prepared
        connection.close()
        process.kill()
        process.wait()


def main(argv: list[str]) -> None:
    """Fork readers on order until the worker is gone."""
    descriptor, service, spec = argv
    _run(socket.socket(fileno=int(descriptor)), os.getppid(), _factory(service, json.loads(spec)))


def _factory(service: str, spec: dict[str, Any]) -> Any:
    module, name = service.split(":")
    return partial(getattr(importlib.import_module(module), name), **spec)


def _run(connection: socket.socket, worker: int, factory: Any) -> None:
    name_process(NAME)
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when its readers end
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # forked readers keep sharing this memory
    worker_ends = os.pidfd_open(worker)
    if os.getppid() == worker:  # else it has ended before, and the process ID may be of a different process
        _Forking(connection, worker_ends, factory).run()


class _Forking:
    """Forks readers on order; has a spare, which continues in the same loop after the end of this process.

    Args:
        connection: to the worker; shared with the spare.
        worker_ends: becomes readable when the worker ends.
        factory: makes what answers the requests in a reader.
    """

    def __init__(self, connection: socket.socket, worker_ends: int, factory: Any):
        self._connection, self._worker_ends, self._factory = connection, worker_ends, factory
        self._pending, self._descriptors = b"", list[int]()  # received, not yet carried out
        self._spare = 0  # its process ID
        self._spare_ends: int | None = None  # becomes readable when it ends

    def run(self) -> None:
        """Return when the worker has ended or has closed the connection; the spare has ended then, too."""
        try:
            self._follow()
        finally:
            if self._spare:  # a child of this process until it is waited for, so the number is its own
                os.kill(self._spare, signal.SIGKILL)

    def _follow(self) -> None:
        while True:
            watched: list[Any] = [self._connection, self._worker_ends]
            if self._spare_ends is not None:
                watched.append(self._spare_ends)
            ready, _, _ = select.select(watched, [], [])
            if self._worker_ends in ready:
                return
            if self._spare_ends in ready:
                os.waitpid(self._spare, 0)
                self._fork_spare()
            if self._connection in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Carry out the orders that have arrived; False if the connection is closed."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, 4096, 1)
        self._descriptors += descriptors
        *lines, self._pending = (self._pending + data).split(b"\n")
        for order in map(json.loads, lines):
            if "serve" in order:
                os.environ.clear()
                os.environ.update(order["environment"])
                self._factory = _factory(order["serve"], order["spec"])
            elif "wait" in order:
                self._answer(
                    order, {"code": _wait(order["wait"]) if order["parent"] == os.getpid() else None}
                )
            else:
                descriptor = self._descriptors.pop(0)
                me, pid = os.getpid(), os.fork()
                if pid == 0:
                    self._connection.close()
                    _become_reader(descriptor, me, self._factory)
                os.close(descriptor)
                self._answer(order, {"pid": pid, "parent": me})
                if self._spare_ends is None:  # not earlier: now there are readers, and `serve` came before
                    self._fork_spare()
        return bool(data)

    def _answer(self, order: dict[str, Any], answer: dict[str, Any]) -> None:
        self._connection.sendall(line(answer | {"number": order["number"]}))

    def _fork_spare(self) -> None:
        """Fork the spare. The spare itself returns when this process has ended, with a spare of its own."""
        while True:
            if self._spare_ends is not None:
                os.close(self._spare_ends)
            this_ends = os.pidfd_open(os.getpid())
            self._spare = os.fork()
            if self._spare:
                os.close(this_ends)
                self._spare_ends = os.pidfd_open(self._spare)
                return
            self._spare_ends = None
            name_process(SPARE)
            if self._worker_ends in select.select([self._worker_ends, this_ends], [], [])[0]:
                os._exit(0)
            os.close(this_ends)
            name_process(NAME)
            try:
                self._connection.sendall(line({"successor": os.getpid()}))
            except OSError:  # closed: a further spare would outlive this process in the same way, for ever
                os._exit(0)


def _become_reader(descriptor: int, parent: int, factory: Any) -> NoReturn:
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it has ended before the kernel was asked
            serve(socket.socket(fileno=descriptor), factory)
    finally:
        os._exit(0)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def line(message: dict[str, Any]) -> bytes:
    """Return an order or an answer as it is sent."""
    return (json.dumps(message) + "\n").encode()


if __name__ == "__main__":
    main(sys.argv[1:])
