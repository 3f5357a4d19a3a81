# SPDX-License-Identifier: Apache-2.0
"""Simulate hours of one job with workers that join and leave, and check that the master's memory is constant.

The measured memory is everything that the master's core and telemetry refer to, except the job's values.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections import deque
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from tests.simulator.world import World

EVERY_SECONDS = 300.0
KEPT_EVENTS = 1000  # events kept in the watchdog's own history
MAX_GROWTH = 64.0  # KiB an hour
NO_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


@dataclass(frozen=True)
class Sample:
    """A measurement of the master at one time."""

    hours: float
    kib: float
    workers: int  # all workers so far
    rings: int


def weight(*things: Any, without: tuple[Any, ...]) -> int:
    """The bytes of all objects that these refer to."""
    seen = {id(thing) for thing in without}
    found, stack = 0, list(things)
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, NO_STATE):
            continue
        seen.add(id(thing))
        found += sys.getsizeof(thing)
        stack += gc.get_referents(thing)
    return found


def soak(seed: int, hours: float) -> list[Sample]:
    """Run one job under churn, from begin to end; raises SimulationFailed like any run."""
    world = World(seed, hours=hours)
    master, samples = world.master, []
    master.watchdog.history = deque(maxlen=KEPT_EVENTS)

    def look() -> None:
        kib = weight(master.job, master.telemetry, without=(world.config,)) / 1024
        ring = master.job.ring.generation
        samples.append(Sample(world.clock.now / 3600, kib, len(world.fleet.workers), ring))
        for w in world.fleet.workers.values():
            if not w.alive:
                w.buried()
        world.clock.later(EVERY_SECONDS, look)

    world.clock.later(EVERY_SECONDS, look)
    world.run()
    return samples


def growth(samples: list[Sample]) -> float:
    """The growth in KiB an hour over the last three quarters, when all bounded histories are full."""
    late = samples[len(samples) // 4 :]
    return statistics.linear_regression([s.hours for s in late], [s.kib for s in late]).slope


def tell(seed: int, hours: float) -> int:
    samples = soak(seed, hours)
    print(
        "| hours | workers so far | rings so far | memory of the core |",
        "| --- | --- | --- | --- |",
        sep="\n",
    )
    for s in samples[:: max(len(samples) // 12, 1)]:
        print(f"| {s.hours:.2f} | {s.workers:,} | {s.rings:,} | {s.kib:,.0f} KiB |")
    slope = growth(samples)
    print(f"it grows by {slope:+.1f} KiB an hour")
    return int(slope > MAX_GROWTH)
