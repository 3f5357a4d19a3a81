# SPDX-License-Identifier: Apache-2.0
"""The events of a job, as frozen dataclasses.

Adapters turn the outside world into events; `Job.handle` turns an event into effects (`effects`). Both are
written to the journal unchanged. `facts` has the values that events carry.

This is a catalogue, and so in one file: a reader finds each event as `ev.NAME`, and a journal by that name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.contract.heartbeats import Staleness
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.master.core.facts import EpochLoss, PartFailed, Past, SampleLoss

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


# --- events: from the workers' streams


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's stream is open; it is importing and building."""

    worker: WorkerId
    resumes: bool = False  # the worker is ready already, and `Resume` follows
    pid: int = 0  # of its process


@dataclass(frozen=True, slots=True)
class Built:
    """The worker has built its model, but is not ready yet. Sent only if the mode is undecided."""

    worker: WorkerId
    tables: int  # as in Ready


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is initialized: its model is built and traced, and its data is open."""

    worker: WorkerId
    layout: Layout  # of the data as this worker found it; the first worker's becomes the job's
    model: str = ""  # fingerprint of its model
    checkpoint: int = 0  # the step of the newest checkpoint that it could begin from
    held_out: dict[str, int] = field(default_factory=dict)  # records of each split that the ring evaluates on
    forced: tuple[str, ...] = ()  # values that differ from those of the checkpoint, in words
    tables: int = 0  # number of edl.layers.Embedding whose rows are not in its model
    sample_loss: SampleLoss | None = None  # None: it has no comparable loss
    digests: dict[str, str] = field(default_factory=dict)  # of splits whose records it has computed by itself


@dataclass(frozen=True, slots=True)
class Resume:
    """An initialized worker of an earlier master reports its present state."""

    worker: WorkerId
    layout: Layout  # as in Ready
    generation: Generation  # the last ring that it was ordered to join; 0: no ring
    members: tuple[WorkerId, ...]  # of that ring
    left: bool  # whether it has left that ring
    joined: bool  # whether it had joined that ring
    left_ring: LeftRing | None  # its message when it last left a ring
    model: str = ""  # as in Ready
    held_out: dict[str, int] = field(default_factory=dict)  # as in Ready
    forced: tuple[str, ...] = ()  # as in Ready
    tables: int = 0  # as in Ready
    sample_loss: SampleLoss | None = None  # as in Ready
    digests: dict[str, str] = field(default_factory=dict)  # as in Ready
    leaving: str = ""  # why it wants to leave, as in Leaving; empty: it does not


@dataclass(frozen=True, slots=True)
class JoinedRing:
    """The worker is in the ring `generation` and holds its state."""

    worker: WorkerId
    generation: Generation
    step: int
    round: int = 0  # the evaluation batch after that step
    callbacks_done: int = 0  # 1: callbacks have been called after that step
    rolled_back: str = (
        ""  # why ring and servers have rolled back together to that step; empty if they have not
    )
    servers: int = 0  # number of parameter servers that hold the rows
    out: tuple[int, ...] = ()  # of these, the ones that the ring works without
    stay: str = ""  # why this is not the requested number of servers; empty if it is


@dataclass(frozen=True, slots=True)
class Stepped:
    """The worker has completed its first step in a generation; reports the cost of the change."""

    worker: WorkerId
    generation: Generation
    step: int
    stall_seconds: float  # from the last step before the change to the first after it; 0 for a new worker
    redone_records: int  # its own records that it had to train again
    wasted_seconds: float  # compute of the step that did not complete


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every member has all steps of an epoch. Sent by rank 0."""

    worker: WorkerId
    generation: Generation
    epochs: int  # number of complete epochs
    loss: EpochLoss | None  # of the last one
    metrics: dict[str, float | None] = field(default_factory=dict)  # over its records; None: not finite
    sha256: str = ""  # of the state after it, if training.deterministic is set


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The ring has evaluated its model on all records of a split. May be sent more than once."""

    worker: WorkerId
    generation: Generation
    step: int  # of the model
    split: str
    records: int
    metrics: dict[str, float | None] = field(default_factory=dict)  # None: not finite; empty: it failed


@dataclass(frozen=True, slots=True)
class LeftRing:
    """The worker has left the ring `generation` and keeps its state."""

    worker: WorkerId
    generation: Generation
    step: int
    has_state: bool  # whether it holds the state; a new worker that never synced does not
    skipped: RangeSet = field(default_factory=RangeSet)  # steps that were left out
    broken: str = ""  # what broke; empty if it left with the others at a step boundary
    digest: str = ""  # of the state, once nothing is left to train
    bad: dict[int, int] = field(default_factory=dict)  # number of omitted records, by epoch (from 0)
    round: int = 0  # the evaluation batch after that step
    callbacks_done: int = 0  # 1: callbacks have been called after that step
    stop: int = 0  # number of epochs after which a callback ends the training; 0: no callback does
    stopped_by: str = ""  # that callback
    made_in: int = 0  # id of the ring that made the last change to the state
    reads: bool = False  # its reads have not returned, so it cannot make a step: `RecordsRead` follows


@dataclass(frozen=True, slots=True)
class RecordsRead:
    """The reads of a worker that has left a ring without them have returned."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class BadRecords:
    """The worker has left records out of a step that is in the model."""

    worker: WorkerId
    generation: Generation
    epoch: int  # from 0
    records: dict[int, str]  # by index: why


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker got SIGTERM and wants to leave at a step boundary."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot continue, and reports why."""

    worker: WorkerId
    why: str
    traceback: str = ""
    fatal: bool = False  # every other worker would fail, too, so the job fails at once
    mistake: bool = False  # an error in the user's code, which would raise it again
    no_gpu_memory: bool = False  # its GPU has too little free memory


