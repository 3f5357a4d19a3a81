# SPDX-License-Identifier: Apache-2.0
"""Which steps count, where they come in any order, and which worker makes them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from edl.contract.ranges import RangeSet
from edl.ps.asynchronous.applied_steps import (
    LATE_SECONDS,
    SILENT_SECONDS,
    AppliedSteps,
    Kept,
    Leases,
    Pushed,
    PushOutcome,
    Rules,
    Update,
)
from edl.ps.asynchronous.records import EARLIER, applied_from_json, applied_to_json
from edl.ps.errors import Invalid, Misplaced, Stale
from edl.ps.phase import Phase

RULES = Rules()


def take(applied: AppliedSteps, step: int, rules: Rules = RULES) -> tuple[AppliedSteps, Update | None]:
    return applied.accept(Pushed(step, 0.1, f"g{step}", 1.0, 2), rules, skipped=False)


def ranges(*found: tuple[int, int]) -> RangeSet:
    return RangeSet.of(found)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- steps


def test_an_accepted_step_is_a_duplicate_and_never_applied_again() -> None:
    applied = AppliedSteps(incarnation="a")
    assert applied.classify(4, 0, False, RULES) is PushOutcome.ACCEPTED
    applied, update = take(applied, 4)
    assert update == Update(0, (Pushed(4, 0.1, "g4", 1.0, 2),))
    assert applied.classify(4, 1, False, RULES) is PushOutcome.DUPLICATE
    applied = applied.mark_duplicate(4)
    assert (applied.version, applied.repeated, applied.step) == (1, 1, 0)
    applied, _ = take(applied, 0)
    assert applied.step == 1
    with pytest.raises(Invalid, match="step -1"):
        applied.classify(-1, 0, False, RULES)


def test_steps_that_wait_are_applied_in_their_order_as_one_update() -> None:
    rules, applied = Rules(together=3), AppliedSteps(incarnation="a", version=7)
    for step in (5, 2):
        applied, update = take(applied, step, rules)
        assert update is None and applied.version == 7
    assert applied.in_rows.accepted == RangeSet() and applied.accepted == ranges((2, 3), (5, 6))
    applied, update = take(applied, 4, rules)
    assert update is not None and [one.step for one in update.pushed] == [2, 4, 5]
    assert (update.version, update.scale) == (7, 1 / 3)
    assert update.learning_rate == pytest.approx(0.1)
    assert (applied.version, applied.waiting, applied.in_rows) == (8, (), applied)


def test_what_waits_is_made_again_after_a_checkpoint_so_its_records_and_loss_do_not_count_there() -> None:
    rules, applied = Rules(together=2), AppliedSteps(incarnation="a")
    for step in range(3):
        applied, _ = take(applied, step, rules)
    assert (applied.loss, applied.records, len(applied.waiting)) == (6.0, 6, 1)
    written = applied.in_rows
    assert (written.loss, written.records, written.waiting) == (4.0, 4, ())
    again, _ = take(written, 2, rules)
    assert (again.loss, again.records, again.accepted) == (6.0, 6, ranges((0, 3)))


def test_what_is_too_old_is_told_by_the_updates_since() -> None:
    rules, applied = (
        Rules(max_staleness=3),
        AppliedSteps(incarnation="a", version=10, accepted=ranges((0, 2))),
    )
    assert applied.classify(5, 7, False, rules) is PushOutcome.ACCEPTED
    assert applied.classify(5, 6, False, rules) is PushOutcome.TOO_STALE
    assert applied.classify(5, 6, True, rules) is PushOutcome.ACCEPTED
    assert applied.classify(1, 0, False, rules) is PushOutcome.DUPLICATE
    assert applied.classify(5, 6, False, RULES) is PushOutcome.ACCEPTED
    scaled = Rules(scale_rate=True)
    assert [scaled.rate(1.0, staleness) for staleness in (0, 1, 2, 4)] == [1.0, 1.0, 0.5, 0.25]


def test_rescheduled_steps_are_computed_again_in_a_new_incarnation_and_not_applied_here() -> None:
    applied = AppliedSteps(incarnation="a", accepted=ranges((0, 6), (8, 9)))
    again = applied.reschedule(ranges((4, 100)), "b")
    assert (again.incarnation, again.rescheduled, again.step) == ("b", ranges((4, 6), (8, 9)), 4)
    assert again.missing(10) == ranges((4, 10)) and again.missing(5) == ranges((4, 5))
    assert again.reschedule(ranges((5, 9)), "c") is again, "nothing new: no worker has to refresh"
    assert again.classify(4, 0, False, RULES) is PushOutcome.DUPLICATE
    done = again.mark_duplicate(4)
    assert (done.rescheduled, done.step, done.accepted) == (ranges((5, 6), (8, 9)), 5, applied.accepted)


def test_one_rollback_per_generation() -> None:
    fresh = AppliedSteps()
    assert fresh.goes_back(0, 4, "a") and fresh.goes_back(1, 4, "a") and fresh.goes_back(1, 0, "")
    at = AppliedSteps(Phase.SERVING, "b", restored=(2, 4, "a"))
    assert at.goes_back(3, 4, "a") and not at.goes_back(2, 4, "a") and not at.goes_back(0, 4, "a")
    with pytest.raises(Stale, match="stale generation 1"):
        at.goes_back(1, 4, "a")
    for generation in (0, 2):
        with pytest.raises(Misplaced, match=r"step 8 rejected: .* generation 2 already restored step 4"):
            at.goes_back(generation, 8, "c")
    assert at.lost().goes_back(0, 8, "c") and not at.lost().phase.has_rows


def test_nothing_older_replaces_what_is_kept() -> None:
    applied = AppliedSteps(incarnation="a", loss=3.0, records=5)
    after = applied.keep(Kept(4, 2, b"x"))
    assert (after.loss, after.records) == (0.0, 0)
    assert after.keep(Kept(9, 2, b"y")) is after and after.keep(Kept(9, 1, b"y")) is after


# --- leases


def test_the_lowest_steps_go_to_whoever_asks_and_nobody_holds_one_twice() -> None:
    leases = Leases(Clock())
    assert leases.lease(1, 2, ranges((3, 9))) == [3, 4]
    assert leases.lease(2, 3, ranges((3, 9))) == [5, 6, 7]
    assert leases.lease(1, 3, ranges((3, 9))) == [8]
    assert leases.lease(2, 3, ranges((3, 9))) == [], "others make those that are left"
    leases.clear()
    assert leases.lease(2, 1, ranges((3, 9))) == [3]


def test_a_worker_that_says_nothing_for_a_while_loses_what_it_holds() -> None:
    clock = Clock()
    leases = Leases(clock)
    assert leases.lease(1, 2, ranges((0, 9))) == [0, 1]
    assert leases.lease(2, 1, ranges((0, 9))) == [2]
    clock.now += 2 * SILENT_SECONDS
    leases.heard(2)
    clock.now += SILENT_SECONDS
    assert leases.lease(3, 4, ranges((0, 9))) == [0, 1, 3, 4]
    assert leases.held == {0: 3, 1: 3, 2: 2, 3: 3, 4: 3}


def test_who_has_nothing_else_to_do_makes_what_is_late_the_longest_held_first() -> None:
    clock = Clock()
    leases = Leases(clock)
    assert leases.lease(1, 1, ranges((0, 4))) == [0]
    clock.now += 1.0
    leases.made(0)  # so steps take a second
    assert leases.lease(1, 1, ranges((1, 4))) == [1]
    clock.now += 0.5
    assert leases.lease(2, 2, ranges((1, 4))) == [2, 3]
    clock.now += 2.0 + LATE_SECONDS
    assert leases.lease(3, 1, ranges((1, 4))) == [1]
    assert leases.lease(4, 5, ranges((1, 4))) == [2, 3]
    assert leases.lease(4, 5, ranges((1, 4))) == [], "they are new in other hands"
    assert leases.held == {1: 3, 2: 4, 3: 4}


# --- all of it


class Machine:
    """Servers, each with its rows as a count of every step, and workers that die: by dice."""

    def __init__(self, seed: int):
        self.dice = random.Random(seed)
        self.rules = Rules(together=self.dice.choice((1, 1, 3)), max_staleness=self.dice.choice((0, 0, 9)))
        self.names = count()
        self.servers = [AppliedSteps().begin(self.incarnation()) for _ in range(self.dice.choice((1, 2, 3)))]
        self.rows: list[dict[int, int]] = [{} for _ in self.servers]
        self.clock = Clock()
        self.leases = Leases(self.clock)
        self.known: dict[int, list[str]] = {}  # by worker: the lines that it has seen
        self.reports: list[tuple[RangeSet, str, int, str]] = []  # reports that were about to be sent
        self.checkpoint()

    def incarnation(self) -> str:
        return f"line {next(self.names)}"

    def checkpoint(self) -> None:
        self.saved = [
            (server.in_rows, dict(rows)) for server, rows in zip(self.servers, self.rows, strict=True)
        ]

    def apply(self, index: int, applied: AppliedSteps, update: Update | None) -> None:
        self.servers[index] = applied
        for one in update.pushed if update else ():
            self.rows[index][one.step] = self.rows[index].get(one.step, 0) + 1

    def look(self, worker: int) -> None:
        """Begin to work with the servers, or look at them anew."""
        for index in range(1, len(self.servers)):
            lacks = ranges((0, 1 << 62)).minus(self.servers[index].accepted)
            told = lacks, self.servers[0].incarnation, index, self.servers[index].incarnation
            self.reports.append(told)
            self.reschedule(*told)
        self.known[worker] = [server.incarnation for server in self.servers]

    def reschedule(self, lacks: RangeSet, incarnation: str, index: int, server_incarnation: str) -> None:
        if incarnation == self.servers[0].incarnation:
            self.servers[0] = self.servers[0].reschedule(lacks, self.incarnation(), index, server_incarnation)

    def push(self, index: int, incarnation: str, version: int, step: int) -> bool:
        """Whether its worker may go on with it."""
        applied = self.servers[index]
        if applied.incarnation != incarnation:
            return False
        classify = applied.classify(step, version, False, self.rules)
        if classify is PushOutcome.TOO_STALE:
            return False
        if classify is PushOutcome.DUPLICATE:
            self.servers[index] = applied.mark_duplicate(step)
        else:
            self.apply(index, *take(applied, step, self.rules))
        if index == 0:
            self.leases.made(step)
        return True

    def lose(self, index: int) -> None:
        """A server's log is lost; it goes on from its part of a checkpoint."""
        saved, rows = self.saved[index]
        self.servers[index] = replace(saved, incarnation=self.incarnation(), others=())
        self.rows[index] = dict(rows)

    def run(self, stop: int) -> None:
        in_flight: list[tuple[int, int, list[int], list[str], list[int]]] = []
        for _ in range(100_000):
            if not in_flight and all(server.step == stop for server in self.servers):
                return
            self.clock.now += self.dice.uniform(0, 2.0)
            deed = self.dice.random()
            if deed < 0.3:
                worker = self.dice.randrange(4)
                lines = self.known.get(worker)
                if lines != [server.incarnation for server in self.servers] and (
                    not lines or self.dice.random() < 0.3
                ):
                    self.look(worker)
                    lines = self.known[worker]
                if lines and lines[0] == self.servers[0].incarnation:
                    versions = [server.version for server in self.servers]
                    for step in self.leases.lease(worker, 2, self.servers[0].missing(stop)):
                        order = self.dice.sample(range(1, len(self.servers)), len(self.servers) - 1)
                        in_flight.append((worker, step, [*order, 0], lines, versions))
                elif lines:
                    self.known.pop(worker)  # it was refused
            elif deed < 0.9 and in_flight:
                place = self.dice.randrange(len(in_flight))
                worker, step, left, lines, versions = in_flight[place]
                goes_on = self.push(left[0], lines[left[0]], versions[left[0]], step)
                if self.dice.random() < 0.2:  # its answer was lost
                    goes_on = self.push(left[0], lines[left[0]], versions[left[0]], step) and goes_on
                if not goes_on:
                    self.known.pop(worker, None)
                if not goes_on or len(left) == 1:
                    del in_flight[place]
                else:
                    in_flight[place] = worker, step, left[1:], lines, versions
            elif deed < 0.93 and in_flight:
                worker = in_flight[self.dice.randrange(len(in_flight))][0]  # it dies
                in_flight = [one for one in in_flight if one[0] != worker]
                self.known.pop(worker, None)
            elif deed < 0.94:
                self.checkpoint()
            elif deed < 0.945:
                self.lose(self.dice.randrange(len(self.servers)))
            elif deed < 0.95 and self.reports:
                self.reschedule(*self.dice.choice(self.reports[-5:]))  # late
            elif deed < 0.96:
                self.look(self.dice.randrange(4))  # a new worker
        raise AssertionError(f"it does not come to an end: {self.servers}")


