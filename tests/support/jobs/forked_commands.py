# SPDX-License-Identifier: Apache-2.0
"""`edl` forked from a process that has imported it, because its imports take most of a second of a core.

A client takes the place of the command: a process with its streams, environment and folder, which passes on
signals, and ends as the command does. If the client is killed, so is the command.

    python -m tests.support.jobs.forked_commands ADDRESS      the process that forks
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
EDL = Path(sys.executable).with_name("edl")
LENGTH = 4  # bytes of the length of an order
# Imports little, so that it starts in some milliseconds.
CLIENT = f"""
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
order = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(order).to_bytes({LENGTH}, "big")], [0, 1, 2])
server.sendall(order)
answers = server.makefile()
pid = int(answers.readline())
passed_on = signal.SIGINT, signal.SIGTERM
for number in passed_on:
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = os.waitstatus_to_exitcode(int(answers.readline() or signal.SIGKILL))
if code < 0:
    for number in passed_on:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def edl() -> list[str]:
    """The words that stand for `edl` in a command. The first call starts the process that forks."""
    folder = tempfile.TemporaryDirectory(prefix="edl-commands-")
    address = f"{folder.name}/socket"
    forks = subprocess.Popen(
        [sys.executable, "-m", __name__, address],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # it ends with this process
        stdout=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # else NumPy starts threads
    )
    assert forks.stdin is not None and forks.stdout is not None
    assert forks.stdout.readline() == b"ready\n"
    atexit.register(folder.cleanup)
    atexit.register(forks.wait)
    atexit.register(forks.stdin.close)  # is called first
    return [sys.executable, "-I", "-S", "-c", CLIENT, address]


class Order(NamedTuple):
    words: list[str]
    folder: str
    environment: dict[str, str]


def _received(connection: socket.socket) -> tuple[Order, list[int]]:
    """An order of a client, and its streams."""
    length, streams, *_ = socket.recv_fds(connection, LENGTH, 3)
    with connection.makefile("rb") as order:
        return Order(*json.loads(order.read(int.from_bytes(length, "big")))), streams


def _say(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.sendall(b"%d\n" % number)


def _next_fork(address: str) -> Order:
    """Fork a process for each order; return it in that process. The process that forks does not return."""
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    clients = dict[int, socket.socket]()  # by the process that was forked for them
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen()
        for source in (sys.stdin, listener, woken):
            selector.register(source, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for pid in clients:
                        os.kill(pid, signal.SIGKILL)
                    sys.exit()
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    order, streams = _received(connection)
                    if not (pid := os.fork()):
                        signal.set_wakeup_fd(-1)
                        for client in (connection, *clients.values()):
                            client.close()
                        for stream, ours in enumerate(streams):
                            os.dup2(ours, stream)
                        for descriptor in (*streams, wakes, woken):
                            os.close(descriptor)
                        return order
                    for stream in streams:
                        os.close(stream)
                    clients[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
                    _say(connection, pid)
                elif key.data in clients and not clients[key.data].recv(1):
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(clients[key.data])
                elif key.fileobj == woken:
                    os.read(woken, 1 << 10)
                    while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                        client = clients.pop(ended[0])
                        _say(client, ended[1])
                        with contextlib.suppress(KeyError):  # it was killed before
                            selector.unregister(client)
                        client.close()


def main() -> None:
    """Fork, and be the command in each process that was forked."""
    import edl.cli.app
    import edl.cli.release.audit
    import edl.cli.release.job
    import edl.report.write

    assert edl.cli.app and edl.cli.release.audit and edl.cli.release.job and edl.report.write
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.freeze()
    order = _next_fork(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path[0] = str(EDL.parent)
    sys.argv = [str(EDL), *order.words]
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    from edl.cli import main as command

    command()


if __name__ == "__main__":
    main()