@dataclass(frozen=True, slots=True)
class Saved:
    """The worker has saved the final model, and evaluates it now."""

    worker: WorkerId
    model: str  # file name in the output directory, or the path of a file elsewhere; "": not kept
    note: str = ""  # what a user has to know to load it
    failed: tuple[PartFailed, ...] = ()
    step: int = 0  # of a copy that is kept while the ring evaluates the model; 0: it is the final model
    variables: str = ""  # a file with its variables, like `model`; the model itself is saved later


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has saved and evaluated the final model, as far as that was possible."""

    worker: WorkerId
    metrics: dict[str, float | None]  # None: the value is not finite
    model: str  # as in Saved
    note: str = ""
    failed: tuple[PartFailed, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)  # path by format, like `model`
    list_sha256: str = ""  # of exports.json, as hexadecimal digits; "" if that file was not written


@dataclass(frozen=True, slots=True)
class RowsLost:
    """The worker cannot save the final model, because parameter servers lack its rows. It holds the rest.

    Args:
        trained_on: the rows are not lost, but already contain steps of a further epoch.
    """

    worker: WorkerId
    why: str
    trained_on: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of each epoch of the training whose model is saved. May be sent more than once."""

    worker: WorkerId
    epochs: dict[str, tuple[float | None, ...]]  # by name, as in Keras' `fit`; None: not finite


@dataclass(frozen=True, slots=True)
class Warned:
    """The worker reports a warning for users, and continues."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class WarmStarted:
    """The root has begun with the state of a different training."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """All parts of a checkpoint are written."""

    worker: WorkerId  # the writer of the last part
    step: int
    attempt: str
    writers: tuple[WorkerId, ...]
    generation: int = 0  # of the ring whose state it is; 0: not reported
    # Run-length encoded digests of the writers' states, in the order of the writers.
    states: tuple[tuple[str, int], ...] = ()  # "": not reported


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The worker could not write its part of a checkpoint, or the manifest."""

    worker: WorkerId
    step: int
    attempt: str
    why: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The worker has written the manifest, so the checkpoint is complete."""

    worker: WorkerId
    step: int
    attempt: str
    nbytes: int


STREAM_ENDED = "its stream ended"  # `Closed.why` of a worker that crashed; `Gone` says how, if that is known


@dataclass(frozen=True, slots=True)
class Closed:
    """The worker's stream has ended."""

    worker: WorkerId
    why: str


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
class Stalled:
    """A ring that made steps makes none, because its members wait for something."""

    generation: Generation
    kind: str  # of the goodput: what they wait for
    seconds: float  # since when


@dataclass(frozen=True, slots=True)
class StallEnded:
    """The ring has made a step again."""

    generation: Generation


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


WorkerMessage = (
    Hello
    | Built
    | Ready
    | Resume
    | Leaving
    | Failed
    | Saved
    | Finished
    | RowsLost
    | History
    | RecordsRead
    | Warned
    | WarmStarted
    | PartsWritten
    | CheckpointFailed
    | Checkpointed
    | Closed
)
# Void in a different ring.
RingMessage = JoinedRing | Stepped | EpochEnded | Evaluated | BadRecords | LeftRing
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
    | Stalled
    | StallEnded
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
