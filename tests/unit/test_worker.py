"""The worker's loop, alone and with others: the real loop, session and local ring, on threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edl import config
from edl.config import values
from edl.contract.order import Layout, Part
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.errors import DataError
from tests.counting import AtOnce, CountingLearner, Positions
from trainer import control
from trainer.data import Batch, Batches
from trainer.ledger import Ledger, LedgerBroken
from trainer.refusals import NonFinite
from trainer.ring.base import RingBroken
from trainer.ring.local import Circle, LocalRing
from trainer.session.orders import End, FormRing
from trainer.session.state import Session
from trainer.telemetry import Telemetry
from trainer.worker import Worker

SIZE, EPOCHS, BATCH = 12, 2, 4
POSITIONS, STEPS = SIZE * EPOCHS, 6
CONFIG = config.parse(values.defaults())  # of which the loop needs only what it does with what is not finite


class Held(LocalRing):
    """After each sum it waits until the test lets it go on, or has set it free."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[control.Agreed] = []  # what they said
        self.held_at = 0  # the number of the sum, as the test knows
        self._came, self._may, self._free = threading.Semaphore(0), threading.Semaphore(0), False

    def reduce(self, vector: Any) -> Any:
        total = super().reduce(vector)
        self.sums.append(control.read(total[-control.LENGTH :]))
        self._came.release()
        assert self._free or self._may.acquire(timeout=10)
        return total

    def go_on(self) -> None:
        if self.held_at:
            self._may.release()

    def comes(self) -> None:
        """It has one more sum."""
        self.held_at += 1
        assert self._came.acquire(timeout=10), f"sum {self.held_at} does not come"

    def free(self) -> None:
        self._free = True
        self._may.release()


class A:
    """A worker, and what a test does in its master's place."""

    def __init__(
        self,
        number: int,
        learner: CountingLearner | None = None,
        config: config.Config = CONFIG,
        ring: LocalRing | None = None,
        batch: int = BATCH,
        source: Positions | None = None,
    ):
        self.said: list[pb.FromWorker] = []
        self.changed = threading.Condition()
        self.session = Session(number, self._send, threading.Event())
        self.ring = ring or LocalRing()
        self.session.cuts(self.ring.cut)
        self.learner = learner or CountingLearner(POSITIONS)
        self.learner.joins(self.ring)
        self.source = source or Positions(SIZE)
        batches = Batches(self.source, batch, reading=AtOnce())
        report = Telemetry(self.session, batches.steps, log=lambda line: None)
        export = lambda worth: self.session.say(finished=pb.Finished(model="model.keras"))  # noqa: E731
        self.worker = Worker(config, self.session, self.ring, self.learner, batches, report, export)
        self.ended: End | Exception | None = None
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _send(self, message: pb.FromWorker) -> None:
        with self.changed:
            self.said.append(message)
            self.changed.notify_all()

    def _train(self) -> None:
        try:
            self.ended = self.worker.train()
        except Exception as error:
            self.ended = error

    def says(self, what: str, generation: int) -> Any:
        """Wait until it has said that in that ring."""

        def found() -> list[Any]:
            ours = [m for m in self.said if m.WhichOneof("body") == what and m.generation == generation]
            return [getattr(m, what) for m in ours]

        with self.changed:
            assert self.changed.wait_for(found, 10), f"worker {self.session.worker} never said {what}"
            return found()[0]

    def hears(self, generation: int = 0, **what: object) -> None:
        self.session.hear(pb.ToWorker(generation=generation, **what))  # type: ignore[arg-type]

    def form(
        self, circle: Circle, generation: int, members: list[int], root: int = 0, *, sync: bool = True,
        epochs: int = EPOCHS, shares: tuple[int, ...] = (), block: int = 1, step: int = 0,
        joining: Sequence[int] = (), round: int = 0, turn: int = 0,
        distrusted: int = 0, distrust: str = "",
    ) -> None:  # fmt: skip
        self.ring.open(circle)
        layout = pb.Layout(records=SIZE, block=block, shards=1)
        even = [1] * len(members)
        order = pb.Form(
            members=members, root=root, sync=sync, epochs=epochs, shares=shares or even, layout=layout,
            step=step, joining=joining, round=round, turn=turn,
            distrusted=distrusted, distrust=distrust,
        )  # fmt: skip
        self.hears(generation, form=order)
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self) -> End | Exception | None:
        self.hears(stop=pb.Stop(why="done"))
        return self.joined()

    def joined(self) -> End | Exception | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.ended


