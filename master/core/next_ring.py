# SPDX-License-Identifier: Apache-2.0
"""When a different ring may be due, and what the next ring waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class NextRing:
    """The times of the next reviews of the ring, and why none is formed.

    Args:
        review_at: when membership is reviewed, so that changes are batched; None: no change is known.
        join_at: when a change for the ready workers pays off (`join_policy`); None: no worker waits for it.
        balance_at: when the shares of a step are reviewed after changed speeds.
        waited: what the job waited for while there was no ring.
        held_back: why the next ring has to wait: the last ones broke before their first step.
    """

    review_at: float | None = None
    join_at: float | None = None
    balance_at: float | None = None
    waited: str = ""
    held_back: str = ""

    def review(self, at: float) -> None:
        """Review the membership at this time, even if a different time was planned."""
        self.review_at = at

    def changes(self, at: float) -> None:
        """Review the membership at this time, unless a review is planned already."""
        if self.review_at is None:
            self.review_at = at

    def reviewed(self) -> None:
        """Record that no known change is left."""
        self.review_at = None

    def join(self, now: float) -> None:
        """Review the membership now, because the change for ready workers pays off."""
        self.review_at, self.join_at = now, None

    def join_later(self, at: float, now: float) -> bool:
        """Plan the change for ready workers. False if it pays off already."""
        self.join_at = at if at > now else None
        return self.join_at is not None

    def balance(self, at: float) -> None:
        """Review the shares of a step at this time."""
        self.balance_at = at

    def balanced(self) -> None:
        """Record that the shares match the speeds that are known."""
        self.balance_at = None

    def wait(self, waited: str) -> None:
        """Record what a ring waits for; its cause when it is formed."""
        self.waited = waited

    def hold_back(self, why: str) -> None:
        """Record why no ring is formed for a while."""
        self.held_back = why

    def formed(self) -> None:
        """Record that the ring is formed of all workers that are known."""
        self.waited, self.review_at, self.join_at = "", None, None
