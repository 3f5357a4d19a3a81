# SPDX-License-Identifier: Apache-2.0
"""Values that events and heartbeats carry, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.contract.heartbeats import Activity, Gpu, ServerWait, Staleness
from edl.contract.ids import Generation, WorkerId


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


@dataclass(frozen=True, slots=True)
class Past:
    """History of a job under earlier masters of its run, for its summary (`edl.master.core.past`).

    Args:
        seconds: by kind (`edl.master.core.goodput`), up to the last change of the kind.
        doing: the kind since then.
        kept_useful_seconds: seconds of training up to the newest checkpoint.
        changes: how many rings were formed.
        stall_seconds: the longest stall of any change.
        redone_records: over all changes.
        state_losses: how often the newest state was lost.
        checkpoint: the step of the newest checkpoint; 0 without a checkpoint.
        failures: charged to the job: worker and reason; of many, the last ones.
        failure_count: of all that were charged.
        warnings: of the workers, about the model and its data.
        evaluations: the last one of each split.
    """

    seconds: dict[str, float]
    doing: str
    kept_useful_seconds: float = 0.0
    changes: int = 0
    stall_seconds: float = 0.0
    redone_records: int = 0
    state_losses: int = 0
    checkpoint: int = 0
    failures: tuple[tuple[WorkerId, str], ...] = ()
    failure_count: int = 0
    warnings: tuple[str, ...] = ()
    evaluations: dict[str, Evaluation] = field(default_factory=dict)


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
    memory: int = 0  # bytes resident
    epoch_loss: EpochLoss | None = None
    speed: float = 0.0  # records per second of computing: what it could do if it never waited
    round: int = 0  # the evaluation batch after that step
    staleness: Staleness | None = None  # of its own steps; None: unchanged
    waits: ServerWait | None = None
    gpu: Gpu | None = None  # None: it has none, or its use is unknown
    activity: Activity | None = None  # None: it waits for its ring, or makes steps
