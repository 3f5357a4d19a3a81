# SPDX-License-Identifier: Apache-2.0
"""Values that events and heartbeats carry, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.contract.heartbeats import Activity, ServerWait, Staleness, Usage
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The newest evaluation on a split."""

    step: int
    records: int
    metrics: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """The loss of the first records with fixed weights: equal on all workers of a job but for rounding."""

    loss: float
    tolerance: float  # the relative difference that rounding can explain


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """The mean loss of an epoch so far, over the records trained on while a worker was in the ring."""

    epoch: int  # from 0
    records: int
    mean: float


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A failed part of the end of a job."""

    part: str  # "saving" or "evaluation"
    why: str
    traceback: str = ""


@dataclass(slots=True)
class Result:
    """The results of a job."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    model: str = ""  # file name in the output directory, or the path of a file elsewhere
    note: str = ""  # what a user has to know to load it
    variables: str = ""  # a file with the trained variables, written before the model is saved
    exports: dict[str, str] = field(default_factory=dict)  # path by format, like `model`
    kept_at: int | None = (
        None  # the step of `model`, if it is a copy that was kept before the last evaluation
    )
    failed: tuple[PartFailed, ...] = ()  # failed parts of the end of the job
    lost_exporters: int = 0  # number of workers lost while they saved or evaluated
    rows_lost: int = 0  # how often parameter servers lost rows while the model was to be saved
    skipped: RangeSet = field(default_factory=RangeSet)  # steps
    bad: int = 0  # records that were left out, over all epochs
    digests: dict[WorkerId, str] = field(default_factory=dict)  # of the final state, by worker in sync
    # Metrics of each epoch, as in the History of Keras' fit.
    history: dict[str, tuple[float | None, ...]] = field(default_factory=dict)

    def keep(self, model: str, note: str, kept_at: int | None = None) -> None:
        """Record the saved model, which replaces the file of variables."""
        self.model, self.note, self.kept_at, self.variables = model, note, kept_at, ""

    def keep_variables(self, file: str) -> None:
        """Record the file of variables."""
        self.variables = file

    def void(self) -> None:
        """Forget the model: its state has turned out to be wrong."""
        self.keep("", self.note)

    def fail(self, part: str, why: str, alone: bool = False) -> None:
        """Record a failed part of the end; `alone`: drop those recorded before."""
        self.failed = (*(() if alone else self.failed), PartFailed(part, why))

    def agree(self, digests: dict[WorkerId, str]) -> None:
        """Record the digests of the final state."""
        self.digests = digests


@dataclass(frozen=True, slots=True)
class Past:
    """History of a job under earlier masters of its run, for its summary (`edl.master.core.past`).

    Args:
        seconds: by kind (`edl.master.core.goodput`), up to the last change of the kind.
        doing: the kind since then.
        kept_useful_seconds: seconds of training up to the newest checkpoint.
        changes: how many rings were formed.
        longest_wait: seconds and kind of the longest time in which a ring waited and made no step.
        stall_seconds: the longest stall of any change.
        redone_records: over all changes.
        state_losses: how often the newest state was lost.
        checkpoint: the step of the newest checkpoint; 0 without a checkpoint.
        failures: charged to the job: worker and reason; of many, the last ones.
        failure_count: of all that were charged.
        warnings: of the workers, about the model and its data.
        evaluations: the last one of each split.
        safe: steps that all members of the last ring had; while a ring trained, it may have made more.
        generation: of the last ring; 0: no ring was formed.
        stepped: the members of that ring whose costs are in `stall_seconds` and `redone_records`.
        ending: the phase in which the job ends, and the reason; None: it was not to end.
        mode: the mode, once it is decided.
        layout: of the data; None while no worker has counted the records.
        done: steps that every member of the last ring had; those of its root when it was formed.
        result: of the job, so far.
    """

    seconds: dict[str, float]
    doing: str
    kept_useful_seconds: float = 0.0
    longest_wait: tuple[float, str] = (0.0, "")
    changes: int = 0
    stall_seconds: float = 0.0
    redone_records: int = 0
    state_losses: int = 0
    checkpoint: int = 0
    failures: tuple[tuple[WorkerId, str], ...] = ()
    failure_count: int = 0
    warnings: tuple[str, ...] = ()
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    safe: int = 0
    generation: int = 0
    stepped: tuple[WorkerId, ...] = ()
    ending: tuple[str, str] | None = None
    mode: str = "auto"
    layout: Layout | None = None
    done: int = 0
    result: Result = field(default_factory=Result)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of a worker, which is no event: the core receives summaries of many (`telemetry`).

    Its step may be in the memory of this worker only.
    """

    worker: WorkerId
    generation: Generation
    step: int
    rate: float = 0.0  # records per second of this worker
    loss: float | None = None  # of the whole ring's last step
    usage: Usage = field(default_factory=Usage)
    epoch_loss: EpochLoss | None = None
    speed: float = 0.0  # records per second of computing: what it could do if it never waited
    round: int = 0  # the evaluation batch after that step
    staleness: Staleness | None = None  # of its own steps; None: unchanged
    waits: ServerWait | None = None
    activity: Activity | None = None  # None: it waits for its ring, or makes steps
