# SPDX-License-Identifier: Apache-2.0
"""How long the members of rings compute in a step, and how long they wait for the slowest member.

A member's own time in a step is its share of the batch divided by the speed that it has reported: the records
per second of its own computing. The step is complete when the slowest member has computed; the others wait.
These are means: waiting that comes from members that are slow by turns is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Pace:
    """The steps of one worker with a known speed.

    Args:
        steps: their number.
        own: seconds of computing in them.
        waited: seconds in them between the end of its own computing and that of the slowest member.
    """

    steps: int = 0
    own: float = 0.0
    waited: float = 0.0


class Paces:
    """Adds up the steps of each worker. `by_worker` is complete after `settle`."""

    def __init__(self) -> None:
        self.by_worker: dict[int, Pace] = {}
        self._speeds: dict[int, float] = {}  # records/s
        self._records: dict[int, float] = {}  # of a step, by member
        self._from, self._to = 0, 0  # the steps that are not added yet

    def form(self, members: tuple[int, ...], shares: tuple[int, ...], batch: int, step: int) -> None:
        """Begin a ring after a step; its members divide a batch by these shares."""
        self.settle()
        self._from, self._to = step, step
        self._records = {m: batch * share / sum(shares) for m, share in zip(members, shares, strict=True)}

    def reach(self, step: int, speeds: Mapping[int, float]) -> None:
        """Note that the ring has reached a step, and the speeds that have changed up to it."""
        self._to = max(self._to, step)
        if speeds:
            self.settle()
            self._speeds.update(speeds)

    def settle(self) -> None:
        """Add the steps since the last call, or keep them for the next one if a speed is still unknown."""
        steps = self._to - self._from
        if steps <= 0 or len(self._records) < 2 or not self._speeds.keys() >= self._records.keys():
            return
        own = {member: records / self._speeds[member] for member, records in self._records.items()}
        slowest = max(own.values())
        for member, seconds in own.items():
            pace = self.by_worker.setdefault(member, Pace())
            pace.steps += steps
            pace.own += steps * seconds
            pace.waited += steps * (slowest - seconds)
        self._from = self._to
