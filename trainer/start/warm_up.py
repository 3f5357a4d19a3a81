# SPDX-License-Identifier: Apache-2.0
"""The warm-up of a worker: a ring of one, in which everything is traced and run before others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from edl.config import Config
from edl.contract.layout import Layout, StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.parts.part import LoopPart
from edl.trainer.parts.ring_steps import RingSteps
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.records.records import Records
from edl.trainer.ring.base import Ring, RingBroken, RingSlot
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State
from edl.trainer.step.interfaces import Learner, SampleLoss
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.sample_loss import sample_loss
from edl.trainer.worker import Worker

SAMPLE_RECORDS = 2  # to warm up with


class Sample:
    """The first few records, as the only batch of a job."""

    def __init__(self, records: Records):
        self._records = records
        self._first = records.first(SAMPLE_RECORDS)
        self.layout = Layout(len(self._first))

    def lay_out(self, layout: Layout) -> None:
        """Accept only the layout of the sample itself."""
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch:
        """Return a batch of the first records."""
        return self._records.batch_at(self._first[start:stop])

    def whole(self) -> Batch:
        """Return all first records as one batch."""
        return self._records.batch_at(self._first)


def warm_up(
    config: Config, ring: Ring, learner: KerasLearner | OwnStepLearner, records: Records
) -> SampleLoss | None:
    """Run a whole job of the real loop in a ring of one: a step with records, and one without.

    It changes the model's state.

    Returns:
        The sample loss of the model (trainer/step/sample_loss.py).

    Raises:
        RingBroken: the master has ended this worker meanwhile.
    """
    # A loss that is not finite is to be found in training, where the model is the job's.
    forgiving = config.training.model_copy(update={"on_non_finite": "skip"})
    config = config.model_copy(update={"training": forgiving})
    sample = Sample(records)
    sampled = _Sampled(sample, learner)
    run_alone(config, ring, learner, Batches(sample, SAMPLE_RECORDS), epochs=1, parts=[sampled])
    return sampled.loss


def run_alone(
    config: Config,
    ring: Ring,
    learner: Learner,
    batches: Batches,
    epochs: int,
    parts: Sequence[LoopPart] = (),
) -> None:
    """Run a job of the real loop in a ring of one, without a master.

    Raises:
        RingBroken: the master has ended this worker meanwhile.
    """
    said: list[pb.FromWorker] = []
    alone = Session(0, said.append, Event())
    report = Telemetry(alone, batches.steps, log=lambda line: None)
    state = State(learner, batches.steps)
    steps = RingSteps(config, alone, state, batches, report)
    worker = Worker(alone, ring, state, report, steps, parts=parts)
    me = (alone.worker,)
    worker.run_ring(FormRing(0, me, 0, sync=True, epochs=epochs, shares=(1,), layout=batches.layout))
    if broken := said[-1].left_ring.broken:
        raise RingBroken(broken)


class _Sampled(LoopPart):
    """Computes the sample loss of the model when its ring is up, before the first step."""

    def __init__(self, sample: Sample, learner: KerasLearner | OwnStepLearner):
        self._sample, self._learner = sample, learner
        self.loss: SampleLoss | None = None

    def ring_up(self, here: RingSlot) -> None:
        self.loss = sample_loss(self._learner, self._sample.whole)
