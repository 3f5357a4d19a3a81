# SPDX-License-Identifier: Apache-2.0
"""Callbacks in the worker's loop: one rank calls them, and all have what comes of it, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from edl.contract.ids import WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.reasons import Reason
from edl.errors import UserCodeError
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.trainer.agreement.epochs import CallbackUpdate, Epochs
from edl.trainer.parts.callbacks import CallbackCalls
from tests.support.jobs.checkpoint_writers import Writer, write
from tests.support.jobs.stories import Story, of, only
from tests.support.jobs.workers import (
    BATCH,
    EPOCHS,
    SIZE,
    STEPS,
    A,
    Broken,
    come_to_sum,
    joining_at_step_2,
    ring_of,
)

PER_EPOCH = SIZE // BATCH


class Calls:
    """In the place of callbacks: they remember after which epochs they were called, and count in a weight.

    Args:
        stops: with so many epochs it stops the training.
        fails: after so many it raises.
    """

    def __init__(self, worker: A, stops: int = -1, fails: int = -1):
        self.worker, self.stops, self.fails = worker, stops, fails
        self.after: list[int] = []
        loop = worker.worker
        loop.parts.append(CallbackCalls(self, loop.state, loop.ring, loop.report))

    def run(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> CallbackUpdate:
        self.after.append(whole)
        self.facts = facts
        if whole == self.fails:
            raise UserCodeError("callback Mine: on_epoch_end() of epoch 1 raised ValueError: no")
        state = self.worker.learner.state().view(np.int16).copy()
        state[-2] += 100
        after = replace(epochs, ended=whole, begun=whole + 1, memory=epochs.memory + b"%d" % whole)
        if whole == self.stops:
            after = replace(after, stop=whole, stopped_by="Mine", stop_of=task)
        return CallbackUpdate(after, {0: state.view(np.uint8)})


def epochs_of(worker: A) -> Epochs:
    return worker.worker.state.ledger.epochs


def done(*workers: A, generation: int = 1) -> list[pb.LeftRing]:
    """How they leave the ring; each has the same."""
    outs = [w.says("left_ring", generation) for w in workers]
    assert len({w.learner.digest() for w in workers}) == 1
    assert len({epochs_of(w).pack() for w in workers}) == 1
    for w in workers:
        w.stop()
    return outs


def test_one_calls_them_before_each_epoch_and_all_have_what_they_remember_and_change() -> None:
    pair = [A(0), A(1)]
    calls = [Calls(w) for w in pair]
    ring_of(*pair)
    assert [(o.step, o.callbacks_done, o.stop) for o in done(*pair)] == [(STEPS, 0, 0)] * 2
    assert [c.after for c in calls] == [[0, 1], []]
    assert calls[0].facts.keys() == {"ring_size", "ring_changes", "stall_seconds", "goodput"}
    assert (calls[0].facts["ring_size"], calls[0].facts["ring_changes"]) == (2.0, 0.0)
    assert epochs_of(pair[1]).memory == b"01"
    assert epochs_of(pair[1]).history == ({"loss": 0.5},) * EPOCHS
    assert pair[1].learner.updates == STEPS + 200


def test_one_that_stops_the_training_ends_it_with_that_epoch_on_all_ranks() -> None:
    pair = [A(0), A(1)]
    for w in pair:
        Calls(w, stops=1)
    ring_of(*pair, epochs=9)
    outs = done(*pair)
    assert [(o.step, o.callbacks_done, o.stop, o.stopped_by) for o in outs] == [(PER_EPOCH, 1, 1, "Mine")] * 2
    assert outs[0].digest


def test_a_turn_that_breaks_on_its_way_has_not_happened_and_another_worker_calls_them_anew() -> None:
    for broadcasts in (4, 5):  # after those of the state and of the first turn: its length, and itself
        pair = [A(0, ring=Broken(broadcasts + 1, "broadcast")), A(1)]
        calls = [Calls(w) for w in pair]
        ring_of(*pair)
        outs = [w.says("left_ring", 1) for w in pair]
        assert [(o.step, o.callbacks_done, bool(o.broken)) for o in outs] == [(PER_EPOCH, 0, True)] * 2
        assert [epochs_of(w).memory for w in pair] == [b"0", b"0"]
        assert pair[0].learner.digest() == pair[1].learner.digest()
        ring_of(pair[1], generation=2, sync=False, step=PER_EPOCH)
        assert [(o.step, o.stop) for o in done(pair[1], generation=2)] == [(STEPS, 0)]
        assert [c.after for c in calls] == [[0, 1], [1]]
        assert epochs_of(pair[1]).memory == b"01"
        pair[0].stop()


def test_who_has_the_turn_already_does_not_have_it_again_in_the_next_ring() -> None:
    one = A(0, ring=Broken(PER_EPOCH, "reduce"))
    calls = Calls(one)
    ring_of(one)
    out = one.says("left_ring", 1)
    assert (out.step, out.callbacks_done) == (PER_EPOCH, 1), (
        "the first sum of the next epoch did not come back"
    )
    one.ring.left = 99
    ring_of(one, generation=2, sync=False, step=PER_EPOCH, callbacks_done=1)
    done(one, generation=2)
    assert calls.after == [0, 1]


def test_who_joins_keeps_a_turn_until_its_state_is_there() -> None:
    old, new = joining_at_step_2()
    calls = [Calls(w) for w in (old, new)]  # in time for the end of the epoch; the ring is held at step 2
    come_to_sum(2, old, new)
    assert [c.after for c in calls] == [[1], []]
    assert any(isinstance(kept, CallbackUpdate) for kept in new.worker.state.pending_updates)
    new.ring.may_come.set()
    for w in (old, new):
        w.ring.free()
    assert [o.has_state for o in done(old, new, generation=2)] == [True, True]


def test_one_that_raises_ends_the_job_in_its_words() -> None:
    pair = [A(0), A(1)]
    for w in pair:
        Calls(w, fails=1)
    ring_of(*pair)
    assert isinstance(pair[0].joined(), UserCodeError)
    pair[0].ring.cut()
    assert pair[1].says("left_ring", 1).broken
    pair[1].stop()


def test_a_checkpoint_has_what_they_remember_and_who_begins_from_it_goes_on_with_it(tmp_path: Path) -> None:
    pair = [Writer(0, tmp_path), Writer(1, tmp_path)]
    for w in pair:
        Calls(w)
    ring_of(*pair)
    write(pair, PER_EPOCH)
    for w in pair:
        w.ring.free()
    done(*pair)
    new = Writer(2, tmp_path)
    assert (found := new.checkpoints.restore(expected=PER_EPOCH)) is not None
    assert (found.step, found.callbacks_done, found.epochs.memory) == (PER_EPOCH, 0, b"0"), "before the turn"
    assert (found.epochs.history, found.epochs.ended) == (({"loss": 0.5},), 0)
    assert new.learner.updates == PER_EPOCH + 100


def test_the_end_of_the_last_epoch_is_told_by_who_saves_the_model() -> None:
    one = A(0)
    calls = Calls(one)
    ring_of(one)
    one.says("left_ring", 1)
    one.stop()
    for _ in range(2):  # the calls are made once
        for part in one.worker.parts:
            part.finish()
    assert calls.after == [0, 1, 2]


# --- the master


def test_the_master_hears_that_a_callback_has_stopped_the_training_and_has_the_model_saved() -> None:
    story = Story(2)
    story.tell(ev.Live(2, 1, False, 4))
    for w in (WorkerId(0), WorkerId(1)):
        story.tell(ev.Hello(w), ev.Ready(w, Layout(100)))
    story.up()
    ring, effects = story.job.ring.generation, []
    for w in (WorkerId(0), WorkerId(1)):
        out = ev.LeftRing(w, ring, 10, True, digest="d", callbacks_done=1, stop=1, stopped_by="EarlyStopping")
        effects += story.tell(out)
    assert only(effects, ef.Export).worker == 0
    (notice,) = [e for e in of(effects, ef.Notice) if e.reason is Reason.EpochsChanged]
    assert notice.text == "training.epochs 4 -> 1: EarlyStopping has stopped the training"
    story.tell(ev.Live(2, 1, False, 4))  # another value has changed; this is what it was
    assert story.job.epochs == 1