def ring_of(*workers: A, generation: int = 1, **order: Any) -> None:
    """Form one of these, with the first as its root."""
    circle, members = Circle(len(workers)), [w.session.worker for w in workers]
    for w in workers:
        w.form(circle, generation, members, members[0], **order)


def come_to_sum(number: int, *workers: A) -> control.Agreed:
    """Let all of a ring go on until they have the sum of that number, counted from 1; what that one says."""
    rings = [w.ring for w in workers]
    while rings[0].held_at < number:
        for ring in rings:
            ring.go_on()
        for ring in rings:
            ring.comes()
    said = [str(ring.sums[-1]) for ring in rings]  # as text: no records have a loss that is not a number
    assert len(set(said)) == 1
    return rings[0].sums[-1]


def test_two_workers_train_all_steps_and_leave_together_with_one_state() -> None:
    pair = [A(0), A(1)]
    ring_of(*pair)
    outs = [w.says("left_ring", 1) for w in pair]
    assert [(o.step, o.has_state, o.broken) for o in outs] == [(STEPS, True, "")] * 2
    assert outs[0].digest == outs[1].digest != ""
    for w in pair:
        assert (w.learner.weights == 1).all()
        assert w.learner.updates == STEPS
        assert w.stop() == End("done")


def test_after_the_last_step_one_more_sum_without_records_makes_it_safe() -> None:
    w = A(0, ring=Held())
    ring_of(w)
    for number in range(1, STEPS + 1):
        assert come_to_sum(number, w).records == BATCH
    assert come_to_sum(STEPS + 1, w).records == 0
    assert (w.worker.step, w.learner.updates) == (STEPS, STEPS), (
        "it has the last step while it sums once more"
    )
    w.ring.free()
    assert w.says("left_ring", 1).digest
    assert len(w.ring.sums) == STEPS + 1
    w.stop()


class Parts(CountingLearner):
    """Keeps which records it was given, step by step."""

    def __init__(self) -> None:
        super().__init__(POSITIONS)
        self.given: dict[int, list[int]] = {}

    def sums(self, batch: Batch | None, contribution: np.ndarray, step: int, *others: int) -> control.Sums:
        if batch is not None:
            self.given[step] = batch.x.tolist()
        return super().sums(batch, contribution, step, *others)


@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (1, 20), (1, 0), (1, 1, 1), (5, 20, 10)])
def test_the_parts_of_all_ranks_are_the_whole_step(shares: tuple[int, ...]) -> None:
    learners = [Parts() for _ in shares]
    workers = [A(i, learner, batch=5) for i, learner in enumerate(learners)]
    ring_of(*workers, shares=shares)
    assert [w.says("left_ring", 1).step for w in workers] == [STEPS] * len(shares)
    for step, (start, stop) in enumerate([(0, 5), (5, 10), (10, 12), (12, 17), (17, 22), (22, 24)]):
        parts = [learner.given.get(step, []) for learner in learners]
        assert [record for part in parts for record in part] == list(range(start, stop)), (
            "each record once, by one rank"
        )
        cuts = [Part(rank, shares).of(stop - start) for rank in range(len(shares))]
        assert [len(part) for part in parts] == [b - a for a, b in cuts]
    for w in workers:
        assert (w.learner.weights == 1).all()
        w.stop()


def test_a_worker_reads_as_the_order_says_that_the_records_lie() -> None:
    w = A(0)
    ring_of(w, block=3)
    w.says("left_ring", 1)
    assert w.source.layout == Layout(SIZE, 3, 1)
    w.stop()


class Read(Positions):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.asked: list[tuple[int, int, Part]] = []

    def batch(self, start: int, stop: int, part: Part) -> Batch | None:
        self.asked.append((start, stop, part))
        return super().batch(start, stop, part)


class Watched(Held):
    """Knows what had been read when it was last formed."""

    def __init__(self, source: Read) -> None:
        super().__init__()
        self._source = source
        self.read: list[tuple[int, int, Part]] = []

    def form(self, rank: int, size: int) -> None:
        self.read = list(self._source.asked)
        super().form(rank, size)


