# SPDX-License-Identifier: Apache-2.0
"""Termination of a worker's process, together with the processes that it has started.

SIGTERM asks the process to end, as does Ctrl-C (SIGINT) if a user has started it by hand. A second Ctrl-C
ends it at once. These signals are not blocked. A blocked signal stays blocked in every child, also after
exec: a subprocess of the user's code, or a worker of a multiprocessing.Pool, could not be terminated. A
Python handler alone would be late: it runs on the main thread between two bytecodes, and that may be in a
collective, or in the user's code, for minutes. But the interpreter writes to the wakeup descriptor at once,
and a thread reads it.

The user's code may install handlers of its own, as scripts for preemptible machines do: they save something
and call sys.exit. In the middle of a step, that would break the ring, and lose the state if all workers are
asked to end. So these handlers are kept here, and called once the worker has left.

The kernel delivers the signal to the main thread while that thread has it unblocked, so the engine's and
TensorFlow's threads are not disturbed. `shielded` keeps the signal from threads that must not receive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any, NoReturn

import psutil

from edl.exit_announcements import announce
from edl.signals import to_handle

ASKING = frozenset({signal.SIGTERM, signal.SIGINT})
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
MAX_LOOKS = 10  # at what is left of what was started
KILLED_SECONDS = 1.0  # within which the kernel ends a process that is killed


_asked: list[int] = []  # the signal that has asked this process to end
_of_user: dict[int, Any] = {}  # the handlers that the user's code has installed, by signal


def call_handler_of_user() -> None:
    """Call the user's handler of the signal that has asked this process to end, if there is one."""
    handler = _of_user.pop(_asked[0], None) if _asked else None
    if callable(handler):
        with contextlib.suppress(BaseException):  # it calls sys.exit, and this process ends anyway
            handler(_asked[0], None)


def when_asked_to_end(act: Callable[[str], None]) -> None:
    """Call `act`, on a thread of its own, with the name of the first of these signals that arrives.

    Signals that this process was started to ignore stay ignored. Handlers that are installed later are kept
    for `call_handler_of_user`. To be called on the main thread.
    """
    install = signal.signal
    handled = to_handle(ASKING)
    heard, heed = os.pipe()  # closed by exec; see below for fork
    os.set_blocking(heed, False)

    def handle(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # also when the user's code has taken the wakeup descriptor
            os.write(heed, bytes([number]))
        if number == signal.SIGINT:
            install(number, signal.SIG_DFL)

    def keep(signalnum: Any, handler: Any) -> Any:
        """Stand in for signal.signal."""
        if signalnum not in handled or threading.current_thread() is not threading.main_thread():
            return install(signalnum, handler)
        before = _of_user.get(signalnum, signal.SIG_DFL)
        _of_user[signalnum] = handler
        return before

    def as_usual() -> None:
        """Restore the handlers in a forked child: it is no worker, and its signals are its own."""
        signal.signal = install
        if signal.getsignal(signal.SIGINT) is handle:
            install(signal.SIGINT, _of_user.get(signal.SIGINT, signal.default_int_handler))
        if signal.getsignal(signal.SIGTERM) is handle:
            install(signal.SIGTERM, _of_user.get(signal.SIGTERM, signal.SIG_DFL))
            signal.set_wakeup_fd(-1)

    def wait() -> None:
        while not _asked:  # other signals are written there, too
            _asked.extend(number for number in os.read(heard, 4096) if number in handled)
        act(signal.Signals(_asked[0]).name)

    for number in handled:
        install(number, handle)
        signal.siginterrupt(number, False)  # calls of the user's libraries continue after it
    signal.set_wakeup_fd(heed, warn_on_full_buffer=False)
    signal.signal = keep
    os.register_at_fork(after_in_child=as_usual)
    threading.Thread(target=wait, name="signals", daemon=True).start()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Threads that are started in here never get these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave(code: int) -> NoReturn:
    """End this process at once, with an exit code of edl's.

    Not by sys.exit: TensorFlow's and the user's threads have nothing left to do, and the engine of a broken
    ring must not be torn down by static destructors.
    """
    announce(code)
    os._exit(code)


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, so that this process can end them.

    This includes descendants with a session of their own.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Name this process in lists of processes; at most 15 characters."""
    with contextlib.suppress(OSError):
        prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def prctl(option: int, value: int | ctypes.c_char_p) -> None:
    """Call the kernel's function of this name with one argument.

    Raises:
        OSError: the kernel refuses it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def end_children(except_for: Container[int] = ()) -> None:
    """Kill all that this process has started: data loaders, subprocesses of the user's code, and theirs.

    A killed process may have started a further process meanwhile. If this process is a subreaper, that
    process becomes its child. So the children are listed again until none is left.

    Args:
        except_for: the process IDs of children that stay, with all that they have started.
    """
    for _ in range(MAX_LOOKS):
        found = [child for child in psutil.Process().children() if child.pid not in except_for]
        found = [child for child in found if _runs(child)]
        if not found:
            return
        for child in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                for other in (*child.children(recursive=True), child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        other.kill()
        psutil.wait_procs(found, timeout=KILLED_SECONDS)


def _runs(process: psutil.Process) -> bool:
    """False for a zombie: a process that has ended, and whose parent has not waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
