# SPDX-License-Identifier: Apache-2.0
"""When to change a ring for ready workers that could join it.

A change stops every member for a moment, and waiting workers do not train. Future arrivals are unknown. So
the ring is changed once the sum of the waiting times equals the sum of the members' stops. The cost is then
at most twice that of the best policy that knows all arrivals in advance. The same problem is how long to
delay one acknowledgment for several packets (Dooly, Goldman, Scott: On-line analysis of the TCP
acknowledgment delay problem, J. ACM 48, 2001). A ring that changes for a different reason includes the
waiting workers.
"""

from __future__ import annotations

from collections.abc import Collection

MAX_SECONDS = 30.0  # the longest wait, however large the ring


def until(since: Collection[float], members: int, stop_seconds: float) -> float:
    """Return the time at which a change for the waiting workers pays off.

    Args:
        since: when each waiting worker became ready; at least one.
        members: number of members that the change stops.
        stop_seconds: for how long the last change stopped them; 0: unknown, so workers do not wait.
    """
    together = (members * stop_seconds + sum(since)) / len(since)
    return min(together, min(since) + MAX_SECONDS)
