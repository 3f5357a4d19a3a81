# SPDX-License-Identifier: Apache-2.0
"""A master's journal (events.jsonl), read while it is written. Its times are the master's own.

They are monotonic seconds, which all processes of one machine share, those in pods too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.lines import Lines, Seen

MAX_WAIT = 60.0  # seconds for a ring to come back
Entry = dict[str, Any]


@dataclass(frozen=True)
class Ring:
    """A generation in which every member has trained, and what the change to it has cost. Times in seconds.

    Args:
        up_at: when the last member held the state.
        stall: the longest that a survivor waited from step to step.
        redone: records that were trained on again.
    """

    generation: int
    members: tuple[int, ...]
    up_at: float
    stall: float
    redone: int


class Journal(Lines):
    """The journal that a command such as `tail -n +1 -F events.jsonl` prints."""

    @property
    def entries(self) -> list[Entry]:
        return _entries(self.seen)

    @property
    def generation(self) -> int:
        """The newest one."""
        return max(form["generation"] for form in _forms(self.entries))

    def ring(self, size: int, after: int = 0, seconds: float = MAX_WAIT) -> Ring:
        """The first ring of that size formed after generation `after`, once all of it has made a step.

        Raises:
            TimeoutError: no such line within so many seconds.
        """
        return self.until(lambda seen: _ring(_entries(seen), size, after), seconds)

    def formed(self, after: int, seconds: float = MAX_WAIT) -> None:
        """Until any ring is ordered after generation `after`.

        Raises:
            TimeoutError: none is within so many seconds.
        """
        self.until(
            lambda seen: any(form["generation"] > after for form in _forms(_entries(seen))) or None, seconds
        )

    def first(self, kind: str, worker: int) -> float:
        """When the first event of that kind came from a worker, which has come."""
        told = (x for x in self.entries if x["event"]["type"] == kind)
        return next(float(x["now"]) for x in told if x["event"]["worker"] == worker)

    def first_step(self) -> float:
        """When any worker had made the job's first one."""
        return next(float(x["now"]) for x in self.entries if x["event"]["type"] == "Stepped")


def _entries(seen: Seen) -> list[Entry]:
    return [line for _, line in seen if "event" in line]  # without the head


def _events(entries: list[Entry], kind: str) -> list[Entry]:
    return [x["event"] for x in entries if x["event"]["type"] == kind]


def _forms(entries: list[Entry]) -> list[Entry]:
    return [effect for x in entries for effect in x["effects"] if effect["type"] == "Form"]


def _ring(entries: list[Entry], size: int, after: int) -> Ring | None:
    stepped = _events(entries, "Stepped")
    for form in _forms(entries):
        generation, members = form["generation"], form["members"]
        here = {e["worker"] for e in stepped if e["generation"] == generation}
        if generation > after and len(members) == size and here >= set(members):
            ups = (x for x in entries if x["event"]["type"] == "JoinedRing")
            up_at = max(x["now"] for x in ups if x["event"]["generation"] == generation)
            change = [e for e in stepped if after < e["generation"] <= generation]
            stall = max(e["stall_seconds"] for e in change)
            return Ring(generation, tuple(members), up_at, stall, sum(e["redone_records"] for e in change))
    return None
