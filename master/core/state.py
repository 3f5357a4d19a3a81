"""What the master knows of one job, and nothing about what to do with it.

Only `Job.handle` changes it: the modules beside this one are the parts of that one door.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.config import Config
from edl.contract.evaluation import EvaluationPlan
from edl.contract.heartbeats import Staleness
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.phases import Phase
from edl.contract.ranges import RangeSet
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.checkpoints import Checkpoints, Farewell
from edl.master.core.failover import Failover
from edl.master.core.failures import Failure, RestartBackoff
from edl.master.core.goodput import Goodput
from edl.master.core.quorum import Limits
from edl.master.core.ring import Ring
from edl.master.core.timeouts import Timeouts
from edl.master.core.workers import NO_RING, Pool

SUSPENDED = "suspended"
SUSPENDED_AT_ZERO = (
    "suspended: workers is 0. The job writes no checkpoints (checkpoint.dir is empty), so one worker "
    "keeps the state"
)


@dataclass(slots=True)
class Result:
    """What comes out of a job."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    model: str = ""  # file name in the output directory, or the path of a file elsewhere
    note: str = ""  # what one has to know to load it
    variables: str = ""  # a file with the trained variables, written before the model is saved
    exports: dict[str, str] = field(default_factory=dict)  # by format: where it is, like `model`
    kept_at: int | None = (
        None  # the step of `model`, if it is a copy that was kept before the last evaluation
    )
    failed: tuple[ev.PartFailed, ...] = ()  # what did not work at the end
    lost_exporters: int = 0  # who were lost while they saved or evaluated
    rows_lost: int = 0  # how often parameter servers lost rows while the model was to be saved
    skipped: RangeSet = field(default_factory=RangeSet)  # steps
    bad: int = 0  # records that were left out, over all epochs
    digests: dict[WorkerId, str] = field(default_factory=dict)  # of the final state, at each who has it
    history: dict[str, tuple[float | None, ...]] = field(
        default_factory=dict
    )  # of the epochs, as `fit` has it


@dataclass(slots=True)
class TrainTask:
    """What the ring works on."""

    layout: Layout  # of the data
    steps: Steps
    epochs: int  # to train
    done: int = 0  # steps that every member of the ring has; the root's, when a ring is formed
    safe: int = 0  # steps that all in a ring had who had the state: to go on from less is a loss
    evaluation: EvaluationPlan | None = None  # None: the ring makes none, or no more

    @property
    def epochs_done(self) -> int:
        return self.steps.epoch(self.done) if self.steps.records else self.epochs

    @property
    def last_epoch(self) -> int:
        """How many epochs there will be: one that has begun is trained to its end."""
        return max(self.epochs, self.steps.begun(self.done))

    @property
    def end(self) -> int:
        """The step at which training ends."""
        return self.steps.end(self.done, self.epochs)

    @property
    def complete(self) -> bool:
        return self.done >= self.end

    @property
    def rounds(self) -> int:
        """How many rounds of an evaluation are due where it is now."""
        return self.evaluation.rounds(self.done, self.epochs) if self.evaluation else 0


@dataclass(frozen=True, slots=True)
class Away:
    """A parameter server that does not answer."""

    since: float
    what: str  # starting, restarting, not answering


