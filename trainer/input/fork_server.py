# SPDX-License-Identifier: Apache-2.0
"""The process that a worker's reader processes are forked from.

    python -m edl.trainer.input.fork_server DESCRIPTOR MODULE:CLASS SPEC

A worker has TensorFlow's and gRPC's threads, and a process with threads must not be forked. So the worker
starts this process by exec. It imports the libraries of a reader, which takes seconds, and runs nothing: it
has one thread. Forked from here, a reader is ready in milliseconds, and shares the memory of what was
imported. The user's module and data are opened in the reader itself, as in a worker: an open file must not be
shared.

Over the socket DESCRIPTOR the worker sends one JSON line per order: {"fork": true}, with a socket that
becomes the reader's, or {"wait": PID}. The answers are {"pid": PID} and {"code": CODE} (negative: a signal).

Readers never outlive their worker. This process ends when the socket is closed, or when its parent is another
one: the worker is gone. The kernel kills the readers when this process ends (PR_SET_PDEATHSIG), also when it
is killed itself. CLASS(**SPEC) makes what answers the worker's requests (trainer/input/reader_process.py).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from edl.trainer.input.reader_process import serve
from edl.trainer.runtime.termination import PR_SET_PDEATHSIG, prctl

LOOK_SECONDS = 0.5  # between two looks at the process ID of the parent


def main(argv: list[str]) -> None:
    """Fork readers on order until the worker is gone."""
    descriptor, service, spec = argv
    worker = os.getppid()
    connection = socket.socket(fileno=int(descriptor))
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when its readers end
        signal.signal(number, signal.SIG_IGN)
    module, name = service.split(":")
    factory = getattr(importlib.import_module(module), name)
    arguments = json.loads(spec)
    gc.freeze()  # forked readers keep sharing this memory
    while os.getppid() == worker:
        if not select.select([connection], [], [], LOOK_SECONDS)[0]:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
        if not data:
            return
        order = json.loads(data)
        if "wait" in order:
            connection.sendall(_line({"code": _wait(order["wait"])}))
            continue
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            connection.close()
            _become_reader(descriptors[0], me, factory, arguments)
        os.close(descriptors[0])
        connection.sendall(_line({"pid": pid}))


def _become_reader(descriptor: int, parent: int, factory: Any, arguments: dict[str, Any]) -> NoReturn:
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it has ended before the kernel was asked
            serve(socket.socket(fileno=descriptor), partial(factory, **arguments))
    finally:
        os._exit(0)


def _wait(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _line(answer: dict[str, int]) -> bytes:
    return (json.dumps(answer) + "\n").encode()


if __name__ == "__main__":
    main(sys.argv[1:])
