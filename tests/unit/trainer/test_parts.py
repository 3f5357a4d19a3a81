# SPDX-License-Identifier: Apache-2.0
"""The parts beside the loop: at which moments the loop calls them, and what a broken ring means to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement.control import StepResult
from edl.trainer.agreement.ledger import RoundResult
from edl.trainer.agreement.metric_values import Value
from edl.trainer.parts.part import LoopPart
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import RingBroken, RingSlot
from edl.trainer.session.orders import Export, FormRing, WriteCheckpoint
from tests.support.jobs.workers import STEPS, A, ring_of


class Moments(LoopPart):
    """A part that records the moments at which the loop calls it, with the step of the state.

    Args:
        breaks_at: the step before which it breaks the ring.
    """

    def __init__(self, worker: A, breaks_at: int = -1):
        self.state, self.breaks_at = worker.worker.state, breaks_at
        self.seen: list[tuple[str, int]] = []
        worker.worker.parts.append(self)

    def at(self, moment: str) -> None:
        self.seen.append((moment, self.state.step))

    def carry_out(self, order: Export | WriteCheckpoint) -> None:
        self.at("carry_out")

    def entering(self, form: FormRing) -> None:
        self.at("entering")

    def before_sync(self, form: FormRing, restored: bool) -> str:
        self.at("before_sync")
        return ""

    def after_sync(self, form: FormRing) -> None:
        self.at("after_sync")

    def take(self, share: StepSlice, since: int) -> None:
        self.at("take")

    def joined(self, here: RingSlot, message: pb.JoinedRing) -> None:
        self.at("joined")

    def ring_up(self, here: RingSlot) -> None:
        self.at("ring_up")

    def between_steps(self, here: RingSlot, vote: Callable[[], np.ndarray]) -> None:
        self.at("between_steps")

    def vote(self, here: RingSlot, vector: np.ndarray) -> None:
        self.at("vote")

    def before_step(self, here: RingSlot, batch: Batch | None) -> None:
        self.at("before_step")
        if self.state.step == self.breaks_at:
            raise RingBroken("a server does not answer")

    def changed(self) -> None:
        self.at("changed")

    def after(
        self, here: RingSlot, result: StepResult | RoundResult, metrics: Mapping[str, Value] | None
    ) -> None:
        self.at("after")

    def leaving(self) -> None:
        self.at("leaving")


BEGIN = ["entering", "before_sync", "after_sync", "take", "joined", "ring_up"]
BEFORE, AFTER = ["between_steps", "before_step", "vote"], ["changed", "after"]


def test_a_part_is_called_at_each_moment_of_a_ring_in_order() -> None:
    w = A(0)
    part = Moments(w)
    ring_of(w)
    w.says("left_ring", 1)
    w.stop()
    begin, end = [(moment, 0) for moment in BEGIN], [*BEFORE, "after", "leaving"]
    steps = [call for k in range(STEPS) for call in [(m, k) for m in BEFORE] + [(m, k + 1) for m in AFTER]]
    assert part.seen == [*begin, *steps, *((moment, STEPS) for moment in end)], (
        "the last step has no records: it changes nothing"
    )


def test_an_order_for_one_worker_reaches_all_of_its_parts() -> None:
    w = A(0)
    parts = [Moments(w), Moments(w)]
    ring_of(w)
    w.says("left_ring", 1)
    w.hears(export=pb.Export())
    w.says("finished", 0)
    w.stop()
    assert [part.seen[-1] for part in parts] == [("carry_out", STEPS)] * 2


def test_a_step_that_breaks_changes_nothing_and_the_next_ring_makes_it() -> None:
    w = A(0)
    part = Moments(w, breaks_at=2)
    ring_of(w)
    out = w.says("left_ring", 1)
    assert (out.step, out.broken) == (2, "a server does not answer")
    assert part.seen[-2:] == [("before_step", 2), ("leaving", 2)]
    part.breaks_at = -1
    ring_of(w, generation=2, step=2, sync=False)
    assert w.says("left_ring", 2).step == STEPS
    w.stop()
    assert (w.learner.weights == 1).all(), "each record counts once"
