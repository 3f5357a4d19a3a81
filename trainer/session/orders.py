"""What the master orders a worker to do, as its main thread gets it."""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.layout import Layout


@dataclass(frozen=True, slots=True)
class FormRing:
    """Meet the others in this generation."""

    generation: int
    members: tuple[int, ...]  # by rank
    root: int  # the member whose state is taken
    sync: bool  # False: all members hold the same state already
    epochs: int  # to train
    shares: tuple[int, ...]  # of each step, by rank
    layout: Layout  # of the data
    step: int = 0  # at which the ring begins
    joining: tuple[int, ...] = ()  # members that are sent the state while the others train
    round: int = 0  # of the evaluation after that step
    turn: int = 0  # 1: callbacks have been called after it
    servers: int = 0  # parameter servers that are to have the rows; 0: as many as there are
    addresses: tuple[
        str, ...
    ] = ()  # of them, and of those that have had some, by index; none: those of before
    untrusted_up_to: int = 0  # no state counts that is of this ring, or of one before
    untrusted_reason: str = ""  # why it does not


@dataclass(frozen=True, slots=True)
class Export:
    """Evaluate and save the final model."""


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write a whole checkpoint of the state: nobody else holds it."""


@dataclass(frozen=True, slots=True)
class End:
    """Stop."""

    why: str  # and who wants it
    lost: bool = False  # the stream has ended, and this worker's part in the job with it


Order = FormRing | Export | WriteCheckpoint | End
