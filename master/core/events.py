# SPDX-License-Identifier: Apache-2.0
"""The events of a job, as frozen dataclasses.

Adapters turn the outside world into events; `Job.handle` turns an event into effects (`effects`). Both are
written to the journal unchanged. `facts` has the values that events carry.

`worker_events` has those that workers report by their streams. All are read as `ev.NAME`, which is also the
name in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.contract.heartbeats import Staleness
from edl.contract.ids import Generation, WorkerId
from edl.master.core.facts import EpochLoss, Past
from edl.master.core.worker_events import (
    STREAM_ENDED,
    BadRecords,
    Built,
    Checkpointed,
    CheckpointFailed,
    Closed,
    EpochEnded,
    Evaluated,
    Failed,
    Finished,
    Hello,
    History,
    JoinedRing,
    Leaving,
    LeftRing,
    PartsWritten,
    Ready,
    RecordsRead,
    Resume,
    RingMessage,
    RowsLost,
    Saved,
    Stepped,
    WarmStarted,
    Warned,
    WorkerMessage,
)

__all__ = [  # those of `worker_events`
    "STREAM_ENDED",
    "BadRecords",
    "Built",
    "CheckpointFailed",
    "Checkpointed",
    "Closed",
    "EpochEnded",
    "Evaluated",
    "Failed",
    "Finished",
    "Hello",
    "History",
    "JoinedRing",
    "Leaving",
    "LeftRing",
    "PartsWritten",
    "Ready",
    "RecordsRead",
    "Resume",
    "RingMessage",
    "RowsLost",
    "Saved",
    "Stepped",
    "WarmStarted",
    "Warned",
    "WorkerMessage",
]

# --- events: from the backend that runs the workers


@dataclass(frozen=True, slots=True)
class Seen:
    """The worker runs (or is at least placed)."""

    worker: WorkerId
    handle: str  # a process id or a pod name, for users


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker's process has ended, for any reason."""

    worker: WorkerId
    code: int | None = None  # exit code; None when a signal or an unknown cause ended it
    signal: str = ""  # "SIGKILL", ...
    free: bool = False  # the backend knows that the job did not cause it (preemption, node loss)
    why: str = ""
    limit: str = ""  # the limit of its pod for which it was ended, in Kubernetes' words


@dataclass(frozen=True, slots=True)
class Delayed:
    """The worker does not run yet, for a reason: no room, a quota, an image that cannot be pulled."""

    worker: WorkerId
    why: str  # empty: the delay has ended


@dataclass(frozen=True, slots=True)
class Terminating:
    """The worker's process will be killed after a grace period: its pod is evicted or being deleted."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class Degraded:
    """A part of the backend does not work: status writes, deletions, a task that failed."""

    part: str
    why: str  # empty: it works again


@dataclass(frozen=True, slots=True)
class ServerListens:
    """A parameter server can be called."""

    server: int  # its index
    seconds: float  # since it was started
    again: bool  # a server with this index has listened before


@dataclass(frozen=True, slots=True)
class ServersReady:
    """The requested number of parameter servers listen, so the rows can move to them."""

    servers: int
    addresses: tuple[str, ...]  # of these servers, and of those with rows now, by index


@dataclass(frozen=True, slots=True)
class ServerRecovered:
    """A parameter server answers again."""

    server: int


@dataclass(frozen=True, slots=True)
class ServerAway:
    """A parameter server has not answered for a while. `ServerRecovered`, or `ServerListens`, ends that."""

    server: int
    seconds: float  # so far
    what: str  # its state, as far as is known: starting, restarting, not answering


@dataclass(frozen=True, slots=True)
class ProbeUnanswered:
    """A parameter server has not answered Probes in a row, although its process runs."""

    server: int
    probes: int  # in a row


@dataclass(frozen=True, slots=True)
class ServersGivenUp:
    """Some of the requested parameter servers have not listened in time."""

    servers: int  # the requested number
    stay: int  # the number of servers on which the rows stay, or will first be; 0: unknown
    why: str


@dataclass(frozen=True, slots=True)
class ServerExited:
    """The process of a parameter server has ended without being asked to."""

    server: int
    why: str  # SIGKILL, exit code 1: ...
    pause_seconds: float = 0.0  # until it is restarted
    fatal: bool = False  # it is not restarted, because that would not help


@dataclass(frozen=True, slots=True)
class Adopted:
    """The state of a job that this master takes over from an earlier one; precedes `Begin`."""

    workers: tuple[tuple[WorkerId, str], ...]  # possibly live ones, with their handles; "": does not run yet
    next_id: int  # number of workers so far; also the next id
    within_seconds: float = 10.0  # for workers to reconnect: they try twice a second
    active_seconds: float = 0.0  # since the job began, as far as is known
    began_with: str = ""  # WarmStarted.text, if the job began with a different training's state
    prompt: tuple[WorkerId, ...] = ()  # reached this master before it acted, and so reconnect sooner
    prompt_seconds: float = 10.0  # for these workers to reconnect
    past: Past | None = None  # the history of the job until then; None: unknown


# --- events: summaries of heartbeats (`edl.master.telemetry`)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a ring, from time to time: that of its most advanced member."""

    generation: Generation
    step: int  # that a member has; the others have at least the one before
    loss: float | None = None  # of the whole ring's last step
    epoch_loss: EpochLoss | None = None
    speeds: dict[WorkerId, float] = field(default_factory=dict)  # changed speeds only
    round: int = 0  # the evaluation batch after that step
    staleness: Staleness | None = None


@dataclass(frozen=True, slots=True)
class Silent:
    """The worker has sent nothing for the heartbeat timeout."""

    worker: WorkerId
    seconds: float
    also: tuple[WorkerId, ...] = ()  # other workers that have sent nothing for it either; their events follow


@dataclass(frozen=True, slots=True)
class Heard:
    """A silent worker has sent a message again."""

    worker: WorkerId


# --- events: from users and time


@dataclass(frozen=True, slots=True)
class Begin:
    """The job starts."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A user requests a different number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class Live:
    """The present live values."""

    workers: int
    min_workers: int
    suspended: bool
    epochs: int
    active_deadline_seconds: int | None = None  # None: unchanged


@dataclass(frozen=True, slots=True)
class Refused:
    """A change of values that a running job must refuse; it is reported, and nothing changes."""

    why: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A user requests the end of the job."""

    why: str
    checkpoint: bool = False  # end once the state is in a checkpoint; else now
    force: bool = False  # end even if the checkpoint fails
    id: str = ""  # of this request, by which the command finds the answer


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """A user requests a checkpoint now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a deadline of `Job.next_deadline` has come."""


Event = (
    Seen
    | Delayed
    | Gone
    | Terminating
    | Degraded
    | ServerListens
    | ServersReady
    | ServerRecovered
    | ServerAway
    | ProbeUnanswered
    | ServersGivenUp
    | ServerExited
    | Adopted
    | WorkerMessage
    | RingMessage
    | Progress
    | Silent
    | Heard
    | Begin
    | Scale
    | Live
    | Refused
    | StopAsked
    | CheckpointAsked
    | Tick
)