def test_the_records_of_the_next_step_are_read_while_the_next_ring_is_formed() -> None:
    source = Read()
    ring = Watched(source)
    pair = [A(0, ring=ring, source=source), A(1, ring=Held())]
    ring_of(*pair)
    assert not ring.read, "who has no state yet does not know which step is next"
    come_to_sum(2, *pair)
    pair[1].ring.cut()
    for w in pair:
        w.ring.free()
    step = pair[0].says("left_ring", 1).step
    ring_of(pair[0], generation=2, sync=False, step=step)
    assert pair[0].says("left_ring", 2).step == STEPS
    assert ring.read[-1] == (step * BATCH, (step + 1) * BATCH, Part(0, (1,)))
    assert source.asked.count(ring.read[-1]) == 1, "and not once more"
    assert (pair[0].learner.weights == 1).all()
    for w in pair:
        w.stop()


# --- the task


def held_pair(**order: Any) -> list[A]:
    pair = [A(number, CountingLearner(3 * SIZE), ring=Held()) for number in (0, 1)]
    ring_of(*pair, **order)
    return pair


def end_of(pair: list[A]) -> tuple[int, int]:
    """The step at which they have left the ring, and after how many sums."""
    for w in pair:
        w.ring.free()
    (step,) = {w.says("left_ring", 1).step for w in pair}
    (sums,) = {len(w.ring.sums) for w in pair}
    assert len({w.says("left_ring", 1).digest for w in pair}) == 1
    for w in pair:
        assert w.learner.weights.tolist() == [1] * step * BATCH + [0] * (3 * SIZE - step * BATCH)
        w.stop()
    return step, sums


def test_a_change_of_the_task_is_taken_up_at_the_step_at_which_all_know_of_it() -> None:
    pair = held_pair()
    come_to_sum(1, *pair)
    pair[0].hears(1, train=pb.Train(epochs=3))
    for number in (2, 3):
        assert come_to_sum(number, *pair).changes == 1
    pair[1].hears(1, train=pb.Train(epochs=3))
    assert come_to_sum(4, *pair).changes == 2
    assert [w.worker.epochs for w in pair] == [2, 2], "one of two knew: nothing has changed"
    assert come_to_sum(5, *pair).changes == 0
    assert [w.worker.epochs for w in pair] == [3, 3]
    assert end_of(pair) == (9, 10)


def test_two_changes_are_taken_up_one_after_the_other() -> None:
    pair = held_pair()
    come_to_sum(1, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=1))
    pair[0].hears(1, train=pb.Train(epochs=3))
    come_to_sum(3, *pair)
    assert [w.worker.epochs for w in pair] == [1, 1]
    pair[1].hears(1, train=pb.Train(epochs=3))
    assert end_of(pair) == (9, 11), "the ring hears it with the sum that would have been its last"


def test_fewer_epochs_let_the_epoch_that_has_begun_be_trained_to_its_end() -> None:
    pair = held_pair(epochs=3)
    come_to_sum(4, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=1))
    assert end_of(pair) == (6, 7)


def test_fewer_epochs_told_with_the_last_step_of_one_end_the_training_there() -> None:
    pair = held_pair(epochs=3)
    come_to_sum(2, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=1))  # it rides with the third sum
    assert end_of(pair) == (3, 4)


def test_more_epochs_that_all_know_of_in_the_closing_sum_keep_the_ring_together() -> None:
    pair = held_pair(epochs=1)
    come_to_sum(3, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=2))
    closing = come_to_sum(4, *pair)
    assert (closing.records, closing.changes) == (0, 2)
    assert come_to_sum(5, *pair).records == BATCH
    assert end_of(pair) == (6, 8)


def test_more_epochs_that_come_too_late_for_one_are_the_next_rings() -> None:
    pair = held_pair(epochs=1)
    come_to_sum(3, *pair)
    pair[0].hears(1, train=pb.Train(epochs=2))
    assert come_to_sum(4, *pair).changes == 1
    for w in pair:
        w.ring.free()
        assert w.says("left_ring", 1).step == 3
    ring_of(*pair, generation=2, epochs=2, sync=False)
    for w in pair:
        assert w.says("left_ring", 2).step == 6
        assert w.session.task is None, "what the ring before was told is in the order"
        w.stop()


