"""What a job can ask for. Frozen values, nothing else.

`Job.handle` turns an event into effects; adapters perform them. They are written to the journal as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason


@dataclass(frozen=True, slots=True)
class Create:
    """Make this worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Delete:
    """End this worker's process: politely, and by force after `grace_seconds`."""

    worker: WorkerId
    grace_period_seconds: float


@dataclass(frozen=True, slots=True)
class Form:
    """Tell each member: this is the ring now. Ranks are the members' places in the tuple."""

    generation: Generation
    members: tuple[WorkerId, ...]
    root: WorkerId  # whose state the others take
    sync: bool  # False: all members hold the same state already
    epochs: int  # to train
    shares: tuple[int, ...]  # of each step, by rank, in proportion
    layout: Layout  # of the data
    step: int = 0  # at which the ring begins
    joining: tuple[WorkerId, ...] = ()  # members that are sent the state while the others train
    round: int = 0  # of the evaluation after that step
    turn: int = 0  # 1: callbacks have been called after that step
    servers: int = 0  # parameter servers that are to have the rows; 0: as many as there are
    addresses: tuple[
        str, ...
    ] = ()  # of them, and of those that have rows now; none: as the workers know them
    untrusted_up_to: int = 0  # no state counts that is of this ring, or of one before
    untrusted_reason: str = ""  # why it does not


@dataclass(frozen=True, slots=True)
class ModeDecided:
    """The job, whose mode was left open, has this one from now on: with parameter servers, or without."""

    mode: str


@dataclass(frozen=True, slots=True)
class Arranged:
    """The rows are on so many parameter servers: no other is needed, as far as the job has heard."""

    servers: int
    wanted: int  # then; another number, told since, is still to come


@dataclass(frozen=True, slots=True)
class RestartServer:
    """Kill the process of a parameter server that hangs. Another process takes its place."""

    server: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Ask the members to leave the ring together at the next step boundary."""

    generation: Generation
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Order the members to close the ring's connections now: somebody in it is gone."""

    generation: Generation
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Tell the members: train so many epochs."""

    generation: Generation
    members: tuple[WorkerId, ...]
    epochs: int


@dataclass(frozen=True, slots=True)
class Export:
    """Ask a holder of the final state to evaluate and save it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tell rank 0 that a checkpoint is due."""

    generation: Generation
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Commit:
    """Have the worker write the manifest of a checkpoint, of which all parts are written."""

    worker: WorkerId
    step: int
    attempt: str


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Have a worker that is to go write a whole checkpoint: it alone holds the state."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell the worker to end by itself."""

    worker: WorkerId
    why: str


class FenceReason(StrEnum):
    """Why a worker is fenced."""

    HeartbeatTimeout = "HeartbeatTimeout"
    StartupTimeout = "StartupTimeout"
    ReconnectTimeout = "ReconnectTimeout"  # after a failover
    OutdatedRing = "OutdatedRing"  # after a failover it was found in a ring that the others have left
    StateDiffers = "StateDiffers"  # from that of most others
    NotInJob = "NotInJob"  # it was removed from the job before


@dataclass(frozen=True, slots=True)
class Fence:
    """Close the worker's stream and refuse whatever it sends from now on."""

    worker: WorkerId
    why: str
    reason: FenceReason


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people should know: the reason for programs, the text for people."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The job has ended and no worker is left."""

    phase: str
    reason: str


Effect = (
    Create
    | Delete
    | Form
    | ModeDecided
    | Arranged
    | RestartServer
    | Leave
    | Cut
    | Train
    | Export
    | Checkpoint
    | Commit
    | WriteCheckpoint
    | Stop
    | Fence
    | Notice
    | End
)
