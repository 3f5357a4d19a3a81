# SPDX-License-Identifier: Apache-2.0
"""What a worker reports of its steps: the progress of the training, and the cost of each ring change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from edl.contract.evaluation import Pass
from edl.contract.heartbeats import Staleness
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.formatting import measured
from edl.trainer.agreement.control import Agreed
from edl.trainer.agreement.epochs import Epochs
from edl.trainer.records.batches import BadRecord
from edl.trainer.runtime.log import log
from edl.trainer.session.state import EpochLoss, Progress, Session

LOG_SECONDS = 10.0
NEAR_SECONDS = 6.0  # before the last step: about the time in which a process imports TensorFlow
STALENESS_STEPS = 1000  # the last ones
STALENESS_SECONDS = 1.0  # between two looks at them
MEMORY = 0.9  # weight of the former pace, at each step


class Telemetry:
    """Turns steps into messages: sent at once where the master waits for them, else with the next heartbeat.

    Args:
        steps: the steps of the job.
        clock: returns monotonic time in seconds.
        log: receives a line about the training now and then.
        near_end: called once, when the last step is near, so that saving the model can be prepared.
        has_loss: whether the steps have a loss; a loop of the user's own may report none.
    """

    def __init__(
        self,
        session: Session,
        steps: Steps,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = log.info,
        near_end: Callable[[], None] | None = None,
        has_loss: bool = True,
    ):
        self._has_loss = has_loss
        self._session, self._clock, self._log, self._near_end = session, clock, log, near_end
        self._pace: float | None = None  # seconds from one step to the next
        self._records = 0  # trained by this worker in this ring
        self._steps = steps
        self._loss: EpochLoss | None = None
        self._ended: list[pb.EpochEnded] = []  # the reports of epochs whose last step is not safe yet
        self._seconds = 0.0  # computing these, without waiting for other ranks
        self._logged_at = clock() - LOG_SECONDS
        self._began_at: float | None = None  # when the step in progress began; None between steps
        self._stepped_at: float | None = None  # when the last step completed
        self._since: float | None = None  # when the first step began
        self._useful_seconds = 0.0  # in completed steps
        self._wasted_seconds = 0.0  # in failed steps, not reported yet
        self._missed: deque[int] = deque(maxlen=STALENESS_STEPS)  # updates, by the weights of each step
        self._repeated = 0
        self._staleness: Staleness | None = None
        self._looked_at = float("-inf")
        self._redone: int | None = None  # records of the ring change that is not reported yet
        self.ring_changes, self.stall_seconds = 0, 0.0  # after this worker's first step

    def ring_formed(self, joins: bool = False) -> None:
        """Measure the speed anew: parts and members have changed.

        Args:
            joins: the other members go on without this one, so its own pause is no stall of the ring.
        """
        self._records, self._seconds = 0, 0.0
        if joins:
            self._stepped_at = None

    def ring_up(self, redone: int) -> None:
        """All members have one state again.

        Args:
            redone: records of this worker that it has to train again.
        """
        self._redone = redone

    def rolled_back(self) -> None:
        """The ring has rolled back: results since then are dropped."""
        self._loss, self._ended = None, []

    def step_begins(self) -> None:
        """Start the clock of a step; of a stall, it is the end."""
        self._began_at = self._clock()
        self._since = self._began_at if self._since is None else self._since

    @property
    def goodput(self) -> float:
        """The share of the time since this worker's first step that was spent in completed steps."""
        spent = self._clock() - self._since if self._since is not None else 0.0
        return self._useful_seconds / spent if spent else 1.0

    def to_go(self, steps: int) -> None:
        """Note that this many steps are left."""
        if self._near_end is not None and self._pace is not None and steps * self._pace < NEAR_SECONDS:
            self._near_end()
            self._near_end = None

    def step_summed(self, waited: float) -> None:
        """Record that the sums of the step are complete.

        Args:
            waited: seconds that this rank has waited for the others, after its own contribution was ready.
        """
        if self._began_at is not None and self._records:  # the first step may have to warm up
            self._seconds += max(0.0, self._clock() - self._began_at - waited)

    def step_breaks(self) -> None:
        """The ring broke; a step in progress did not come back."""
        if self._began_at is not None:
            self._wasted_seconds += self._clock() - self._began_at
        self._began_at = None

    def step_done(self, generation: int, rank: int, step: int, trained: int, agreed: Agreed) -> None:
        """The step is in the model.

        Args:
            step: the number of steps in the model now.
            trained: the number of its records that were this worker's.
        """
        now = self._clock()
        if self._stepped_at is not None and self._records:
            took = now - self._stepped_at
            self._pace = took if self._pace is None else MEMORY * self._pace + (1 - MEMORY) * took
        self._comes_back(generation, rank, step, now)
        self._records += trained
        if self._has_loss and agreed.records and not agreed.nonfinite:
            epoch = self._steps.epoch(step - 1)
            before = self._loss if self._loss and self._loss.epoch == epoch else EpochLoss(epoch)
            self._loss = before.after(agreed.loss, agreed.records)
        loss = self._loss
        if loss is not None and now >= self._logged_at + LOG_SECONDS:
            self._logged_at = now
            self._log(
                f"generation {generation}, rank {rank}, step {step}: Loss {measured(loss.mean)} in this "
                f"epoch, {measured(loss.last)} in this step"
            )
        self._session.progress = Progress(generation, step, self._records, self._seconds, loss)

    def step_pushed(
        self,
        generation: int,
        rank: int,
        reached: int,
        step: int,
        trained: int,
        seconds: float,
        loss: float,
        records: int,
        missed: int = 0,
        repeated: int = 0,
    ) -> None:
        """A step that this worker has made alone is in the weights, which are on servers.

        Args:
            reached: all steps below it are in the weights.
            step: the step's number.
            trained: the number of its records.
            seconds: the time that it took to compute.
            loss, records: its mean loss, and over how many records.
            missed: the number of updates that its weights lacked.
            repeated: the number of steps of the job that were pushed again after they were applied.
        """
        now = self._clock()
        self._missed.append(missed)
        self._repeated = repeated
        if now >= self._looked_at + STALENESS_SECONDS:
            self._look_at_staleness(now)
        if self._stepped_at is not None and self._records:
            took = now - self._stepped_at
            self._pace = took if self._pace is None else MEMORY * self._pace + (1 - MEMORY) * took
        self._comes_back(generation, rank, reached, now)
        self._records += trained
        self._seconds += seconds
        epoch = self._steps.epoch(step)
        before = self._loss if self._loss and self._loss.epoch == epoch else EpochLoss(epoch)
        self._loss = before.after(loss, records) if records else before
        if now >= self._logged_at + LOG_SECONDS:
            self._logged_at = now
            self._log(f"step {step}: Loss {measured(loss)} in this step; all steps below {reached} are taken")
        self._session.progress = Progress(
            generation, reached, self._records, self._seconds, self._loss, staleness=self._staleness
        )

    def async_phase_done(self, repeated: int) -> Staleness | None:
        """All steps up to a boundary are applied: report at once how stale this worker's weights were.

        Returns:
            the report; None if this worker has made no step.
        """
        self._repeated = repeated
        if self._missed:
            self._look_at_staleness(self._clock())
            self._session.progress = replace(self._session.progress, staleness=self._staleness)
            self._session.beat()
        return self._staleness

    def _look_at_staleness(self, now: float) -> None:
        self._looked_at = now
        missed = self._missed
        self._staleness = Staleness(len(missed), float(median(missed)), max(missed), self._repeated)

    def boundary(self, generation: int, rank: int, step: int, epochs: Epochs, ended: int) -> None:
        """All workers have the weights of this step.

        Args:
            epochs: with the loss of the epoch in progress, or of the one that has just ended.
            ended: the number of whole epochs, if one has just ended; else 0.
        """
        self._comes_back(generation, rank, step, self._clock())
        if ended:
            if rank == 0:
                self._session.say(generation, epoch_ended=self._epoch(ended, epochs.last_loss))
            self._loss = None
        elif self._has_loss and epochs.records:
            last = self._loss.last if self._loss is not None else 0.0
            self._loss = EpochLoss(
                self._steps.epoch(step), epochs.records, epochs.loss / epochs.records, last
            )
        self._session.progress = Progress(generation, step, self._records, self._seconds, self._loss)

    def round_done(self, generation: int, rank: int, step: int, now: Pass, round: int) -> None:
        """Report a completed evaluation batch.

        Args:
            step: the number of steps in the model.
            round: the number of the next evaluation batch.
        """
        at = self._clock()
        self._comes_back(generation, rank, step, at)
        self._session.progress = Progress(generation, step, self._records, self._seconds, self._loss, round)
        if at >= self._logged_at + LOG_SECONDS:
            self._logged_at = at
            done = now.positions(round)[0]
            self._log(
                f"generation {generation}, rank {rank}, step {step}: Evaluation on {now.split!r}, "
                f"{min(done, now.records):,} of {now.records:,} records"
            )

    def _comes_back(self, generation: int, rank: int, step: int, now: float) -> None:
        """An all-reduce has completed: so the step before it is safe, and the ring works."""
        self._useful_seconds += now - self._began_at if self._began_at is not None else 0.0
        self._began_at = None
        for ended in self._ended if rank == 0 else ():
            self._session.say(generation, epoch_ended=ended)
        self._ended.clear()
        if self._redone is not None:
            self._report_ring_change(generation, step, now)
        self._stepped_at = now

    def left_out(self, generation: int, epoch: int, bad: Sequence[BadRecord]) -> None:
        """Report the bad records in this worker's part, which the last step has left out."""
        records = {record.index: record.why for record in bad}
        self._session.say(generation, bad_records=pb.BadRecords(epoch=epoch, records=records))

    def epoch_ends(
        self, epochs: int, loss: float | None, metrics: dict[str, float], sha256: str = ""
    ) -> None:
        """Record that the last step has completed this number of epochs.

        Args:
            loss: over the records of the last epoch, on all ranks; None if all were left out.
            metrics: the compiled metrics over them.
            sha256: of the state.
        """
        self._ended.append(self._epoch(epochs, loss, metrics))
        self._ended[-1].sha256 = sha256

    def _epoch(
        self, epochs: int, loss: float | None, metrics: dict[str, float] | None = None
    ) -> pb.EpochEnded:
        mean = pb.EpochLoss(epoch=epochs - 1, records=self._steps.records, mean=loss or 0.0)
        return pb.EpochEnded(epochs=epochs, loss=None if loss is None else mean, metrics=metrics or {})

    def ring_left(self, step: int) -> None:
        """Report the step without a speed: this worker does not train."""
        self._session.progress = Progress(step=step)

    def _report_ring_change(self, generation: int, step: int, now: float) -> None:
        """Report the cost of the ring change: its first step has come back."""
        stall = 0.0
        if self._stepped_at is not None:
            stall = now - self._stepped_at
            self.ring_changes, self.stall_seconds = self.ring_changes + 1, self.stall_seconds + stall
        stepped = pb.Stepped(
            step=step, stall_seconds=stall, redone_records=self._redone, wasted_seconds=self._wasted_seconds
        )
        self._redone, self._wasted_seconds = None, 0.0
        self._session.say(generation, stepped=stepped)
