"""Where the job's seconds went: the price of elasticity, in one table.

Wall-clock time is cut into stretches of one kind each. What was computed and thrown away
(the step in flight when a ring broke) is taken out of the useful time as `redone`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("useful", "redone", "re-forming", "waiting for workers", "suspended", "starting")


@dataclass(slots=True)
class Goodput:
    """Seconds by kind. `kind` is what the job is doing since `since`."""

    kind: str = "starting"
    since: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def turn(self, kind: str, now: float) -> None:
        """From `now` on the job is doing `kind`."""
        if self.since is not None:
            self.seconds[self.kind] += now - self.since
        self.kind, self.since = kind, now

    def redo(self, seconds: float) -> None:
        """So much of the useful time has to be done again."""
        moved = min(seconds, self.seconds["useful"])
        self.seconds["useful"] -= moved
        self.seconds["redone"] += moved

    def at(self, now: float) -> dict[str, float]:
        """Seconds by kind up to `now`."""
        running = 0.0 if self.since is None else now - self.since
        return {k: s + (running if k == self.kind else 0.0) for k, s in self.seconds.items()}