@pytest.mark.parametrize("block", range(4))
def test_whatever_is_lost_and_comes_twice_each_step_counts_once_on_every_server(block: int) -> None:
    first = random.SystemRandom().randrange(10**6)
    for seed in range(first, first + 100):
        machine = Machine(seed)
        machine.run(30)
        for index, applied in enumerate(machine.servers):
            machine.apply(index, *applied.drain(30))
        assert machine.rows == [dict.fromkeys(range(30), 1)] * len(machine.servers), f"seed {seed}"
        assert all(applied.step == 30 and not applied.waiting for applied in machine.servers), f"seed {seed}"


# --- files


def test_files_with_the_keys_of_an_earlier_release_are_read() -> None:
    applied = AppliedSteps(
        incarnation="a",
        version=3,
        accepted=ranges((0, 4), (6, 7)),
        rescheduled=ranges((2, 3)),
        kept=Kept(4, 2, b"ledger"),
        others=((1, "b"),),
        generation=5,
        phase=Phase.QUIESCED,
        assigned_in=4,
    )
    written = applied_to_json(applied)
    assert applied_from_json(written) == applied
    names = {today: earlier for earlier, today in EARLIER.items()}
    earlier = {names.get(key, key): value for key, value in written["asynchronous"].items()}
    assert {"line", "taken", "reopened", "still", "arranged"} <= earlier.keys()
    assert applied_from_json({"asynchronous": earlier}) == applied
