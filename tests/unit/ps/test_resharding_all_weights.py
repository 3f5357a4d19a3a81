# SPDX-License-Identifier: Apache-2.0
"""All weights move to more and fewer servers (mode=ps), with a second copy or without, and any process
dies anywhere in between, by printed seeds; what a dead one has sent may arrive later.

Each step counts itself in every weight (tests/support/models/counting_steps.py), so the right
value of each is known.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.ps.errors import Misplaced, Stale
from edl.trainer.embedding.interfaces import Table
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.ps_client.recovery import RecoveryPlan
from edl.trainer.ps_client.root import NOWHERE
from edl.trainer.ring.base import RingBroken
from tests.support.models import counting_steps as counting
from tests.support.ps.direct_servers import DirectLink, RootDied, World
from tests.support.ps.requests import ADAM, RUN

STEPS, MAXIMUM = 96, 4
TABLES = (
    Table("edl/dense", counting.DIM, counting.ZEROS, counting.SGD),
    Table("user", 1, counting.ZEROS, counting.SGD),
)
DENSE = np.arange(STEPS // counting.DIM, dtype=np.int64)
ALL_IDS = np.arange(3 * STEPS, dtype=np.int64)


def made(step: int) -> StepGradients:
    change = np.zeros((len(DENSE), counting.DIM), np.float32)
    change.reshape(-1)[step] = -1
    ids = counting.ids_of(step)
    gradients = [(DENSE.copy(), change), (ids, -np.ones((len(ids), 1), np.float32))]
    return StepGradients(step, gradients, 2.0, 3, 1.0)


class Late(DirectLink):
    """One server, as called by a worker that dies in the middle of a step: its message may be on its way."""

    def begin(self, method: str, request: Any, generation: int | None = None) -> Any:
        if method == "Push" and self.world.random.random() < self.world.rate:
            late.append((self.index, request))
            raise RootDied
        return super().begin(method, request, generation)


late: list[tuple[int, pb.PushRequest]] = []


class Job:
    """Rings, one after the other: one thread is all of their workers."""

    def __init__(self, world: World, **asynchronous: Any):
        self.world, self.asynchronous = world, asynchronous
        self.tables: tuple[Table, ...] = TABLES
        self.workers = self.moved = self.lost = self.without = 0
        self.have = ShardAssignment()  # of the rows, as all members of a ring have said
        world.spares = False  # what both copies of a row have lost is made again
        late.clear()

    def servers(self, wanted: int) -> PsClient:
        _, addresses = self.world.links()
        links = [Late(self.world, int(address)) for address in addresses]
        found = PsClient(
            links,
            RUN,
            7,
            connect=lambda index, address: Late(self.world, int(address)),
            addresses=addresses,
            replicas=self.world.replicas,
            asynchronous=pb.Asynchronous(**self.asynchronous),
        )
        found.declare(self.tables)
        found.enter(addresses, wanted)
        return found

    def ring(self, wanted: int) -> tuple[PsClient, int]:
        """Form a ring as `LeasedSteps.before_sync` does, and return the step at which rows can move."""
        while True:
            self.workers += 1
            servers = self.servers(wanted)
            try:
                if servers.take_charge(self.workers):
                    servers.restore(0, "")
                empty = [index for index, told in servers.look().items() if told.position.empty]
                if empty:
                    self.lost += len(empty)
                    values = [(DENSE, np.zeros((len(DENSE), counting.DIM), np.float32))]
                    servers.begin(values, empty)
                servers.introduce()
                self.has(servers)
                return servers, servers.furthest if servers.moves else NOWHERE
            except (RootDied, RingBroken):
                self.comes_back()

    def has(self, servers: PsClient) -> None:
        """All members of a ring say so."""
        before, self.have = self.have, servers.assignment
        self.moved += self.have.servers != before.servers
        self.without += bool({*self.have.out} - {*before.out})

    def train(self, wanted: int) -> None:
        """A ring, until it breaks or has made some steps."""
        servers, at = self.ring(wanted)
        dice = self.world.random
        try:
            servers.find_progress()
            limit = min(STEPS, servers.progress.step + dice.randint(1, 12))
            while True:
                if 0 <= at <= servers.progress.step:
                    servers.drain(at)
                    at, why = servers.move_quiesced(self.workers)
                    assert not why
                    self.has(servers)
                self.arrive()
                until = max(limit, at)
                # What the dead have held is made by others: now, and not when it is late.
                steps = servers.lease_steps(self.workers, 3, until) or list(range(until))
                dice.shuffle(steps)
                for step in steps:
                    versions = servers.pull_current([DENSE, counting.ids_of(step)]).versions
                    servers.push(made(step), self.workers, versions)
                servers.find_progress()
                if servers.progress.step >= until and at == NOWHERE:
                    break
        except (RootDied, RingBroken):
            self.comes_back()

    def arrive(self) -> None:
        """What a dead worker has sent: at any time, or never."""
        dice = self.world.random
        for index, request in list(late):
            if dice.random() < 0.3:
                late.remove((index, request))
                if index < len(self.world.nodes) and (server := self.world.nodes[index].server) is not None:
                    with suppress(Misplaced, Stale):
                        server.async_server.push(request.SerializeToString())

    def comes_back(self) -> None:
        if self.world.random.random() < 0.7:
            for node in self.world.nodes:
                node.start()
        self.arrive()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_each_step_counts_once_in_each_weight_whoever_dies_while_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, loses: bool, replicas: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # processes die, and the machine does not
    print(f"seed {seed}, logs {'are lost, too' if loses else 'stay'}")
    world = World(seed, tmp_path, replicas, rate=0.02)
    world.loses = 0.2 if loses else 0.0
    job = Job(world)
    wanted = world.random.randint(replicas, MAXIMUM)
    world.grow(wanted)
    for _ in range(24):
        job.train(wanted)
        if job.have == ShardAssignment(wanted, replicas):
            world.shrink(wanted)
            wanted = world.random.randint(replicas, MAXIMUM)
            world.grow(wanted)
    world.rate = 0.0
    for node in world.nodes:
        node.start()
    while True:
        servers, at = job.ring(wanted)
        versions = servers.pull_current([DENSE, ALL_IDS]).versions
        for step in range(STEPS):
            servers.push(made(step), 0, versions)
        if at == NOWHERE:
            break
        assert servers.move_quiesced(job.workers) == (NOWHERE, "")
    job.arrive()
    of = ShardAssignment(wanted, replicas)
    assert servers.assignment == of and job.moved > 2 and world.faults > 3
    assert job.without > 1 or replicas < 2, "none was done without"
    dense, rows = servers.pull_current([DENSE, ALL_IDS]).rows
    np.testing.assert_array_equal(dense.reshape(-1), 1)
    np.testing.assert_array_equal(rows, 1)
    for number, ids in enumerate((DENSE, ALL_IDS)):
        for node in world.nodes:
            mine = ids[of.has(node.index, ids)] if node.index < wanted else ids[:0]
            copy = node.start().tables[number].copy(STEPS)
            assert set(copy.ids.tolist()) == set(mine.tolist()), "rows are left behind, or missing"
            np.testing.assert_array_equal(copy.rows, 1)  # in a second copy, too
    for node in world.nodes:
        node.kill()


def test_what_has_moved_learns_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    """With Adam, whose correction counts updates, and steps that wait for others: those are applied first."""
    found = []
    for name, numbers in (("stays", (1, 1, 1, 1)), ("moves", (1, 2, 3, 1))):
        world = World(0, tmp_path / name, 1, rate=0.0)
        world.grow(3)
        job = Job(world, grads_to_wait=2)
        job.tables = tuple(replace(table, optimizer=ADAM) for table in TABLES)
        for number, wanted in enumerate(numbers):
            servers, at = job.ring(wanted)
            assert at == (NOWHERE if number == 0 or name == "stays" else 7 * number)
            servers.drain(7 * number)
            if at != NOWHERE:
                assert servers.move_quiesced(0) == (NOWHERE, "")
            for step in servers.lease_steps(0, 7, 7 * number + 7):
                versions = servers.pull_current([DENSE, counting.ids_of(step)]).versions
                assert len(set(versions.values())) == 1 and servers.push(made(step), 0, versions)
            assert servers.progress.step == 7 * number + 7
        found.append(servers.pull_current([DENSE, ALL_IDS]).rows)
    for stayed, moved in zip(*found, strict=True):
        np.testing.assert_array_equal(stayed, moved)


def test_a_step_that_waits_is_in_no_page_so_rows_do_not_move_before_it_is_applied(tmp_path: Path) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(2)
    job = Job(world, grads_to_wait=2)
    servers, _ = job.ring(1)
    [step] = servers.lease_steps(0, 1, STEPS)
    servers.push(made(step), 0, servers.pull_current([DENSE, ALL_IDS]).versions)
    servers, at = job.ring(2)
    assert at == 1 and servers.move_quiesced(0) == (1, ""), "it waits"
    assert servers.assignment == ShardAssignment(1)
    servers.drain(1)
    assert servers.move_quiesced(0) == (NOWHERE, "") and servers.assignment == ShardAssignment(2)


def test_a_fetch_that_arrives_after_assign_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(2)
    job = Job(world)
    job.ring(1)
    servers, _ = job.ring(2)
    assert servers.move_quiesced(0) == (NOWHERE, "") and servers.assignment == ShardAssignment(2)
    new = world.nodes[1].start()
    rows, position = len(new.tables[0]), new.position()
    late = pb.FetchRequest(
        run_id=RUN,
        generation=position.generation,
        of=ShardAssignment(1).to_proto(),
        to=ShardAssignment(2).to_proto(),
    )
    with pytest.raises(Misplaced, match="cannot fetch rows: the server is serving"):
        new.mode.fetch(late)
    assert new.position() == position and len(new.tables[0]) == rows > 0


def test_servers_that_all_lost_their_rows_are_as_many_as_there_were_and_not_all_that_ever_were(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(3)
    servers, _ = Job(world).ring(1)
    assert servers.assignment == ShardAssignment(1)
    world.nodes[0].kill(lose=True)
    servers.enter()  # a new master does not know how many they are, and those that were too many have ended
    servers.take_charge(9)
    assert servers.assignment == ShardAssignment(1) and servers.look().keys() == {0}


def test_an_earlier_root_is_rejected_and_late_steps_are_refused(tmp_path: Path) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(2)
    job = Job(world)
    earlier, _ = job.ring(1)
    [step] = earlier.lease_steps(0, 1, STEPS)
    versions = earlier.pull_current([DENSE, ALL_IDS]).versions
    later, at = job.ring(2)
    assert at == 0
    node = world.nodes[0].start()
    node.mode.start_generation(
        pb.StartGenerationRequest(run_id=RUN, generation=node.position().generation + 1)
    )
    with pytest.raises(RingBroken, match="is quiesced"):
        earlier.push(made(step), 0, versions)
    with pytest.raises(RingBroken, match="stale generation"):
        later._resume(RecoveryPlan(ShardAssignment(2)))
    assert later.move_quiesced(0) == (NOWHERE, ""), "it claims a later generation"
    with pytest.raises(RingBroken, match="restored or resharded"):
        earlier.push(made(step), 0, versions)
    with pytest.raises(RingBroken, match="the rows are on 2 servers now; expected by the caller: 1 server"):
        earlier.pull_current([DENSE, ALL_IDS])


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_that_was_out_does_not_go_on_alone_while_the_one_that_has_more_is_away(
    tmp_path: Path, lost: bool
) -> None:
    world = World(0, tmp_path, 2, rate=0.0)
    world.grow(2)
    job = Job(world)

    def trains(servers: PsClient, until: int) -> None:
        while steps := servers.lease_steps(0, STEPS, until):
            for step in steps:
                servers.push(made(step), 0, servers.pull_current([DENSE, counting.ids_of(step)]).versions)
        assert servers.progress.step == until

    servers, _ = job.ring(2)
    trains(servers, 10)
    while not servers.assignment.out:  # now and then it is back before it is missed
        if world.nodes[1].server is not None:
            world.nodes[1].kill(lost)
        servers, _ = job.ring(2)
    trains(servers, 20)
    world.nodes[1].start()
    world.nodes[0].kill()
    servers = job.servers(2)
    assert not servers.take_charge(99, 20)
    servers.introduce()
    servers.find_progress()
    assert servers.assignment.out == (1,) and servers.progress.step == 20, "it has waited for server 0"


def test_a_server_that_has_no_room_stays_without_rows_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(2)
    job = Job(world)
    servers, _ = job.ring(1)
    for step in servers.lease_steps(0, STEPS, STEPS):
        servers.push(made(step), 0, servers.pull_current([DENSE, ALL_IDS]).versions)
    servers, _ = job.ring(2)
    server = world.nodes[1].start()
    server._storage.limit = 1
    at, why = servers.move_quiesced(0)
    assert at == NOWHERE and "is 0 MiB" in why, why
    assert servers.assignment == ShardAssignment(1) and server.position().empty
    np.testing.assert_array_equal(servers.pull_current([DENSE, ALL_IDS]).rows[1], 1)
    world.nodes[1].kill()
    assert world.nodes[1].start().position().empty
