"""How long those who could join a ring wait until it is changed for them.

A change stops every member for a moment, and who waits trains nothing meanwhile. Nobody knows who comes next.
So the ring is changed for newcomers when they have waited, all together, as long as the change will stop its
members, all together: whatever comes, at most twice of what one would lose who knew it all before. It is how
long to wait with one acknowledgment for several packets (Dooly, Goldman, Scott: On-line analysis of the TCP
acknowledgment delay problem, J. ACM 48, 2001). A ring that changes for another reason takes them in.
"""

from __future__ import annotations

from collections.abc import Collection

MOST_SECONDS = 30.0  # nobody waits longer, however large the ring


def until(since: Collection[float], members: int, stop_seconds: float) -> float:
    """When a change is worth it for those who could join.

    Args:
        since: when each of them could; at least one.
        members: whom the change stops.
        stop_seconds: for how long, as the last change did; 0: not known, so nobody waits.
    """
    together = (members * stop_seconds + sum(since)) / len(since)
    return min(together, min(since) + MOST_SECONDS)
