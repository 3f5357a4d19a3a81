# SPDX-License-Identifier: Apache-2.0
"""Load balancing: a member's share of each step, equal for all or in proportion to its speed.

A step takes as long as its slowest member. Shares change only when a ring is formed. If the shares of a ring
fit badly, its members leave it at a step boundary. Shares are reviewed after members report changed speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.master.core.workers import WorkerRecord

GAIN = 1.15  # the least speed-up that justifies a new ring
SETTLE_SECONDS = 10.0  # age of a ring before its shares are reviewed; speeds are measured in this time
GRAIN = 20  # shares are multiples of 1/20 of the fastest member's, so that noise changes nothing


def shares(members: Sequence[WorkerRecord], by_speed: bool) -> tuple[int, ...]:
    """Return the shares of each step, by rank. A member without a measured speed gets the median speed."""
    speeds = _speeds(members)
    if not by_speed or not speeds:
        return (1,) * len(members)
    found = tuple(max(round(GRAIN * s / max(speeds)), 1) for s in speeds)
    return (
        found if _seconds(speeds, found) * GAIN <= _seconds(speeds, (1,) * len(found)) else (1,) * len(found)
    )


def gain(members: Sequence[WorkerRecord], present: tuple[int, ...]) -> float:
    """Return the factor by which new shares would make a step faster."""
    speeds = _speeds(members)
    if not speeds or len(present) != len(members):
        return 1.0
    return _seconds(speeds, present) / _seconds(speeds, shares(members, by_speed=True))


def _speeds(members: Sequence[WorkerRecord]) -> list[float]:
    known = sorted(w.speed for w in members if w.speed > 0)
    return [w.speed if w.speed > 0 else known[len(known) // 2] for w in members] if known else []


def _seconds(speeds: Sequence[float], parts: Sequence[int]) -> float:
    """Return the time of a step with these shares, in seconds per record."""
    return max(part / speed for part, speed in zip(parts, speeds, strict=True)) / sum(parts)
