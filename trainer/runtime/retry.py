# SPDX-License-Identifier: Apache-2.0
"""Retries for a checkpoint store that is temporarily unavailable.

Promise: permanent errors of a store (a refused account, a missing bucket) and damaged contents are raised at
once. Transient errors are logged once, retried, and raised when they last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edl.errors import StoreUnavailable

T = TypeVar("T")
FIRST_PAUSE, MAX_PAUSE = 1.0, 10.0
LOOK_SECONDS = 0.2  # between two looks whether this worker has to end


def tried_again(
    read: Callable[[], T],
    seconds: float,
    tell: Callable[[str], None],
    must_end: Callable[[], bool] = lambda: False,
) -> T:
    """Call `read` until the store answers, and return its result.

    Args:
        seconds: no new attempt begins after as many.
        tell: takes a line, the first time that the store does not answer.
        must_end: asked now and then whether the answer is not needed any more.

    Raises:
        StoreUnavailable: the store does not answer, and has not for so long.
        others: as `read`.
    """
    began, pause, told = time.monotonic(), FIRST_PAUSE, False
    while True:
        try:
            return read()
        except StoreUnavailable as error:
            waited = time.monotonic() - began
            if must_end() or waited + pause > seconds:
                raise StoreUnavailable(f"{error} (tried for {waited:,.0f} s)") from error
            if not told:
                tell(f"{error}; it is tried again for {seconds:,.0f} s")
                told = True
            until = time.monotonic() + pause
            while time.monotonic() < until and not must_end():
                time.sleep(min(LOOK_SECONDS, pause))
            pause = min(2 * pause, MAX_PAUSE)
