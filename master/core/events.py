"""The events of a job, as frozen dataclasses.

Adapters turn the outside world into events; `Job.handle` turns an event into effects (`effects`). Both are
written to the journal unchanged. `facts` has the values that events carry.
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
    """The backend has the worker running (or at least placed)."""

    worker: WorkerId
    handle: str  # what a person looks it up by: a process id, a pod name


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker's process has ended, for whatever reason."""

    worker: WorkerId
    code: int | None = None  # exit code; None when a signal or an unknown cause ended it
    signal: str = ""  # "SIGKILL", ...
    free: bool = False  # the backend knows that the job is not to blame (preemption, node loss)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The worker does not run yet, and why: no room, a quota, an image that cannot be pulled."""

    worker: WorkerId
    why: str  # empty: it is delayed no longer


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
    again: bool  # one with this index was there before


@dataclass(frozen=True, slots=True)
class ServersReady:
    """So many parameter servers listen: the rows are to be on them."""

    servers: int
    addresses: tuple[str, ...]  # of them, and of those that have rows now, by index


@dataclass(frozen=True, slots=True)
class ServerRecovered:
    """A parameter server answers again."""

    server: int


@dataclass(frozen=True, slots=True)
class ServerAway:
    """A parameter server has not answered for a while. `ServerRecovered`, or `ServerListens`, ends that."""

    server: int
    seconds: float  # so far
    what: str  # it does meanwhile, as far as is known: starting, restarting, not answering


@dataclass(frozen=True, slots=True)
class ProbeUnanswered:
    """A parameter server has left Probes in a row without an answer, although its process runs."""

    server: int
    probes: int  # in a row


@dataclass(frozen=True, slots=True)
class ServersGivenUp:
    """So many parameter servers were to have the rows, and some of them have not come to listen."""

    servers: int
    stay: int  # on so many the rows stay
    why: str


@dataclass(frozen=True, slots=True)
class ServerExited:
    """The process of a parameter server has ended, though nobody asked it to."""

    server: int
    why: str  # SIGKILL, exit code 1: ...
    pause_seconds: float = 0.0  # until another one is started in its place
    fatal: bool = False  # none is: it would fare no better


@dataclass(frozen=True, slots=True)
class Adopted:
    """Before `Begin`: an earlier master has had this job, and this is what is there of it."""

    workers: tuple[tuple[WorkerId, str], ...]  # that may live, with their handles; "": does not run yet
    next_id: int  # how many workers there have been; also the next id
    within_seconds: float = 10.0  # they come back: they ask twice a second
    active_seconds: float = 0.0  # since the job has begun, as far as is known
    safe: int = 0  # steps that all in its last ring had, as far as is known
    began_with: str = ""  # WarmStarted.text, where the job has begun with another training's state
    prompt: tuple[WorkerId, ...] = ()  # they have reached this master before it acted, and are back sooner
    prompt_seconds: float = 10.0  # they are
    past: Past | None = None  # what the job has done until then, as far as is known


# --- events: from the workers' streams


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's stream is open; it is importing and building."""

    worker: WorkerId
    resumes: bool = False  # it is ready already, and `Resume` follows
    brings_state: bool = False  # it may have a copy of the state when it is ready


@dataclass(frozen=True, slots=True)
class Built:
    """The worker has built its model; what takes longer is still to come. Said where the mode is open."""

    worker: WorkerId
    tables: int  # as in Ready


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is initialized: its model is built and traced, its data open."""

    worker: WorkerId
    layout: Layout  # of the data, as this worker would have it: the first one's is the job's
    model: str = ""  # a hash of how its model is made
    checkpoint: int = 0  # the step of the newest checkpoint that it could begin from
    held_out: dict[str, int] = field(default_factory=dict)  # records of each split that the ring evaluates on
    forced: tuple[str, ...] = ()  # values that are others than that was made with, in words
    held: LeftRing | None = None  # the state that a worker before it in its place has left there
    tables: int = 0  # edl.layers.Embedding of its model whose rows are not in that
    sample_loss: SampleLoss | None = None  # None: it has none that could be compared


@dataclass(frozen=True, slots=True)
class Resume:
    """An initialized worker of an earlier master tells its present state."""

    worker: WorkerId
    layout: Layout  # as in Ready
    generation: Generation  # the last ring it was ordered into; 0: none
    members: tuple[WorkerId, ...]  # of that ring
    left: bool  # whether it has left that ring
    joined: bool  # whether it had joined it
    left_ring: LeftRing | None  # what it said when it last left a ring
    model: str = ""  # as in Ready
    held_out: dict[str, int] = field(default_factory=dict)  # as in Ready
    forced: tuple[str, ...] = ()  # as in Ready
    tables: int = 0  # as in Ready
    sample_loss: SampleLoss | None = None  # as in Ready


@dataclass(frozen=True, slots=True)
class JoinedRing:
    """The worker is in the ring `generation` and holds its state."""

    worker: WorkerId
    generation: Generation
    step: int
    round: int = 0  # of the evaluation after that step
    turn: int = 0  # 1: callbacks have been called after that step
    went_back: str = ""  # why ring and parameter servers have gone back together, to that step; empty: not
    servers: int = 0  # parameter servers that have the rows
    out: tuple[int, ...] = ()  # of these, those that are done without
    stay: str = ""  # why they are not as many as were wanted; empty: they are


@dataclass(frozen=True, slots=True)
class Stepped:
    """The worker's first step in a generation came back: what the change cost it."""

    worker: WorkerId
    generation: Generation
    step: int
    stall_seconds: float  # last step before the change to the first after it; 0 for a newcomer
    redone_records: int  # records of its own that the change made it train again
    wasted_seconds: float  # compute of the step that did not come back


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Every member has all steps of an epoch. Rank 0 says so."""

    worker: WorkerId
    generation: Generation
    epochs: int  # so many are whole
    loss: EpochLoss | None  # of the last of them
    metrics: dict[str, float | None] = field(default_factory=dict)  # over its records; None: not finite


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The ring has evaluated its model on all records of a split. May come more than once."""

    worker: WorkerId
    generation: Generation
    step: int  # that the model was at
    split: str
    records: int
    metrics: dict[str, float | None] = field(default_factory=dict)  # None: not finite; none at all: it failed


