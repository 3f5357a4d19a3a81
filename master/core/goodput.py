# SPDX-License-Identifier: Apache-2.0
"""Goodput: how the job's time was spent, which shows the cost of elasticity.

Wall-clock time is divided into intervals of one kind each. Discarded work (the step in flight when a ring
broke) is moved from the useful time to `redone`. A ring that makes no step is not useful either: what its
members wait for is the kind of that time (`stall`), and a change of the ring lasts from the last step to the
first one, as its members measured it (`re_formed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SERVERS, RECORDS = STALLS = "waiting for servers", "waiting for records"  # of a ring that makes no step
KINDS = (
    "useful",
    "redone",
    "re-forming",
    "waiting for workers",
    *STALLS,
    "suspended",
    "starting",
    "finishing",
)


@dataclass(slots=True)
class Goodput:
    """Seconds by kind. `kind` is the kind of the interval that began at `since`."""

    kind: str = "starting"
    since: float | None = None
    without_master: float = 0.0  # seconds without a master, counted as `re-forming` until the ring is known
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    longest: tuple[float, str] = 0.0, ""  # seconds and kind of the longest stall
    left_useful_at: float | None = None  # when the last interval of useful time ended
    pause: float = 0.0  # seconds between that and the present interval of useful time
    kept: float = 0.0  # useful seconds until the newest checkpoint; later work would be redone

    def turn(self, kind: str, now: float) -> None:
        """Start an interval of this kind."""
        if self.since is not None:
            self.seconds[self.kind] += now - self.since
            if self.kind in STALLS:
                self.longest = max(self.longest, (now - self.since, self.kind))
        if self.kind == "useful" != kind:
            self.left_useful_at = now
        elif kind == "useful" != self.kind:
            self.pause = 0.0 if self.left_useful_at is None else now - self.left_useful_at
        self.kind, self.since = kind, now

    def stall(self, kind: str, since: float) -> None:
        """Account for a ring that trained, and has made no step since then; it trains again with `turn`."""
        if self.kind == "useful" and self.since is not None:
            self.turn(kind, max(since, self.since))

    def re_formed(self, seconds: float, now: float) -> None:
        """Account for a change of the ring, which lasted so long from the last step to the first one.

        It took part of the time that was taken for useful: before the master noticed it, and until the step.
        """
        if self.left_useful_at is None:
            return  # the first ring: no step was made before it
        self.turn(self.kind, now)
        moved = min(max(seconds - self.pause, 0.0), self.seconds["useful"])
        self.seconds["useful"] -= moved
        self.seconds["re-forming"] += moved
        self.pause += moved

    def restore(
        self,
        seconds: Mapping[str, float],
        kind: str,
        active_seconds: float,
        longest: tuple[float, str],
        kept: float,
    ) -> None:
        """Continue the account of an earlier master.

        Args:
            seconds: by kind, up to that master's last sign of life.
            kind: the kind of the interval since then.
            active_seconds: since the job began, until now.
            longest, kept: as the fields.
        """
        self.longest = longest
        self.seconds |= {k: s for k, s in seconds.items() if k in KINDS}
        rest = max(0.0, active_seconds - sum(self.seconds.values()))
        # Workers can train without a master, but it is unknown whether they did until their ring is known.
        trained = kind in ("useful", *STALLS)
        self.without_master = rest if trained else 0.0
        self.kind = "re-forming" if trained else kind if kind in KINDS else "starting"
        self.seconds[self.kind] += rest
        # If one of these workers is the last to hold the state, removing it would lose what it has trained
        # without a master, too (master.core.silence).
        self.kept = kept - self.without_master

    def ring_was_kept(self, now: float) -> None:
        """Record that the ring of an earlier master is whole, and so also trained without a master."""
        waited, found = self.kind, self.since
        self.kept += self.without_master  # it is useful time now
        self.turn("useful", now)
        if waited == "re-forming" and found is not None and self.without_master:
            moved = min(self.without_master + now - found, self.seconds["re-forming"])
            self.seconds["re-forming"] -= moved
            self.seconds["useful"] += moved
        self.without_master = 0.0

    def redo(self, seconds: float) -> None:
        """Move seconds from useful to redone."""
        moved = min(seconds, self.seconds["useful"])
        self.seconds["useful"] -= moved
        self.seconds["redone"] += moved

    def useful(self, at: float) -> float:
        """Return the useful seconds until `at`, as if nothing had changed since the last change."""
        return self.at(max(at, self.since or at))["useful"]

    def keep(self, at: float) -> None:
        """Record that the work until then need not be done again: it is in a checkpoint, or lost."""
        self.kept = self.useful(at)

    def at(self, now: float) -> dict[str, float]:
        """Return the seconds by kind, up to `now`."""
        running = 0.0 if self.since is None else now - self.since
        return {k: s + (running if k == self.kind else 0.0) for k, s in self.seconds.items()}
