"""How a worker's process is asked to end, and how it takes with it the processes that it has started.

It is asked by SIGTERM, or by Ctrl-C (SIGINT) where somebody has started it by hand; Ctrl-C again ends it at
once. These signals are not blocked. A blocked signal stays blocked in every child, also after exec: a
subprocess of the user's code, or a worker of a multiprocessing.Pool, could not be terminated. A Python
handler alone would be late: it runs on the main thread between two bytecodes, and that may be in a
collective, or in the user's code, for minutes. But the interpreter writes to the wakeup descriptor at once,
and a thread reads it.

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

from edl.signals import to_handle

ASKING = frozenset({signal.SIGTERM, signal.SIGINT})


def when_asked_to_end(act: Callable[[str], None]) -> None:
    """Call `act`, on a thread of its own, with the name of the first of these signals that arrives.

    Signals that this process was started to ignore stay ignored. To be called on the main thread.
    """
    handled = to_handle(ASKING)
    heard, heed = os.pipe()  # closed by exec; see below for fork
    os.set_blocking(heed, False)

    def handle(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # also when the user's code has taken the wakeup descriptor
            os.write(heed, bytes([number]))
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    def as_usual() -> None:
        """In a forked child: it is no worker, and what it gets is not meant for this one."""
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def wait() -> None:
        asked: list[int] = []
        while not asked:  # other signals are written there, too
            asked = [number for number in os.read(heard, 4096) if number in handled]
        act(signal.Signals(asked[0]).name)

    for number in handled:
        signal.signal(number, handle)
        signal.siginterrupt(number, False)  # calls of the user's libraries go on after it
    signal.set_wakeup_fd(heed, warn_on_full_buffer=False)
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


def end_children() -> None:
    """Kill whatever this process has started: data loaders, subprocesses of the user's code, and theirs."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
