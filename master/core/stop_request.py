# SPDX-License-Identifier: Apache-2.0
"""A stop of the job that waits for a checkpoint, and what became of the last request for one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edl.contract.phases import Phase


@dataclass(frozen=True, slots=True)
class PendingStop:
    """A stop that waits for a checkpoint of the state."""

    phase: Phase
    reason: str
    force: bool = False  # end the job even if the checkpoint fails
    until: float | None = None  # end the job at this time at the latest


@dataclass(slots=True)
class StopRequest:
    """The last request to stop with a checkpoint.

    Args:
        pending: the stop, while it waits; a deadline of the job begins one without a request.
        id: of the request; empty: there was none.
        failure: why the request failed; empty: it did not.
    """

    pending: PendingStop | None = None
    id: str = ""
    failure: str = ""

    def ask(self, id: str) -> None:
        """Begin a new request."""
        self.id, self.failure = id, ""

    def begin(self, stop: PendingStop) -> None:
        """Wait for the checkpoint of this stop."""
        self.pending = stop

    def force(self, stop: PendingStop, until: float) -> None:
        """End the job at this time, even if the checkpoint fails."""
        self.pending = replace(stop, force=True, until=until)

    def give_up(self, why: str) -> None:
        """Let the job go on."""
        self.pending, self.failure = None, why