def test_a_change_does_not_hinder_leaving() -> None:
    pair = held_pair()
    come_to_sum(1, *pair)
    pair[0].hears(1, leave=pb.Leave())
    for w in pair:
        w.hears(1, train=pb.Train(epochs=3))
        w.ring.free()
    outs = [w.says("left_ring", 1) for w in pair]
    assert [(o.step, o.digest, o.broken) for o in outs] == [(2, "", "")] * 2
    for w in pair:
        w.stop()


# --- what is not so


def test_ranks_at_different_steps_change_nothing_any_more() -> None:
    pair = [A(0), A(1)]
    pair[1].worker.step, pair[1].worker.ledger = 1, Ledger(1)
    ring_of(*pair, sync=False)
    for w, step in zip(pair, (0, 1), strict=True):
        assert isinstance(w.joined(), LedgerBroken)
        assert str(w.ended) == f"the ranks take different steps (this one step {step + 1})"
        assert w.worker.step == step
        assert not w.learner.weights.any()


class Lies(CountingLearner):
    def gradients(self, *arguments: Any) -> np.ndarray:
        vector = super().gradients(*arguments)
        vector[POSITIONS + control.RECORDS] -= 1
        return vector


def test_a_step_that_lacks_a_record_is_not_taken_by_anybody() -> None:
    pair = [A(0), A(1, Lies(POSITIONS))]
    ring_of(*pair)
    for w in pair:
        assert isinstance(w.joined(), LedgerBroken)
        assert str(w.ended) == "step 1 has 3 records of 2 ranks, expected 4"
        assert w.worker.step == 0
        assert not w.learner.weights.any()


# --- orders, state and what breaks


def test_a_worker_exports_when_it_is_ordered_to() -> None:
    w = A(0)
    w.hears(export=pb.Export())
    w.thread.start()
    assert w.says("finished", 0).model == "model.keras"
    assert w.stop() == End("done")


