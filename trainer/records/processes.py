# SPDX-License-Identifier: Apache-2.0
"""The worker's side of its reader processes: starts them, calls them, and finds out how they ended.

The final model is verified in such a process, too (trainer/export/verification.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edl.contract.own_modules import module_command
from edl.errors import DataError
from edl.trainer.records.fork_server import Forked, line, take_prepared
from edl.trainer.records.wire import Closed, Packet, pack, receive, send
from edl.trainer.runtime.error_report import raise_relayed
from edl.trainer.runtime.watchdog import STEP_TIMEOUT

STARTS = 3  # of the fork server, for one reader
ABORT_SECONDS = 5.0  # in which a process that hangs writes its stack
# Variables of a worker that its readers must not see: they are not members of the job.
OWN = frozenset(
    {
        "EDL_TOKEN",
        "EDL_TOKEN_FILE",
        "EDL_MASTER",
        "EDL_WORKER_ID",
        "EDL_RUN_ID",
        "EDL_RING_INTERFACE",
        "TF_CONFIG",
    }
)
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
# Readers compute on one thread each, because they are as many as there are cores for them, and on no GPU.
ENVIRONMENT = {
    **NO_GPU,
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
CAUSES = {
    signal.SIGKILL: "was killed (SIGKILL), perhaps because memory ran out",
    signal.SIGABRT: "has aborted (SIGABRT)",
}


class ReaderDied(Exception):
    """A reader process has ended during a call.

    Args:
        how: the end of the sentence "the reader process ...".
        charged: False if the call cannot be the cause.
    """

    def __init__(self, how: str, charged: bool = True):
        super().__init__(how)
        self.how, self.charged = how, charged


class ForkServer:
    """The process that forks readers (trainer/records/fork_server.py).

    It is started with the first reader. If it ends, its spare takes over; if both end, it is started again.

    Args:
        service: `module:class` of the object whose methods are called in readers.
        spec: its arguments, as JSON can hold them.
        start_seconds: the time in which a reader must be there.
        setting: the value of the job that sets this time, for messages.
        what: the forked processes, for messages.
        environment: variables of the process, beside this worker's.
        prepared: use the process that this worker has prepared, if it has.
    """

    def __init__(
        self,
        service: str,
        spec: Mapping[str, Any],
        start_seconds: float,
        setting: str,
        what: str = "readers of the data",
        environment: Mapping[str, str] = ENVIRONMENT,
        prepared: bool = False,
    ):
        self._service, self._spec, self._prepared = service, dict(spec), prepared
        self.seconds, self._setting, self._what, self._environment = start_seconds, setting, what, environment
        self._closed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | Forked | None = None  # the first; spares are its descendants
        self._connection: socket.socket | None = None
        self._numbers = itertools.count()  # of orders
        self.pid: int | None = None  # of the process that has forked the newest reader

    def start(self) -> None:
        """Start the process, so that it imports while the worker does something else."""
        with self._lock:
            self._begin()

    def reader(self) -> ReaderProcess:
        """Fork a reader.

        Raises:
            DataError: it is not there in time.
        """
        with self._lock:
            for _ in range(STARTS):
                if self._closed:
                    break
                self._begin()
                # A new pair for each order: one that was lost may have been carried out.
                ours, theirs = socket.socketpair()
                with theirs:
                    answer = self._ask({"fork": True}, [theirs.fileno()])
                if answer is not None:
                    if self.pid is not None and self.pid != answer["parent"]:
                        _reap(self.pid)
                    self.pid = answer["parent"]
                    return ReaderProcess(self, answer["parent"], answer["pid"], ours)
                ours.close()
        raise DataError(
            f"the process that starts {self._what} has ended {STARTS} times before it started one; the "
            "worker's log says why"
        )

    def exit_code(self, parent: int, pid: int) -> int | None:
        """Wait for a reader that has ended, and return its exit code (negative: a signal).

        Args:
            parent: the process that has started it.

        Returns:
            None if the parent has ended, and the reader with it.
        """
        with self._lock:
            if self._connection is None:
                return None
            answer = self._ask({"wait": pid, "parent": parent})
            return None if answer is None else answer["code"]

    def close(self) -> None:
        """End this process and all readers. None can be forked afterwards."""
        self._closed = True
        # A thread that waits for an answer holds the lock. The shutdown ends a process that has taken over,
        # and a spare; a process that imports must be killed.
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):  # it is closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _begin(self) -> None:
        if self._connection is not None:
            return
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in OWN and not name.startswith("HOROVOD_")
        }
        environment |= self._environment
        if self._prepared and (found := take_prepared()) is not None:
            self._process, self._connection = found
            serve = {"serve": self._service, "spec": self._spec, "environment": environment}
            with contextlib.suppress(OSError):  # it has ended; the next order finds that out
                self._connection.sendall(line(serve))
            return
        ours, theirs = socket.socketpair()
        command = [*module_command("edl.trainer.records.fork_server"), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, self._service, json.dumps(self._spec)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                # A Ctrl-C in the terminal is the worker's to handle. A session of its own would do that, too,
                # but Linux schedules sessions against each other (autogroups), and readers would starve.
                process_group=0,
            )
        self._connection = ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any] | None:
        """Send an order, and return its answer; None if the process ends before, and perhaps has a successor.

        Raises:
            DataError: it does not answer in time.
        """
        assert self._connection is not None
        number, answers = next(self._numbers), b""
        try:
            self._forget_answers()
            self._connection.settimeout(self.seconds)
            socket.send_fds(self._connection, [line({**order, "number": number})], list(descriptors))
            while data := self._connection.recv(4096):
                *lines, answers = (answers + data).split(b"\n")
                for answer in map(json.loads, lines):
                    if "successor" in answer:
                        return None
                    if answer["number"] == number:
                        return dict(answer)
        except TimeoutError:
            self._end()
            raise DataError(
                f"{self._what} have not started within {self.seconds:g} s ({self._setting})"
            ) from None
        except OSError:  # as if closed
            pass
        self._end()
        return None

    def _forget_answers(self) -> None:
        """Discard what has arrived since the last order: successors, and answers that came too late.

        Raises:
            OSError: the connection is closed, with an order unread.
        """
        assert self._connection is not None
        self._connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._connection.recv(4096):
                pass


def _reap(pid: int) -> None:
    """Remove a process that has ended from the table of processes: orphans are children of a subreaper."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class ReaderProcess:
    """One reader process.

    Args:
        parent: the process that has started it.
        pid: its process ID. No other process gets it before the parent has waited for it.
        connection: where it answers requests.
    """

    def __init__(self, server: ForkServer, parent: int, pid: int, connection: socket.socket):
        self._server, self._parent, self.pid, self._connection = server, parent, pid, connection
        self.answered = False  # a request: its data are open
        self._alive: int | None = None  # becomes readable when the process ends
        with contextlib.suppress(
            ProcessLookupError
        ):  # it has ended with its parent, and closed the connection
            self._alive = os.pidfd_open(pid)

    def call(
        self,
        method: str,
        arguments: Sequence[Any],
        pieces: Sequence[Packet],
        seconds: float,
        setting: str = STEP_TIMEOUT,
    ) -> Packet:
        """Call a method in the process, and return its packed result.

        Args:
            pieces: further arguments.
            seconds: the time that it may take.
            setting: the value of the job that sets this time, for messages.

        Raises:
            ReaderDied: the process has ended, or was ended because it hangs.
            others: as the method; a RelayedError for an error that is not one of `edl.errors`.
        """
        deadline = time.monotonic() + seconds
        self._connection.settimeout(seconds)
        try:
            send(self._connection, [pack((method, tuple(arguments))), *pieces])
            error, *result = receive(self._connection, self._alive, deadline)
        except Closed:
            raise self._ended() from None
        except TimeoutError:
            self._abort()
            self._ended()
            raise ReaderDied(f"has not answered for {seconds:g} s ({setting})") from None
        self.answered = True
        if (relayed := error.unpack()) is not None:
            raise_relayed(relayed)
        return result[0]

    def close(self) -> None:
        """End the process."""
        self._kill(signal.SIGKILL)
        self._ended()

    def _ended(self) -> ReaderDied:
        """Wait for the end of the process, and describe it."""
        self._kill(signal.SIGKILL)  # it may have closed its connection only
        code = self._server.exit_code(self._parent, self.pid)
        self._connection.close()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        if code is None:
            _reap(self.pid)
            return ReaderDied("has ended with the process that had started it", charged=False)
        if code >= 0:
            return ReaderDied(f"has ended with exit code {code}")
        name = signal.Signals(-code)
        return ReaderDied(CAUSES.get(name, f"has crashed ({name.name})"))

    def _abort(self) -> None:
        """Let a process that hangs write its stack to the log, and end."""
        self._kill(signal.SIGABRT)
        with contextlib.suppress(Closed, TimeoutError):
            while True:
                receive(self._connection, self._alive, time.monotonic() + ABORT_SECONDS)

    def _kill(self, number: int) -> None:
        if self._alive is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._alive, number)