@dataclass(frozen=True, slots=True)
class LeftRing:
    """The worker has left the ring `generation` and keeps its state."""

    worker: WorkerId
    generation: Generation
    step: int
    has_state: bool  # whether it has synced, ever: a newcomer that never synced has no state
    skipped: RangeSet = field(default_factory=RangeSet)  # steps that were left out
    broken: str = ""  # what broke; empty when it left with the others at a step boundary
    digest: str = ""  # of the state, once nothing is left to train
    bad: dict[int, int] = field(default_factory=dict)  # by epoch, from 0: records that were left out
    round: int = 0  # of the evaluation after that step
    turn: int = 0  # 1: callbacks have been called after that step
    stop: int = 0  # epochs with which the training ends, because a callback wants it; 0: none does
    stopped_by: str = ""  # which one


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
    """The worker cannot go on, and says why."""

    worker: WorkerId
    why: str
    traceback: str = ""
    fatal: bool = False  # no other worker would fare better: fail the job at once
    mistake: bool = False  # of the model's code, while the worker started


@dataclass(frozen=True, slots=True)
class Saved:
    """The worker has saved the final model, and evaluates it now."""

    worker: WorkerId
    model: str  # file name in the output directory, or the path of a file elsewhere; "": none is kept
    note: str = ""  # what one has to know to load it
    failed: tuple[PartFailed, ...] = ()
    step: int = 0  # of a copy that is kept while the ring evaluates the model; 0: it is what is handed over
    variables: str = ""  # a file with its variables, as `model`; then the model is still to be saved


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has saved and evaluated the final model, as far as that was possible."""

    worker: WorkerId
    metrics: dict[str, float | None]  # None: the value is not finite
    model: str  # as in Saved
    note: str = ""
    failed: tuple[PartFailed, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)  # by format: where it is, like `model`
    list_sha256: str = ""  # of exports.json, as hexadecimal digits; "": it is not written


@dataclass(frozen=True, slots=True)
class RowsLost:
    """The worker cannot save the final model: parameter servers have lost rows of it. It holds the rest.

    Args:
        trained_on: nothing is lost; steps of another epoch are in the rows already.
    """

    worker: WorkerId
    why: str
    trained_on: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """The worker saves the model of a training that was so. May come more than once."""

    worker: WorkerId
    epochs: dict[str, tuple[float | None, ...]]  # by name, as Keras' `fit` returns it; None: not finite


@dataclass(frozen=True, slots=True)
class Warned:
    """The worker has found something that people should know in time; it goes on."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class WarmStarted:
    """The root has begun with what another training has learned."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """All parts of a checkpoint are written."""

    worker: WorkerId  # who wrote the last one
    step: int
    attempt: str
    writers: tuple[WorkerId, ...]
    generation: int = 0  # of the ring whose state it is; 0: not told
    # Of the state that each of them holds, in their order: a digest, and how many in a row have it.
    states: tuple[tuple[str, int], ...] = ()  # "": not told


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The worker could not write its part of a checkpoint, or the manifest."""

    worker: WorkerId
    step: int
    attempt: str
    why: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The worker has written the manifest: the checkpoint is whole."""

    worker: WorkerId
    step: int
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The worker's stream has ended."""

    worker: WorkerId
    why: str


# --- events: what heartbeats come to (`edl.master.telemetry`)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a ring is, now and then: the most that any member has told."""

    generation: Generation
    step: int  # that a member has; the others have the one before
    loss: float | None = None  # of the whole ring's last step
    epoch_loss: EpochLoss | None = None
    speeds: dict[WorkerId, float] = field(default_factory=dict)  # of whom they are others than told before
    round: int = 0  # of the evaluation after that step
    staleness: Staleness | None = None


@dataclass(frozen=True, slots=True)
class Silent:
    """The worker has not been heard for as long as is allowed."""

    worker: WorkerId
    seconds: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker that was silent has said something."""

    worker: WorkerId


# --- events: from people and time


@dataclass(frozen=True, slots=True)
class Begin:
    """The job starts."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Somebody wants another number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class Live:
    """The values that may change while the job runs are these now."""

    workers: int
    min_workers: int
    suspended: bool
    epochs: int
    active_deadline_seconds: int | None = None  # None: as before


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that a running job cannot take: it is reported, and nothing changes."""

    why: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the job to end."""

    why: str
    checkpoint: bool = False  # once its state is in a checkpoint; else now
    force: bool = False  # also if that fails
    id: str = ""  # of this asking: by it people find the answer


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """Somebody wants a checkpoint now."""


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
    | Warned
    | WarmStarted
    | PartsWritten
    | CheckpointFailed
    | Checkpointed
    | Closed
)
RingMessage = (
    JoinedRing | Stepped | EpochEnded | Evaluated | BadRecords | LeftRing
)  # worth nothing in another ring
Event = (
    Seen
    | Delayed
    | Gone
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
