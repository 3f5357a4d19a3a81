# SPDX-License-Identifier: Apache-2.0
"""Services in place of `edl.trainer.export.fresh:Verifier`, whose process fails."""

from __future__ import annotations

import os
import signal
import threading


class Killed:
    """Its process is killed, as by the kernel where memory is short."""

    def look(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Crashing:
    """Its process crashes, as in a library."""

    def look(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging:
    """Never answers, like a layer whose call() does not return."""

    def look(self, *_: object) -> None:
        threading.Event().wait()


class TooLarge:
    """Finds too little memory, as NumPy does."""

    def look(self, *_: object) -> None:
        raise MemoryError("cannot allocate 5 GiB")
