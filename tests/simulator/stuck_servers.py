# SPDX-License-Identifier: Apache-2.0
"""Servers that hang until the core restarts their processes; copies of their rows replace them meanwhile."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from edl.master.core import ps
from tests.simulator.server_processes import Place

if TYPE_CHECKING:
    from tests.simulator.servers import Servers

FOREVER_SECONDS = 1e9
COPIES_SECONDS = 6.0  # after which a ring goes on with the copies of a stuck server's rows
STUCK = "stuck server"
OTHERS = ("kill server", "lose server", "hang server", "servers", STUCK, "new master", "everything")


class StuckServers:
    """The stuck servers of one run."""

    def __init__(self, servers: Servers) -> None:
        self._servers, self._clock, self._world = servers, servers.clock, servers.world
        self._random = random.Random(f"stuck servers of {self._world.seed}")
        self._stuck: dict[int, None] = {}
        self.passed_over = 0  # stuck servers for which a ring did not wait

    def schedule(self, until: float) -> None:
        """Let up to three servers get stuck until this time, or later if no ring trains before."""
        for _ in range(self._random.choice((1, 1, 2, 3))):
            in_ring = self._random.random() < 0.7
            self._clock.later(self._random.uniform(0, until + 1), partial(self._stick, in_ring))

    def forget(self, place: Place) -> None:
        """Record that a server's process is killed."""
        self._stuck.pop(place.index, None)

    def _stick(self, in_ring: bool) -> None:
        """Let a server hang until its process is restarted.

        Args:
            in_ring: wait until a ring trains with rows.
        """
        servers, job = self._servers, self._world.job
        there = [place for place in servers.places if place.wanted and place.alive and not place.frozen]
        has_rows = (
            job.ring.running and job.ring.up and job.servers.have > 0
        )  # without rows, all servers start
        if self._world.ended or not there:
            return
        if in_ring and not has_rows:
            self._clock.later(0.2, partial(self._stick, in_ring))
            return
        place = self._random.choice(there)
        self._world.faults.kinds[STUCK] += 1
        self._stuck[place.index] = None
        place.stop_for(FOREVER_SECONDS)
        self._lasts()
        if has_rows and servers.config.replicas > 1:
            self._clock.later(COPIES_SECONDS, partial(self._passes_over, place.index, self._faults()))

    def _lasts(self) -> None:
        """Record a fault as long as servers are stuck."""
        if self._stuck:
            self._servers.note_fault()
            self._clock.later(0.5, self._lasts)

    def _passes_over(self, index: int, faults: int) -> None:
        """Check that a ring does not wait for a stuck server, unless there were other faults.

        A server that the ring still works without may have held the other copy.
        """
        job = self._world.job
        alone = [*self._stuck] == [index] and self._faults() == faults and {*job.servers.out} <= {index}
        if alone and job.ring.up and not self._world.ended:
            waits = ps.waits(job, self._clock.now)
            assert not waits, f"the ring waits for a server that others can replace: {waits}"
            self.passed_over += 1

    def _faults(self) -> int:
        """The number of faults of servers and masters so far."""
        return sum(self._world.faults.kinds[kind] for kind in OTHERS)

    def restart(self, index: int) -> None:
        """Kill a server's process because the core has found that it hangs; its log stays."""
        place = self._servers.place(index)
        self.forget(place)
        assert place.frozen, f"server {index} is restarted, and it did not hang"
        self._world.faults.kinds["restart"] += 1
        self._servers.note_fault()
        place.kill()
        self._servers.starts(place, self._random.choice((0.02, 0.3, 3.0)))
        self._clock.later(3.0, self._servers.note_fault)