def test_a_newcomer_takes_the_state_and_the_root_keeps_it() -> None:
    old, new = A(0, ring=Held()), A(1)
    ring_of(old)
    come_to_sum(2, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 3
    circle = Circle(2)
    new.form(circle, 2, [1, 0])
    old.form(circle, 2, [1, 0])
    assert new.says("joined_ring", 2).step == 3
    outs = [w.says("left_ring", 2) for w in (old, new)]
    assert [o.step for o in outs] == [STEPS] * 2
    assert outs[0].digest == outs[1].digest != ""
    assert new.worker.holds_state
    assert (new.learner.weights == 1).all()
    old.stop()
    new.stop()


class Later(LocalRing):
    """The state that it takes arrives when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: Any = None
        self.may_come = threading.Event()

    def take(self, giver: int, prepare: Any, passes_on: bool = False) -> Any:
        self.coming = super().take(giver, prepare, passes_on)
        return self

    @property
    def here(self) -> bool:
        return self.may_come.is_set()

    def state(self) -> Any:
        assert self.may_come.wait(10)
        return self.coming.state()


class Both(Held, Later):
    """Sums and states come one by one."""

    def __init__(self) -> None:
        Held.__init__(self)
        self.coming, self.may_come = None, threading.Event()


def joining_at_step_2(ring: LocalRing | None = None) -> tuple[A, A]:
    """A worker that has two steps, and one that has entered its ring without them."""
    old, new = A(0, ring=Held()), A(1, ring=ring or Both())
    ring_of(old)
    come_to_sum(1, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 2
    old.ring = old.worker.ring = Held()
    old.session.cuts(old.ring.cut)
    old.learner.joins(old.ring)
    ring_of(old, new, generation=2, sync=False, step=2, joining=[1])
    return old, new


def test_who_joins_takes_part_with_weight_zero_until_the_state_has_come_and_what_it_kept_is_applied() -> None:
    old, new = joining_at_step_2()
    assert [come_to_sum(n, old, new).holders for n in (1, 2, 3)] == [1, 1, 1]
    assert not new.learner.weights.any() and new.worker.step == 4
    assert old.says("joined_ring", 2).step == 2
    new.ring.may_come.set()
    assert [come_to_sum(n, old, new).holders for n in (4, 5)] == [1, 2], "two steps are applied in one's time"
    assert new.says("joined_ring", 2).step == new.worker.ledger.step == STEPS
    old.ring.free()
    new.ring.free()
    outs = [w.says("left_ring", 2) for w in (old, new)]
    assert [(o.step, o.has_state) for o in outs] == [(STEPS, True)] * 2
    assert outs[0].digest == outs[1].digest != ""
    assert (new.learner.weights == 1).all() and new.learner.updates == STEPS
    for w in (old, new):
        w.stop()


class Noted(LocalRing):
    """Who gives a state, and who takes it from whom, and passes it on, by rank."""

    def __init__(self, given: list[tuple[int, int, bool]], rank: int):
        super().__init__()
        self.given, self.rank = given, rank

    def give(self, parts: Any) -> None:
        self.given.append((self.rank, self.rank, True))

    def take(self, giver: int, prepare: Any, passes_on: bool = False) -> Any:
        self.given.append((self.rank, giver, passes_on))
        return self


def test_each_gives_the_state_to_one_however_many_join() -> None:
    given: list[tuple[int, int, bool]] = []
    members, joining = (3, 4, 0, 1, 2, 5), (0, 1, 2, 5)
    form = FormRing(2, members, 3, False, EPOCHS, (1,) * 6, Layout(SIZE), step=2, joining=joining)
    for rank, number in enumerate(members):
        A(number, ring=Noted(given, rank)).worker.take_part(form, rank)
    #                 who has it               two from those          and two from these
    assert given == [(0, 0, True), (1, 1, True), (2, 0, True), (3, 1, True), (4, 2, False), (5, 3, False)]


def test_a_ring_that_breaks_while_the_state_travels_leaves_nothing_of_it() -> None:
    old, new = joining_at_step_2()
    come_to_sum(2, old, new)
    old.hears(2, cut=pb.Cut())
    for w in (old, new):
        w.ring.free()
    out = new.says("left_ring", 2)
    assert (out.step, out.has_state) == (0, False)
    assert not new.learner.weights.any() and not new.worker.kept
    assert old.says("left_ring", 2).step >= 3
    for w in (old, new):
        w.stop()


def test_a_state_that_has_come_is_one_even_if_the_ring_is_left_before_the_rest_is_applied() -> None:
    old, new = joining_at_step_2()
    come_to_sum(4, old, new)
    new.ring.may_come.set()  # it loads the state of step 2, and applies two of the four steps since
    for w in (old, new):
        w.ring.free()
    out = new.says("left_ring", 2)
    assert (out.has_state, out.step, old.says("left_ring", 2).step) == (True, 4, STEPS)
    applied = new.worker.steps.begins_at(4)
    assert new.learner.weights.tolist() == [1] * applied + [0] * (POSITIONS - applied)
    for w in (old, new):
        w.stop()


def test_who_cannot_apply_sums_later_has_the_others_wait_for_its_state() -> None:
    ring = Later()
    ring.may_come.set()
    old, new = A(0), A(1, ring=ring)
    new.learner.follows = False
    old.learner.weights[:8], old.worker.ledger, old.worker.step = 1, Ledger(2), 2
    ring_of(old, new, sync=False, step=2, joining=[1])
    assert new.says("joined_ring", 1).step == 2
    assert [w.says("left_ring", 1).step for w in (old, new)] == [STEPS] * 2
    assert (new.learner.weights == 1).all()
    for w in (old, new):
        w.stop()


class Broken(LocalRing):
    """Breaks at its `at`-th broadcast or sum."""

    def __init__(self, at: int, verb: str):
        super().__init__()
        self.left, self.verb = at, verb

    def _fails(self, verb: str) -> None:
        self.left -= verb == self.verb
        if self.left < 0:
            raise RingBroken("a peer has died")

    def reduce(self, vector: Any) -> Any:
        self._fails("reduce")
        return super().reduce(vector)

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        self._fails("broadcast")
        return super().broadcast(data, root)


@pytest.mark.parametrize("broadcasts", [0, 1, 2])
def test_a_state_that_has_not_come_whole_is_not_taken(broadcasts: int) -> None:
    old, new = A(0), A(1, ring=Broken(broadcasts, "broadcast"))
    old.learner.weights[:4], old.worker.ledger = 1, Ledger(2, RangeSet(((1, 2),)))
    ring_of(old, new)
    out = new.says("left_ring", 1)
    assert (out.step, out.has_state, list(out.skipped)) == (0, False, [])
    assert out.broken == "a peer has died"
    assert "rank 1 has cut the ring" in old.says("left_ring", 1).broken
    assert not new.learner.weights.any()


class Older(LocalRing):
    """Takes over states as another version sends them."""

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        data = super().broadcast(data, root)
        if b"skipped" not in data.tobytes():
            return data
        older = data.copy()
        older[:8] = np.array([1], np.int64).view(np.uint8)
        return older


def test_a_state_of_another_version_is_refused_in_words() -> None:
    old, new = A(0), A(1, ring=Older())
    ring_of(old, new)
    new.thread.join(10)
    assert isinstance(new.ended, LedgerBroken)
    assert "the state to take over has version 1, expected 5" in str(new.ended)
    assert not new.worker.holds_state


def test_a_sum_that_has_not_come_back_has_not_happened_and_its_step_is_trained_again() -> None:
    w = A(0, ring=Broken(1, "reduce"))
    ring_of(w)
    out = w.says("left_ring", 1)
    assert (out.step, out.broken, w.learner.updates) == (1, "a peer has died", 1)
    w.ring.left = 10**6
    ring_of(w, generation=2)
    assert w.says("stepped", 2).redone_records == 4
    assert w.says("left_ring", 2).step == STEPS
    assert (w.learner.weights == 1).all()
    w.stop()


def test_a_ring_that_was_cut_before_it_is_entered_is_left_at_once() -> None:
    w = A(0)
    w.hears(1, cut=pb.Cut())
    w.form(Circle(2), 1, [0, 1])
    assert w.says("left_ring", 1).broken == "the ring was cut before it was formed"
    w.session.end("given up")
    w.thread.join(10)
    assert w.ended == End("given up", lost=True)


class Alone(Held):
    """As Horovod's ring of one: it makes no sum that could break."""

    def cut(self) -> None:
        pass


@pytest.mark.parametrize("why", ["ended", "stopped", "cut"])
def test_a_ring_of_one_ends_as_well_when_it_is_cut(why: str) -> None:
    ring = Alone()
    only = A(0, ring=ring)
    ring_of(only)
    ring.comes()
    if why == "ended":  # the master is gone
        only.session.end("gone")
    elif why == "stopped":
        only.hears(stop=pb.Stop(why="the end"))
    else:
        only.hears(1, cut=pb.Cut())
    ring.free()
    assert only.says("left_ring", 1).broken == "the ring was cut"
    if why == "cut":
        only.session.end("gone")
    only.thread.join(10)
    assert isinstance(only.ended, End) and only.ended.lost == (why != "stopped")
    assert len(ring.sums) == 1, "no step more"


class Infinite(CountingLearner):
    def gradients(self, *arguments: Any) -> np.ndarray:
        vector = super().gradients(*arguments)
        vector[POSITIONS + control.NONFINITE] = 1
        return vector


def by_policy(policy: str) -> config.Config:
    training = CONFIG.training.model_copy(update={"non_finite": policy})
    return CONFIG.model_copy(update={"training": training})


def test_what_is_not_finite_changes_nothing_and_ends_the_worker() -> None:
    w = A(0, Infinite(POSITIONS), by_policy("stop"))
    ring_of(w)
    assert isinstance(w.joined(), NonFinite)
    assert str(w.ended).endswith("at step 1, on worker 0, in the records 0, 1, 2, 3")
    assert w.worker.step == 0
    assert not w.learner.weights.any()


def test_what_is_not_finite_at_another_worker_breaks_the_ring() -> None:
    well, ill = A(0, config=by_policy("stop")), A(1, Infinite(POSITIONS), by_policy("stop"))
    ring_of(well, ill)
    assert well.says("left_ring", 1).broken == "the loss or a gradient of another worker is not finite"
    assert isinstance(ill.joined(), NonFinite)
    assert str(ill.ended).endswith("on worker 1, in the records 2, 3")
    assert not well.learner.weights.any()
    well.stop()


def test_what_is_not_finite_is_skipped_and_the_steps_are_named() -> None:
    w = A(0, Infinite(POSITIONS), by_policy("skip"))
    ring_of(w)
    out = w.says("left_ring", 1)
    assert out.step == STEPS
    assert [(r.start, r.stop) for r in out.skipped] == [(0, STEPS)]
    assert not w.learner.weights.any()
    w.stop()


def allowing(bad: int) -> config.Config:
    return CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"max_bad_records": bad})})


