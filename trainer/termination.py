"""How a worker's process is asked to end, and how it takes with it the processes that it has started.

SIGTERM is not blocked. A blocked signal stays blocked in every child, also after exec: a subprocess of the
user's code, or a worker of a multiprocessing.Pool, could not be terminated. A Python handler alone would be
late: it runs on the main thread between two bytecodes, and that may be in a collective, or in the user's
code, for minutes. But the interpreter writes to the wakeup descriptor at once, and a thread reads it.

The kernel gives the signal to the main thread while that one has it unblocked, so the engine's and
TensorFlow's threads are not disturbed; and `shielded` keeps it from threads that could not bear it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import psutil


def on_sigterm(act: Callable[[], None]) -> None:
    """From now on `act` is called, on a thread of its own, when this process gets SIGTERM for the first time.

    To be called on the main thread.
    """
    heard, heed = os.pipe()  # closed by exec; see below for fork
    os.set_blocking(heed, False)

    def handle(*_: object) -> None:
        with contextlib.suppress(OSError):  # also when the user's code has taken the wakeup descriptor
            os.write(heed, bytes([signal.SIGTERM]))

    def as_usual() -> None:
        """In a forked child: it is no worker, and what it gets is not meant for this one."""
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def wait() -> None:
        while signal.SIGTERM not in os.read(heard, 4096):  # other signals are written there, too
            pass
        act()

    signal.signal(signal.SIGTERM, handle)
    signal.siginterrupt(signal.SIGTERM, False)  # calls of the user's libraries go on after it
    signal.set_wakeup_fd(heed, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=as_usual)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Threads that are started in here never get SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_children() -> None:
    """Kill whatever this process has started: data loaders, subprocesses of the user's code, and theirs."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
