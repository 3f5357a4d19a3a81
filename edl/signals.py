# SPDX-License-Identifier: Apache-2.0
"""Signals that were ignored when a process began stay ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterable


def to_handle(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of the signals that this process may handle: all but those that it was started to ignore.

    `nohup` lets a program ignore SIGHUP, and `program &` in a script lets it ignore SIGINT. The program must
    not undo that by installing handlers.

    An ignored SIGTERM gets a handler that does nothing. It stays without effect here, but is not ignored in
    processes that are started from here: the product ends its own processes with it.
    """
    ignored = [number for number in signals if signal.getsignal(number) in (signal.SIG_IGN, _ignore)]
    if signal.SIGTERM in ignored:
        signal.signal(signal.SIGTERM, _ignore)
    return [number for number in signals if number not in ignored]


def _ignore(number: int, frame: object) -> None:
    pass