def with_bad(number: int, bad: tuple[int, ...], allowed: int, ring: LocalRing | None = None) -> A:
    w = A(number, config=allowing(allowed), ring=ring)
    w.source.bad = bad
    return w


def test_bad_records_are_left_out_of_their_steps_and_all_know_how_many() -> None:
    bad = (1, 8, 9, 10, 11)  # the last four are all of a step
    pair = [with_bad(i, bad, allowed=5) for i in range(2)]
    ring_of(*pair)
    for w in pair:
        out = w.says("left_ring", 1)
        assert (out.step, {b.epoch: b.records for b in out.bad}) == (STEPS, {0: 5, 1: 5})
        assert np.flatnonzero(w.learner.weights == 0).tolist() == [*bad, *(SIZE + b for b in bad)]
        assert w.learner.updates == STEPS - 2, "a step without records changes nothing"
    said = [(m.bad_records.epoch, r.index) for w in pair for m in w.said if m.HasField("bad_records")
            for r in m.bad_records.records]  # fmt: skip
    assert sorted(said) == [(epoch, b) for epoch in range(2) for b in bad]
    for w in pair:
        w.stop()


def test_one_bad_record_too_many_ends_the_job_and_changes_nothing() -> None:
    finder, other = with_bad(0, (4, 8), allowed=1), with_bad(1, (4, 8), allowed=1)
    ring_of(finder, other)
    assert other.says("left_ring", 1).broken == (
        "another worker has found more bad records than data.maxBadRecords allows"
    )
    assert isinstance(finder.joined(), DataError)
    assert str(finder.ended) == (
        "record 8 is bad: it is bad. With it, 2 records of epoch 1 are; data.maxBadRecords is 1"
    )
    assert (other.worker.ledger.step, other.worker.ledger.bad) == (2, {0: 1})
    other.stop()


