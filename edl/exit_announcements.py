# SPDX-License-Identifier: Apache-2.0
"""Exit codes of edl that cannot be confused with those of the user's code.

A worker's process runs the user's code, which may end it with any exit code (`os._exit(3)`). So edl's own
code announces each exit to the process's parent over a pipe. Of the codes that mean something to the master,
the parent believes only one that was announced.

The first process of a container has no parent that reads a pipe. It announces its exit in the container's
termination message, which the kubelet reports with the exit code.
"""

from __future__ import annotations

import contextlib
import os

from edl.contract.exit_codes import ANNOUNCED, WorkerExit

VARIABLE = "EDL_EXIT_PIPE"  # the descriptor, for a process that is started by exec
TERMINATION_MESSAGE = "/dev/termination-log"  # Kubernetes' default; absent outside containers


class Announcement:
    """The parent's side: one object per worker process, created before the process starts."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()  # closed by exec, unless it is passed on
        os.set_blocking(self._read, False)

    def started(self) -> None:
        """Close the process's end of the pipe, which the started process has inherited."""
        os.close(self.write)

    def believed(self, code: int) -> int:
        """The exit code to act on, once the process has ended with `code` (negative: a signal)."""
        said = b""
        with contextlib.suppress(BlockingIOError):  # a child of the worker still has the other end
            said = os.read(self._read, 1)
        os.close(self._read)
        return _believed(code, list(said) == [code])


def announced_in(message: str, code: int) -> int:
    """The exit code to act on for a container that has ended with this code and termination message."""
    return _believed(code, message.strip() == termination_message(code))


def termination_message(code: int) -> str:
    """The termination message that announces an exit."""
    return f"edl has ended this process with exit code {code}"


def _believed(code: int, announced: bool) -> int:
    return WorkerExit.USER_CODE if code in ANNOUNCED and not announced else code


class _Pipe:
    """The worker's end; -1 if its parent reads no announcements."""

    def __init__(self) -> None:
        self.descriptor, self.inode = -1, 0


_pipe = _Pipe()


def announce_to(descriptor: int) -> None:
    """Mark this process as a worker that announces its exit to `descriptor`.

    Its own children do not inherit the descriptor by exec.
    """
    os.set_inheritable(descriptor, False)
    _pipe.descriptor, _pipe.inode = descriptor, os.fstat(descriptor).st_ino


def announce_as_told() -> None:
    """Call `announce_to` with the descriptor that the environment names, if it names one."""
    if given := os.environ.pop(VARIABLE, ""):
        announce_to(int(given))


def announce(code: int) -> None:
    """Announce that this process exits with this code now, by decision of edl's own code."""
    with contextlib.suppress(OSError):
        if _pipe.descriptor < 0:
            message = os.open(TERMINATION_MESSAGE, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            os.write(message, termination_message(code).encode())
            os.close(message)
            return
        # The user's code may have closed it, and another file may have its number.
        if os.fstat(_pipe.descriptor).st_ino == _pipe.inode:
            os.write(_pipe.descriptor, bytes([code]))
