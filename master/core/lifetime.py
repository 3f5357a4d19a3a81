# SPDX-License-Identifier: Apache-2.0
"""How long a job is active, over all masters of its run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifetime:
    """The job's beginning and end.

    Args:
        max_seconds: the job ends when it has been active for so long (activeDeadlineSeconds); 0: no limit.
        before: seconds under earlier masters.
    """

    max_seconds: int
    before: float = 0.0
    began_at: float | None = None
    ended_at: float | None = None

    def begin(self, now: float) -> None:
        """Begin the job, or continue it under this master."""
        self.began_at = now

    def end(self, now: float) -> None:
        """End the job."""
        self.ended_at = now

    def continues(self, before: float) -> None:
        """Continue the job of an earlier master."""
        self.before = before

    def limit(self, seconds: int) -> None:
        """Change the limit."""
        self.max_seconds = seconds

    def seconds(self, now: float) -> float:
        """Return the seconds that the job has been active, until its end."""
        end = now if self.ended_at is None else self.ended_at
        return self.before + (0.0 if self.began_at is None else end - self.began_at)

    @property
    def ends_at(self) -> float | None:
        """When the limit is reached; None without one."""
        if not self.max_seconds or self.began_at is None:
            return None
        return self.began_at - self.before + self.max_seconds
