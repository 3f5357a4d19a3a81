# SPDX-License-Identifier: Apache-2.0
"""The state of one job in the master, without the decisions about it.

Only `Job.handle` changes it; the other modules of this package are parts of that method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.config import Config
from edl.contract.evaluation import EvaluationPlan
from edl.contract.ids import NO_RING, Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.errors import EdlError
from edl.master.core import effects as ef
from edl.master.core import facts
from edl.master.core.checkpoints import Checkpoints
from edl.master.core.failover import Failover
from edl.master.core.failures import FailureLog, RestartBackoff
from edl.master.core.goodput import Goodput
from edl.master.core.latest import Latest
from edl.master.core.lifetime import Lifetime
from edl.master.core.next_ring import NextRing
from edl.master.core.notes import Notes
from edl.master.core.quorum import Limits
from edl.master.core.reference import Reference
from edl.master.core.ring import Ring
from edl.master.core.servers import Servers
from edl.master.core.stop_request import StopRequest
from edl.master.core.timeouts import Timeouts
from edl.master.core.work import RECORDS, Work
from edl.master.core.workers import Pool

SUSPENDED = "suspended"
SUSPENDED_AT_ZERO = (
    "suspended: workers is 0. The job writes no checkpoints (checkpoint.dir is empty), so one worker "
    "keeps the state"
)
SCALED_TO_ZERO = "suspended: workers is 0; the job goes on once it is greater"


@dataclass(slots=True)
class TrainTask:
    """The task of the ring."""

    layout: Layout  # of the data
    steps: Steps
    epochs: int  # to train
    done: int = 0  # steps that every member of the ring has; those of the root when a ring is formed
    safe: int = 0  # steps that all members in sync had; continuing from fewer steps is a loss
    evaluation: EvaluationPlan | None = None  # None: the ring evaluates nothing (more)

    @property
    def epochs_done(self) -> int:
        """Number of epochs whose steps are all done."""
        return self.steps.epoch(self.done) if self.steps.records else self.epochs

    @property
    def last_epoch(self) -> int:
        """The number of epochs in the end: an epoch that has begun is completed."""
        return max(self.epochs, self.steps.begun(self.done))

    @property
    def end(self) -> int:
        """The step at which training ends."""
        return self.steps.end(self.done, self.epochs)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.done >= self.end

    @property
    def rounds(self) -> int:
        """The number of evaluation batches that are due at the present step."""
        return self.evaluation.rounds(self.done, self.epochs) if self.evaluation else 0


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker that sends no heartbeats.

    Args:
        since: time of its last heartbeat.
        useful_seconds: seconds of training in the job until then.
    """

    since: float
    useful_seconds: float


@dataclass(slots=True)
class DivergenceCheck:
    """Which states are void after members held different ones."""

    untrusted_up_to: Generation = NO_RING  # states of this ring and of earlier rings are void
    why: str = ""  # the reason
    spread: Generation = NO_RING  # the last ring in which members received the state of others
    renewed: Generation = NO_RING  # the last ring that started without a member's state
    times: int = 0  # number of rollbacks for this reason since the last completed checkpoint

    def begin(self, ring: Generation, has_state: bool, sends_state: bool) -> None:
        """Record a ring that starts with a member's state, which others receive, or without one."""
        if not has_state:
            self.renewed = ring
        elif sends_state:
            self.spread = ring

    def roll_back(self, why: str, ring: Generation) -> None:
        """Void the states of this ring and of earlier rings."""
        self.times, self.why, self.untrusted_up_to = self.times + 1, why, ring

    def agree(self) -> None:
        """Record that the members' states agree, in a completed checkpoint."""
        self.times = 0


class InvalidState(EdlError):
    """The state contradicts itself, so nothing may be decided from it. A new master learns it anew."""


