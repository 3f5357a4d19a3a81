# SPDX-License-Identifier: Apache-2.0
"""Services in place of `edl.trainer.export.fresh:Verifier`, whose process fails."""

from __future__ import annotations

import os
import signal
import threading


class Killed:
    """As by the kernel, where memory is short."""

    def look(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Crashing:
    """As by a library."""

    def look(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging:
    """As a layer whose call() never returns."""

    def look(self, *_: object) -> None:
        threading.Event().wait()


class TooLarge:
    """As NumPy, where memory is limited."""

    def look(self, *_: object) -> None:
        raise MemoryError("cannot allocate 5 GiB")