def test_a_newcomer_takes_over_how_many_records_were_left_out() -> None:
    old, new = with_bad(0, (1,), allowed=1, ring=Held()), with_bad(1, (1,), allowed=1)
    ring_of(old)
    come_to_sum(2, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 3
    ring_of(old, new, generation=2)
    for w in (old, new):
        out = w.says("left_ring", 2)
        assert (out.step, {b.epoch: b.records for b in out.bad}) == (STEPS, {0: 1, 1: 1})
        w.stop()


def test_orders_come_in_turn_and_a_task_is_that_of_its_ring() -> None:
    session = A(3).session
    layout = pb.Layout(records=12, block=3, shards=2)
    form = pb.Form(members=[3, 5], root=5, sync=True, epochs=2, shares=[1, 2], layout=layout)
    session.hear(pb.ToWorker(generation=4, form=form))
    session.hear(pb.ToWorker(generation=3, train=pb.Train(epochs=9)))
    assert session.task is None, "it is for a ring that is no more"
    for epochs in (6, 7):
        session.hear(pb.ToWorker(generation=4, train=pb.Train(epochs=epochs)))
    assert session.next_order() == FormRing(4, (3, 5), 5, True, 2, (1, 2), Layout(12, 3, 2))
    session.hear(pb.ToWorker(export=pb.Export()))
    session.hear(pb.ToWorker(stop=pb.Stop(why="enough")))
    assert session.next_order() == End("enough"), "nothing else is wanted any more"
    assert [session.take_task(), session.task, session.take_task(), session.task] == [6, 7, 7, None]
    session.hear(pb.ToWorker(generation=4, train=pb.Train(epochs=8)))
    session.hear(pb.ToWorker(generation=5, form=form))
    assert session.task is None, "the order to form a ring says all"


def test_who_can_keep_no_more_has_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.worker.KEPT", 0)
    old, new = joining_at_step_2()
    for w in (old, new):
        w.ring.free()
    assert not old.thread.join(0.5) and not [
        m for m in old.said if m.HasField("left_ring") and m.generation == 2
    ]
    new.ring.may_come.set()
    assert [w.says("left_ring", 2).step for w in (old, new)] == [STEPS] * 2
    assert (new.learner.weights == 1).all()
    for w in (old, new):
        w.stop()
