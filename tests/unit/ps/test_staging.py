# SPDX-License-Identifier: Apache-2.0
"""Which calls count, in any order of their arrival: every step is applied once, with all of its gradients, or
not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.ps.errors import GenerationPending, Invalid, Misplaced, Refused, Stale
from edl.ps.phase import Phase
from edl.ps.sync.staging import Apply, Commit, Effect, Steps, TakeBack


def commit(step: int, skipped: bool = False, scale: float = 1.0) -> Commit:
    return Commit(step, skipped, scale, 0.1, step)


def settled(step: int = 0) -> Steps:
    return Steps(generation=1, step=step, phase=Phase.SERVING)


def test_a_step_is_applied_when_the_server_first_hears_of_it() -> None:
    steps = settled().stage(1, 0, 1, "b").stage(1, 0, 0, "a")
    after, effects = steps.advance_to(1, 1, commit(0))
    assert effects == (Apply(commit(0), ("a", "b")),), "in the order of the ranks"
    assert after.step == 1 and not after.staged
    assert after.advance_to(1, 1, commit(0)) == (after, ())
    assert after.start_generation(1, 0, None) == (after, ()), (
        "the generation is settled: late, and without effect"
    )


def test_the_same_gradients_again_change_nothing() -> None:
    steps = settled().stage(1, 0, 0, "a")
    assert steps.stage(1, 0, 0, "a") is steps
    after, _ = steps.advance_to(1, 1, commit(0))
    assert after.stage(1, 0, 0, "a") is after, "the step is in the rows"


def test_calls_of_an_earlier_generation_are_refused() -> None:
    steps, _ = settled().start_generation(3, 0, None)
    for call in (
        lambda: steps.stage(2, 0, 0, "a"),
        lambda: steps.advance_to(2, 0, None),
        lambda: steps.start_generation(2, 0, None),
        lambda: steps.restore(2, 0, ""),
    ):
        with pytest.raises(Stale, match="stale generation 2"):
            call()


def test_calls_of_a_later_generation_wait() -> None:
    with pytest.raises(GenerationPending):
        settled().stage(2, 0, 0, "a")
    with pytest.raises(GenerationPending):
        Steps().advance_to(1, 0, None)


def test_a_new_generation_drops_what_was_staged_for_a_step_that_did_not_happen() -> None:
    steps = settled().stage(1, 0, 0, "old")
    steps, effects = steps.start_generation(2, 0, None)
    assert effects == ()
    _, effects = steps.stage(2, 0, 0, "new").advance_to(2, 1, commit(0))
    assert effects == (Apply(commit(0), ("new",)),)


def test_a_new_generation_after_a_step_that_happened_applies_it() -> None:
    steps, effects = settled().stage(1, 0, 0, "a").start_generation(2, 1, commit(0))
    assert effects == (Apply(commit(0), ("a",)),) and steps.step == 1


def test_a_new_generation_before_a_step_that_happened_here_takes_it_back_once() -> None:
    after, _ = settled(4).stage(1, 4, 0, "a").advance_to(1, 5, commit(4))
    back, effects = after.start_generation(2, 4, commit(3))
    assert effects == (TakeBack(),) and back.step == 4
    again, effects = back.start_generation(3, 3, commit(2))
    assert effects == () and again.step == 4, "one step only: the ring has to go back to a checkpoint"


def test_a_server_without_its_log_applies_nothing_and_says_that_it_is_empty() -> None:
    steps, effects = Steps().start_generation(5, 1, commit(0))
    assert effects == () and not steps.phase.has_rows and steps.step == 0
    with pytest.raises(Misplaced, match="empty"):
        steps.advance_to(5, 1, commit(0))
    with pytest.raises(Misplaced, match="empty"):
        steps.stage(5, 0, 0, "a")
    assert steps.restore(5, 0, "").phase.has_rows


def test_going_back_happens_once_however_often_it_is_told() -> None:
    steps = settled(9).restore(2, 5, "a")
    assert (steps.step, steps.staged, steps.last) == (5, {}, None)
    on, _ = steps.stage(2, 5, 0, "x").advance_to(2, 6, commit(5))
    assert on.restore(2, 5, "a") is on, "late"
    assert on.restore(3, 5, "a").step == 5


def test_a_state_that_cannot_be_reached_is_refused_with_words() -> None:
    for step, last in ((3, commit(2)), (1, None), (8, commit(7))):
        with pytest.raises(Misplaced, match=f"step {step} .* at step 0"):
            settled().advance_to(1, step, last)
    with pytest.raises(Misplaced, match=r"step 1 .* at step 0"):
        settled().stage(1, 1, 0, "a")
    with pytest.raises(Invalid):
        settled().advance_to(1, 2, commit(0))
    with pytest.raises(Invalid):
        settled().stage(1, 0, -1, "a")


def test_workers_that_disagree_about_a_step_are_told() -> None:
    after, _ = settled().advance_to(1, 1, commit(0))
    with pytest.raises(Misplaced, match="disagree"):
        after.advance_to(1, 1, commit(0, scale=2.0))
    nan, _ = settled().advance_to(1, 1, commit(0, scale=float("nan")))
    assert nan.advance_to(1, 1, commit(0, scale=float("nan")))[1] == ()


# --- any order


@dataclass
class Ring:
    """A ring of up to three ranks and one server. Applied steps differ by (generation, step, rank).

    Calls may be lost, and any earlier one may come again at any time.
    """

    steps: Steps = field(default_factory=Steps)
    # What is in the rows: for each step, what was applied.
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    undo: list[tuple[Any, ...]] | None = None
    base: list[tuple[Any, ...]] = field(default_factory=list)  # of a checkpoint
    base_step: int = 0
    generation: int = 0
    step: int = 0
    last: Commit | None = None
    truth: list[tuple[Any, ...]] = field(default_factory=list)  # what the ring has done
    sent: list[tuple[Any, ...]] = field(default_factory=list)

    def do(self, call: str, *args: Any) -> None:
        """As the durable server does."""
        effects: Sequence[Effect] = ()
        if call == "stage":
            steps = self.steps.stage(*args)
        elif call == "restore":
            steps = self.steps.restore(*args)
            if steps is not self.steps:
                self.rows, self.undo = (list(self.base) if steps.step else []), None
        else:
            steps, effects = getattr(self.steps, call)(*args)
        for effect in effects:
            if isinstance(effect, Apply):
                assert self.steps.phase.has_rows
                self.undo = list(self.rows)
                self.rows.append(() if effect.commit.skipped else effect.staged)
            elif isinstance(effect, TakeBack):
                assert self.undo is not None
                self.rows, self.undo = self.undo, None
        self.steps = steps

    def send(self, call: str, *args: Any) -> None:
        self.sent.append((call, *args))
        self.do(call, *args)

    def again(self, which: int) -> None:
        """An earlier call comes once more."""
        if self.sent:
            call, *args = self.sent[which % len(self.sent)]
            with suppress(Refused):
                self.do(call, *args)

    def form(self, back: bool) -> None:
        """A new generation; `back`: the only member that had the last step has died."""
        self.generation += 1
        if back and self.truth and self.last is not None and self.step > self.base_step:
            self.step -= 1
            self.truth.pop()
            self.last = None
        self.send("start_generation", self.generation, self.step, self.last)
        if not self.steps.phase.has_rows or self.steps.step != self.step:
            self.step, self.truth, self.last = self.base_step, list(self.base), None
            self.send("restore", self.generation, self.step, "a" if self.step else "")

    def train(self, ranks: int, skipped: bool, hears: bool) -> None:
        self.send("advance_to", self.generation, self.step, self.last)
        staged: list[tuple[int, int, int]] = []
        for rank in reversed(range(ranks)):
            gradients = self.generation, self.step, rank
            self.send("stage", self.generation, self.step, rank, gradients)
            staged.insert(0, gradients)
        self.truth.append(() if skipped else tuple(staged))
        self.last = commit(self.step, skipped)
        self.step += 1
        if hears:
            self.send("advance_to", self.generation, self.step, self.last)

    def interrupted(self, ranks: int) -> None:
        """Some have staged, and the sums did not come back."""
        for rank in range(ranks):
            self.send("stage", self.generation, self.step, rank, (self.generation, self.step, rank, "lost"))

    def checkpoint(self) -> None:
        self.send("advance_to", self.generation, self.step, self.last)
        self.base, self.base_step = list(self.rows), self.step

    def lose(self) -> None:
        """The server dies, and its log is gone."""
        self.steps, self.rows, self.undo = Steps(), [], None
        self.form(back=False)


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 3), st.booleans(), st.booleans()),
    st.tuples(st.just("form"), st.booleans()),
    st.tuples(st.just("interrupt"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 10**6)),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("lose")),
)


@given(st.lists(ACTIONS, max_size=40))
def test_the_rows_are_those_of_the_rings_steps_whatever_is_lost_late_or_doubled(actions: list[Any]) -> None:
    ring = Ring()
    ring.form(back=False)
    for action, *args in actions:
        match action:
            case "train":
                ring.train(*args)
            case "form":
                ring.form(*args)
            case "interrupt":
                ring.send("advance_to", ring.generation, ring.step, ring.last)
                ring.interrupted(*args)
                ring.form(back=False)
            case "again":
                ring.again(*args)
            case "checkpoint":
                ring.checkpoint()
            case "lose":
                ring.lose()
    ring.send("advance_to", ring.generation, ring.step, ring.last)
    assert ring.rows == ring.truth
    assert ring.steps.step == ring.step == len(ring.rows)


@given(st.lists(ACTIONS, max_size=15))
def test_a_refused_call_changes_nothing(actions: list[Any]) -> None:
    ring = Ring()
    ring.form(back=False)
    for action, *args in actions:
        if action == "train":
            ring.train(*args)
        elif action == "form":
            ring.form(*args)
    before = replace(ring.steps)
    for call, *args in ring.sent:
        try:
            ring.do(call, *args)
        except Refused:
            assert ring.steps == before
        before = ring.steps
