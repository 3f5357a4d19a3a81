# SPDX-License-Identifier: Apache-2.0
"""The events of a job that its workers report by their streams, as frozen dataclasses.

Other modules read them as `ev.NAME` of `events`, which has all events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.master.core.facts import EpochLoss, PartFailed, SampleLoss


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's stream is open; it is importing and building."""

    worker: WorkerId
    resumes: bool = False  # the worker is ready already, and `Resume` follows
    brings_state: bool = False  # it may have an in-memory snapshot of the state when it is ready
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
    held: LeftRing | None = None  # the snapshot that an earlier worker in its place has left
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