class State:
    """The state of one job, and the effects of the event in hand.

    Args:
        work: what the job's workers do.

    Raises:
        InvalidState: the work is not that of the job's mode.
    """

    def __init__(self, config: Config, work: Work = RECORDS) -> None:
        if config.task not in work.tasks:
            raise InvalidState(f"mode {config.mode} with the work of {', '.join(work.tasks)}")
        self.work, self.config = work, config
        self.mode: str = config.mode  # or the decided mode (mode=auto)
        self.target, self.min_size, self.suspended = config.workers, config.min_workers, config.suspend
        self.pool = Pool()
        self.ring = Ring(self.pool)
        self.timeouts = Timeouts(self.pool, config.elastic)
        self.failover = Failover(self.pool, self.ring, config.elastic.startup_timeout_seconds)
        self.epochs = work.epochs(config)  # to train
        self.stopped = 0  # epochs after which a callback ended the training; 0: no callback did
        self.safe_before = 0  # TrainTask.safe as an earlier master knew it
        self.unseen = (
            False  # workers of an earlier master may have trained more steps; cleared by the next ring
        )
        self.train: TrainTask | None = None  # None until a worker has counted the records
        self.reference = Reference()
        self.next_ring = NextRing()
        self.silences: dict[WorkerId, Silence] = {}  # by worker without heartbeats
        self.servers = Servers()
        self.backoff = RestartBackoff()
        self.failures = FailureLog()
        self.checkpoints = Checkpoints(config)
        self.divergence = DivergenceCheck()
        self.notes = Notes()
        self.exporter: WorkerId | None = None
        self.script_ended: WorkerId | None = None  # the first worker whose script has ended by itself
        self.ending: tuple[Phase, str] | None = None  # phase and reason
        self.ended = False
        self.stop_request = StopRequest()
        self.result = facts.Result()
        self.latest = Latest()
        self.restarts = 0  # how often the state was lost entirely
        self.stale = 0  # number of ignored stale messages
        self.reason = "starting"
        self.lifetime = Lifetime(config.active_deadline_seconds)
        self.goodput = Goodput()
        self.now = 0.0  # of the event in hand
        self.effects: list[ef.Effect] = []  # of the event in hand

    @property
    def limits(self) -> Limits:
        """The smallest and largest allowed ring."""
        if self.script_ended is not None:
            return Limits(1, self.target)  # the others end, too, in the ring that is left
        kept = self.checkpoints.enabled and self.target == 0
        return Limits(self.min_size, self.target, kept or self.config.asynchronous)

    @property
    def pause(self) -> str:
        """Why workers in sync form no ring; empty if they may.

        A job with 0 workers is suspended. If its state is neither in a checkpoint nor on servers, one worker
        keeps it.
        """
        if self.suspended:
            return SUSPENDED
        if self.target or self.limits.may_empty:
            return ""
        return SUSPENDED_AT_ZERO if self.pool.any(lambda kind: kind.has_state and not kind.stopped) else ""

    @property
    def suspension(self) -> str:
        """Why nothing is trained, and why no worker is awaited either; empty if the job is not suspended."""
        return self.pause or (SCALED_TO_ZERO if self.target == 0 else "")

    @property
    def phase(self) -> Phase:
        """The phase of the job."""
        if self.ending is not None:
            return self.ending[0] if self.ended else Phase.Ending
        if self.exporter is not None:
            return Phase.Finishing
        if self.ring.members:
            return Phase.Training
        if self.suspension:
            return Phase.Suspended
        return Phase.Starting if self.ring.generation == 0 else Phase.Waiting

    def validate(self) -> None:
        """Check what must hold after each event, in a time that does not depend on the number of workers.

        Raises:
            InvalidState: it does not hold.
        """
        ring, wrong = self.ring, ""
        size, inside = len(ring.members), self.pool.count(lambda kind: kind.in_ring)
        known = self.failover.until is None  # else an earlier master's ring is still being reported
        if (ring.running or ring.closing) != bool(size):
            wrong = f"a ring that is {ring.state} has {size} members"
        elif inside > size or (inside < size and ring.running and known and self.ending is None):
            wrong = f"{inside} of {size} members are in a ring that is {ring.state}"
        elif self.exporter is not None and (inside or self.pool.get(self.exporter) is None):
            wrong = f"worker {self.exporter} saves the model, but is gone, or {inside} workers are in a ring"
        elif self.ended and (self.ending is None or self.pool):
            wrong = f"the job has ended, with {len(self.pool)} workers and the end {self.ending}"
        if wrong:
            raise InvalidState(f"the state of the job contradicts itself: {wrong}")

    def do(self, *effects: ef.Effect) -> None:
        """Add effects, to be performed after the present event."""
        self.effects += effects

    def notice(self, reason: Reason, text: str) -> None:
        """Report something to users: in the log, in the journal, and as an Event on Kubernetes."""
        self.do(ef.Notice(reason, text))

    def close(self, why: str, event: str) -> None:
        """Order every member to leave the ring: at a step boundary (CHANGE), or by a cut (BREAK, LOSS)."""
        if self.ring.running:
            self.goodput.turn("re-forming", self.now)
        self.do(*self.ring.close(why, event, self.now))

    def end(self, phase: Phase, reason: str) -> None:
        """End the job in this phase: Succeeded, Failed or Stopped. The first decision stands."""
        if self.ending is None:
            if phase is Phase.Failed and not self.result.model and (weights := self.result.variables):
                self.result.model, self.result.note = weights, f"{weights} has the weights alone"
                reason += f"; the trained weights are kept: {weights}"
            self.ending, self.reason = (phase, reason), reason
            self.notice(Reason[phase], f"the job {phase.lower()}: {reason}")


Deadline = Callable[[State], float | None]  # when something is due; None or a passed time: nothing is
DEADLINES: list[Deadline] = []


def deadline(due: Deadline) -> Deadline:
    """Register a deadline beside the code that acts on it: a `Tick` comes then if no other event does."""
    DEADLINES.append(due)
    return due