@dataclass(slots=True)
class Servers:
    """The parameter servers that are to have the rows, and those that have them."""

    awaited: bool = False  # they start, and no ring is formed before they listen
    wanted: int = 0  # 0: as many as the workers know
    addresses: tuple[str, ...] = ()
    ordered: int | None = (
        0  # the ring was formed for so many; 0: as many as the workers know; None: not known
    )
    have: int = 0  # 0: nobody has said so
    lost: bool = False  # rows of the trained model, which is not saved yet: a ring goes back with them
    out: tuple[int, ...] = ()  # of those, that are done without
    answered: dict[int, float] = field(default_factory=dict)  # when each was last heard to be back
    due: str = ""  # why the ring is to be formed anew; empty: it is not
    away: dict[int, Away] = field(default_factory=dict)  # those that do not answer
    # By server: since when its process has answered no Probe, or when it was last restarted for that.
    unanswered: dict[int, float] = field(default_factory=dict)
    waited: tuple[int, ...] = ()  # of these, those that people know to be waited for
    waited_at: float = 0.0  # since when one is
    stay: str = ""  # why the rows are not on as many as were wanted last; empty: they are
    arranged: int = 0  # it was told that these have the rows, since they were wanted


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker has not been heard.

    Args:
        since: when it was heard last.
        useful_seconds: seconds of training in the job until then.
    """

    since: float
    useful_seconds: float


@dataclass(slots=True)
class Trust:
    """Whose state counts, since members have held different ones."""

    not_of: Generation = NO_RING  # none that is of this ring, or of one before
    why: str = ""  # it does not
    spread: Generation = NO_RING  # the last ring in which members took the state of others
    renewed: Generation = NO_RING  # the last ring that began with no member's state
    times: int = 0  # that all went back for it, since a checkpoint was completed


class State:
    """One job as it is now, and what is to be done about the event in hand."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mode: str = config.mode  # or what it has become
        self.target, self.min_size, self.suspended = config.workers, config.min_workers, config.suspend
        self.pool = Pool()
        self.ring = Ring(self.pool)
        self.timeouts = Timeouts(self.pool, config.elastic)
        self.failover = Failover(self.pool, self.ring, config.elastic.startup_timeout_seconds)
        self.epochs = config.training.epochs if config.trains else 0  # to train
        self.stopped = 0  # with so many the training ends, because a callback wants it; 0: none does
        self.safe_before = 0  # as an earlier master knew it: TrainTask.safe
        self.train: TrainTask | None = None  # unknown until a worker has counted the records
        self.held_out: dict[str, int] = {}  # records of each split that the ring evaluates on
        self.model = ""  # the hash of how the first worker that was ready made it
        self.sample_loss: ev.SampleLoss | None = None  # of the first worker that reported one
        self.regroup_at: float | None = None  # when the ring is looked at anew: changes come in one go
        self.join_at: float | None = None  # when it is worth changing the ring for who is ready: `patience`
        self.judge_at: float | None = None  # when the parts of a step are: members have told other speeds
        self.silences: dict[WorkerId, Silence] = {}  # of workers that are not heard
        # Seconds of training until the newest checkpoint was taken: what is later would be done again.
        self.kept_useful_seconds = 0.0
        self.copies_awaited = 0  # of the state, which holders that have crashed may have left
        self.copies_until = 0.0  # they are
        self.staleness: Staleness | None = None  # where steps come in any order, and some have been told
        self.waited = ""  # for what, when there was no ring
        self.held_back = ""  # why the next ring has to wait: the last ones broke before their first step
        self.servers = Servers()
        self.backoff = RestartBackoff()
        self.failures: list[Failure] = []
        self.failure_count = 0  # of all masters; of earlier ones, the last failures alone are known
        self.checkpoints = Checkpoints(config)
        self.trust = Trust()
        self.degraded: dict[str, str] = {}  # parts of the backend that do not work, and why
        self.bad_told = 0  # records, of which people were told
        self.forced: list[str] = []  # values that are others than those before a checkpoint, in words
        self.began_with = ""  # of another training
        self.warnings: list[str] = []  # of the workers, about the model and its data
        self.traceback = ""  # of the failure that ended the job
        self.exporter: WorkerId | None = None
        self.ending: tuple[Phase, str] | None = None  # phase and reason
        self.ended = False
        self.farewell: Farewell | None = None  # it is to end once its state is kept
        self.stop_asked = ""  # the id of the last asking for that
        self.not_stopped = ""  # why that has led to nothing
        self.result = Result()
        self.step = 0
        self.loss: float | None = None  # of the last step
        self.epoch_loss: ev.EpochLoss | None = None
        self.epoch_metrics: dict[str, float | None] = {}  # of the last whole epoch
        self.evaluations: dict[str, ev.Evaluation] = {}  # by split
        self.evaluations_told: dict[str, int] = {}  # by split: the newest step whose evaluation was logged
        self.restarts = 0  # how often all state was lost
        self.stale = 0  # messages that came too late to mean anything
        self.reason = "starting"
        self.began_at: float | None = None
        self.active_before = 0.0  # seconds, under earlier masters
        self.active_deadline = config.active_deadline_seconds  # in seconds; 0: none
        self.ended_at: float | None = None
        self.goodput = Goodput()
        self.now = 0.0  # of the event in hand
        self.effects: list[ef.Effect] = []  # of the event in hand

    @property
    def copies_count(self) -> bool:
        """Whether a state that was left in memory may be the job's. Nobody knows of which ring a copy is."""
        return self.config.elastic.memory_copy and not self.trust.not_of

    def useful_seconds(self, at: float) -> float:
        """Seconds of training until `at`, as if nothing had changed between `at` and the last change."""
        return self.goodput.at(max(at, self.goodput.since or at))["useful"]

    @property
    def limits(self) -> Limits:
        """How small and how large a ring may be now."""
        kept = self.checkpoints.enabled and self.target == 0
        return Limits(self.min_size, self.target, kept or self.config.asynchronous)

    @property
    def pause(self) -> str:
        """Why workers that hold the state form no ring to train; empty: they may.

        A job of 0 workers is suspended. If its state is in no checkpoint and on no server, one worker
        keeps it.
        """
        if self.suspended:
            return SUSPENDED
        if self.target or self.limits.may_empty:
            return ""
        return SUSPENDED_AT_ZERO if self.pool.any(lambda kind: kind.has_state and not kind.stopped) else ""

    @property
    def phase(self) -> Phase:
        """What the job is doing, or how it ended."""
        if self.ending is not None:
            return self.ending[0] if self.ended else Phase.Ending
        if self.exporter is not None:
            return Phase.Finishing
        if self.ring.members:
            return Phase.Training
        if self.pause:
            return Phase.Suspended
        return Phase.Starting if self.ring.generation == 0 else Phase.Waiting

    def do(self, *effects: ef.Effect) -> None:
        self.effects += effects

    def notice(self, reason: Reason, text: str) -> None:
        self.do(ef.Notice(reason, text))

    def close(self, why: str, planned: bool) -> None:
        """Have every member leave the ring: at a step boundary, or by a cut when it is broken."""
        if self.ring.running:
            self.goodput.turn("re-forming", self.now)
        self.do(*self.ring.close(why, planned))

    def end(self, phase: Phase, reason: str) -> None:
        """End the job in this phase: Succeeded, Failed or Stopped. The first decision stands."""
        if self.ending is None:
            if phase is Phase.Failed and not self.result.model and (weights := self.result.variables):
                self.result.model, self.result.note = weights, f"{weights} has the weights alone"
                reason += f"; the trained weights are kept: {weights}"
            self.ending, self.reason = (phase, reason), reason
            self.notice(Reason[phase], f"the job {phase.lower()}: {reason}")
