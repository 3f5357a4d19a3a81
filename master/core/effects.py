# SPDX-License-Identifier: Apache-2.0
"""The effects of a job, as frozen dataclasses, by recipient.

`Job.handle` turns an event into effects. The loop gives each recipient its own effects only. The journal has
all of them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason


@dataclass(frozen=True, slots=True)
class Create:
    """Create this worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Delete:
    """End this worker's process: with a signal first, and by force after `grace_period_seconds`.

    A worker that exits already has `patience_seconds` for it where the deletion would remove its log.
    """

    worker: WorkerId
    grace_period_seconds: float
    patience_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Form:
    """Send the new ring to its members. A member's rank is its position in the tuple."""

    generation: Generation
    members: tuple[WorkerId, ...]
    root: WorkerId  # the member whose state the others receive
    sync: bool  # False: all members hold the same state already
    epochs: int  # to train
    shares: tuple[int, ...]  # relative share of each step, by rank
    layout: Layout  # of the data
    step: int = 0  # at which the ring begins
    joining: tuple[WorkerId, ...] = ()  # members that receive the state while the others train
    round: int = 0  # the evaluation batch after that step
    callbacks_done: int = 0  # 1: callbacks have been called after that step
    servers: int = 0  # requested number of parameter servers with rows; 0: the present number
    addresses: tuple[
        str, ...
    ] = ()  # of these servers, and of those with rows now; empty: as the workers know them
    untrusted_up_to: int = 0  # states of this ring and of earlier rings are void
    untrusted_reason: str = ""  # why they are void
    released_from: int = 0  # servers from this index on are released and have no rows; 0: unknown


@dataclass(frozen=True, slots=True)
class ModeDecided:
    """Set the mode of a job with mode=auto: with or without parameter servers."""

    mode: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """The rows are on this number of parameter servers; the core needs no others at this time."""

    servers: int
    wanted: int  # the request that this answers; a later request is still to be processed


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
    """Order the members to close the ring's connections now, because a member is gone."""

    generation: Generation
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Change the number of epochs that the members train."""

    generation: Generation
    members: tuple[WorkerId, ...]
    epochs: int


@dataclass(frozen=True, slots=True)
class Export:
    """Order a holder of the final state to evaluate and save it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Notify rank 0 that a checkpoint is due."""

    generation: Generation
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Commit:
    """Order the worker to write the manifest of a checkpoint whose parts are all written."""

    worker: WorkerId
    step: int
    attempt: str


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Order a draining worker to write a whole checkpoint, because it holds the last copy of the state."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Stop:
    """Order the worker to exit by itself."""

    worker: WorkerId
    why: str


class FenceReason(StrEnum):
    """Why a worker is fenced."""

    HeartbeatTimeout = "HeartbeatTimeout"
    StartupTimeout = "StartupTimeout"
    ReconnectTimeout = "ReconnectTimeout"  # after a failover
    OutdatedRing = "OutdatedRing"  # after a failover, it was found in a ring that the others have left
    CutTimeout = "CutTimeout"  # it has not left a ring that was cut
    StateDiffers = "StateDiffers"  # from the state of most others
    NotInJob = "NotInJob"  # the worker was removed from the job before


@dataclass(frozen=True, slots=True)
class Fence:
    """Close the worker's stream, and refuse all its later messages."""

    worker: WorkerId
    why: str
    reason: FenceReason


@dataclass(frozen=True, slots=True)
class Notice:
    """Notify users: `reason` is for programs, `text` for people."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The job has ended, and no worker is left."""

    phase: str
    reason: str


ForWorkers = Form | Leave | Cut | Train | Export | Checkpoint | Commit | WriteCheckpoint | Stop | Fence
ForBackend = Create | Delete | Fence | Notice
ForServers = ModeDecided | Assigned | RestartServer
Effect = ForWorkers | ForBackend | ForServers | End  # End, and also Notice and ModeDecided: for the loop
