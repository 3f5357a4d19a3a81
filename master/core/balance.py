"""Which part of each step a member gets: the same for all, or in proportion to its speed.

A step takes as long as its slowest member. The parts are changed when a ring is formed; a ring whose parts
fit badly is left for it, at a step boundary. It is judged when members have told other speeds than before.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.master.core.workers import WorkerRecord

GAIN = 1.15  # so much faster, at least, makes it worth to form the ring anew
SETTLE_SECONDS = 10.0  # of a ring's life before it is judged; speeds are measured in it
GRAIN = 20  # a share is so many parts of the fastest member's, so that noise changes nothing


def shares(members: Sequence[WorkerRecord], by_speed: bool) -> tuple[int, ...]:
    """Of each step, by rank. Who has no measured speed yet counts as the middle of the others."""
    speeds = _speeds(members)
    if not by_speed or not speeds:
        return (1,) * len(members)
    found = tuple(max(round(GRAIN * s / max(speeds)), 1) for s in speeds)
    return (
        found if _seconds(speeds, found) * GAIN <= _seconds(speeds, (1,) * len(found)) else (1,) * len(found)
    )


def gain(members: Sequence[WorkerRecord], present: tuple[int, ...]) -> float:
    """How much faster a step would be with the shares of now."""
    speeds = _speeds(members)
    if not speeds or len(present) != len(members):
        return 1.0
    return _seconds(speeds, present) / _seconds(speeds, shares(members, by_speed=True))


def _speeds(members: Sequence[WorkerRecord]) -> list[float]:
    known = sorted(w.speed for w in members if w.speed > 0)
    return [w.speed if w.speed > 0 else known[len(known) // 2] for w in members] if known else []


def _seconds(speeds: Sequence[float], parts: Sequence[int]) -> float:
    """Of a step of one record."""
    return max(part / speed for part, speed in zip(parts, speeds, strict=True)) / sum(parts)
