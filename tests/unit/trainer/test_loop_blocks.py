# SPDX-License-Identifier: Apache-2.0
"""An own loop with training.deterministic: the same bits in rings of any sizes, with edl.join's own rules."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edl.contract.layout import StepSlice
from edl.data import arrays
from edl.errors import DataError, ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.exact_sums import BLOCKS
from edl.trainer.model.loop_state import LoopState
from edl.trainer.records.batches import Batches
from edl.trainer.records.records import Records
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.runtime.watchdog import unwatched
from edl.trainer.step import loop_blocks
from edl.trainer.step.loop_blocks import BlockLoopLearner
from edl.trainer.step.loop_learner import Gradients
from edl.trainer.step.turns import Turn, Turns

X = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
BATCH = 19  # no multiple of BLOCKS


class Member:
    """A worker whose loop has a state of two arrays and draws a random number in each block."""

    def __init__(self, draw: Callable[[Turn], float]):
        self.draw = draw
        self.w, self.b = np.full(3, 0.5, np.float32), np.zeros([], np.float64)
        self.ring, self.turns, self.blocks = LocalRing(), Turns(), list[int]()
        records = Records(arrays(X), lambda x: (x, None), "x", unwatched, 7, shuffle=True)
        self.batches = Batches(records, BATCH, blocks=BLOCKS)
        state, sample = LoopState([self.w, self.b]), records.batch_at([*range(5)])
        self.learner = BlockLoopLearner(state, self.ring.reduce, self.turns, sample, 7)
        self.learner.learn(Gradients([self.w, self.b], True, ["noise"]))
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            self.loop()
        except Exception as error:
            self.turns.leave(repr(error))  # the learner raises it

    def loop(self) -> None:
        while (turn := self.turns.next()) is not None:
            (x,), noise = turn.records, self.draw(turn)
            errors = np.tanh(x @ self.w + np.float32(self.b)) - x.sum(axis=1) * np.float32(0.7)
            gradients = [(x * errors[:, None]).mean(axis=0) + noise, np.float64(errors.mean() / 3)]
            assert self.learner.gradients is not None
            given = self.learner.gradients.given(gradients, np.abs(errors).mean(), {"noise": noise})
            self.learner.refuse_changed(turn.number)
            self.blocks += [len(x)] * (turn.weight > 0)
            if (mean := self.turns.give(given)) is not None:
                self.w -= 0.3 * mean[0]
                self.b -= 0.3 * mean[1]

    def step(self, group: InProcessGroup, rank: int, step: int, part: StepSlice) -> Any:
        self.ring.open(group)
        self.ring.form(rank, group.size)
        self.batches.take(self.batches.layout, part)
        start, stop = self.batches.steps.positions(step)
        batch = self.batches.of(step, 100)
        result = self.learner.allreduce_step(batch, control.write(step), step, rank, stop - start)
        self.learner.apply(result)
        return result.agreed


def of_turn(turn: Turn) -> float:
    """A number as of step.seed: members share the generators of this process."""
    return float(np.random.default_rng([turn.number, turn.rank]).normal())


def test_a_step_that_comes_again_draws_the_same_numbers() -> None:
    member = Member(lambda turn: float(np.random.normal()) + random.random())
    begin, digests = [part.copy() for part in member.learner.parts()], set()
    for _ in range(2):
        member.learner.take_over(member.learner.prepared([part.copy() for part in begin]))
        member.step(InProcessGroup(1), 0, 1, StepSlice(0, (1,)))
        digests.add(member.learner.digest())
        np.random.seed(None)
    assert len(digests) == 1


def test_rings_of_any_sizes_have_the_same_bits() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, found = random.Random(seed), []
    members = [Member(of_turn) for _ in range(5)]
    begin = members[0].learner.parts()
    for sizes in ((1,) * 6, (2, 3, 5, 4, 3, 2), [chance.randint(1, 5) for _ in range(6)]):
        states, told = [part.copy() for part in begin], []
        for step, size in enumerate(sizes):
            shares = tuple(chance.randint(1, 9) for _ in range(size - 1))
            shares = (*shares, int(not shares))  # the last one of several has no records
            group = InProcessGroup(size)
            for member in members[:size]:
                member.learner.take_over(member.learner.prepared([part.copy() for part in states]))
            with ThreadPoolExecutor(size) as threads:
                results = [
                    threads.submit(member.step, group, rank, step, StepSlice(rank, shares))
                    for rank, member in enumerate(members[:size])
                ]
                agreed = [result.result(60) for result in results]
            assert len({member.learner.digest() for member in members[:size]}) == 1
            states = members[0].learner.parts()
            told.append((members[0].learner.digest(), agreed[0].loss, agreed[0].records))
        found.append(told)
    assert found[0] == found[1] == found[2]
    assert len({digest for digest, *_ in found[0]}) == 6
    assert {records for *_, records in found[0]} == {BATCH, 50 - 2 * BATCH}
    assert min(members[0].blocks) == 1 and max(members[0].blocks) == 3, "blocks follow from the step alone"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e26])
def test_a_block_that_cannot_be_summed_exactly_makes_its_step_not_finite(bad: float) -> None:
    member = Member(lambda turn: bad if turn.rank == 3 else 0.0)
    agreed = member.step(InProcessGroup(1), 0, 0, StepSlice(0, (1,)))
    assert agreed.nonfinite


def test_a_library_that_sees_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"a_library": lambda library: library == "a GPU"}
    monkeypatch.setattr(loop_blocks, "SEES_GPU", seen)
    monkeypatch.setitem(sys.modules, "a_library", "a GPU")
    with pytest.raises(ModelError, match="a_library sees a GPU"):
        loop_blocks.settle_libraries(1)


def test_a_reader_that_reads_records_together_is_refused() -> None:
    class Blocks:
        def __len__(self) -> int:
            return 5000

        def read(self, start: int, stop: int) -> Any:
            return np.arange(start, stop)

    records = Records(Blocks(), lambda x: (x, None), "x", unwatched, 7, shuffle=True)
    with pytest.raises(
        DataError, match=r"x: training\.deterministic must be false.* set data\.shuffle=false"
    ):
        records.choose_layout(1e6, 2, deterministic=True)
