# SPDX-License-Identifier: Apache-2.0
"""The master's orders to a worker, as its main thread receives them."""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.layout import Layout, StepSlice


@dataclass(frozen=True, slots=True)
class FormRing:
    """Meet the members of this generation."""

    generation: int
    members: tuple[int, ...]  # by rank
    root: int  # the member whose state the others copy
    sync: bool  # False: all members but the joining ones hold the same state already
    epochs: int  # to train
    shares: tuple[int, ...]  # of each step, by rank
    layout: Layout  # of the data
    step: int = 0  # at which the ring begins
    joining: tuple[int, ...] = ()  # members that receive the state while the others train
    round: int = 0  # the evaluation batch after that step
    callbacks_done: int = 0  # 1 if callbacks were called after it
    servers: int = 0  # number of parameter servers that shall hold the rows; 0: all
    addresses: tuple[str, ...] = ()  # of these and of former servers, by index; empty: unchanged
    untrusted_up_to: int = 0  # states of this ring and of earlier ones are not to be used
    untrusted_reason: str = ""  # the reason
    released_from: int = 0  # servers from this index on are released and have no rows; 0: unknown

    def first_share(self, worker: int) -> StepSlice:
        """Return this worker's share of each step while the joining members have no state."""
        shares = zip(self.members, self.shares, strict=True)
        synced = tuple(0 if member in self.joining else share for member, share in shares)
        return StepSlice(self.members.index(worker), synced)


@dataclass(frozen=True, slots=True)
class Export:
    """Evaluate and save the final model."""


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write a whole checkpoint of the state: no other worker holds it."""


@dataclass(frozen=True, slots=True)
class End:
    """The order to stop."""

    why: str  # with the party that wants it
    lost: bool = False  # the stream has ended: this worker is out of the job


Order = FormRing | Export | WriteCheckpoint | End
