# SPDX-License-Identifier: Apache-2.0
"""Cancels the calls of one worker when its ring is cut, and knows which of them wait for a server."""

from __future__ import annotations

import threading
from typing import Any

from edl.contract.heartbeats import ServerWait


class Interrupt:
    """Cancels calls, and knows which calls are waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), dict[Any, None]()
        # By call: start of the wait, server, method, last error.
        self._waiting: dict[Any, tuple[float, int, str, str]] = {}
        self._is_cut = threading.Event()

    def arm(self) -> None:
        """Allow calls again."""
        self._is_cut.clear()

    def cut(self) -> None:
        """Cancel running calls, and all later ones until `arm`."""
        self._is_cut.set()
        with self._lock:
            running = list(self._running)
        for call in running:
            call.cancel()

    @property
    def is_cut(self) -> bool:
        return self._is_cut.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for `cut`, at most `seconds`; returns whether it was cut."""
        return self._is_cut.wait(seconds)

    def begins(self, call: Any) -> None:
        with self._lock:
            self._running[call] = None
        if self._is_cut.is_set():
            call.cancel()

    def ends(self, call: Any) -> None:
        with self._lock:
            self._running.pop(call, None)

    def waits_for(self, call: Any, server: int, method: str, since: float, why: str) -> None:
        """Note that a call has had no answer for a while, or is being repeated after errors.

        Args:
            why: error of the last attempt; empty: no answer yet.
        """
        with self._lock:
            self._waiting[call] = since, server, method, why

    def waits_no_more(self, call: Any) -> None:
        with self._lock:
            self._waiting.pop(call, None)

    def longest(self, now: float) -> ServerWait | None:
        """The longest running wait, or None."""
        with self._lock:
            found = min(self._waiting.values(), default=None)
        return None if found is None else ServerWait(found[1], found[2], now - found[0], found[3])
