# SPDX-License-Identifier: Apache-2.0
"""Rows move to more and fewer servers, and any process dies anywhere in between, by printed seeds.

The servers (ps/) with their logs, and the calls of the ring's root (trainer/ps_client/root.py), are what
ships; only the wire between them is simulated. Each step counts its ids, so what each row must be is known.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS
from edl.contract.rows.placement import ShardAssignment, moves
from edl.ps.server import ParameterServer
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ring.base import RingBroken
from tests.support.ps.direct_servers import DirectCall, RootDied, World
from tests.support.ps.requests import RUN

IDS, MAXIMUM = 300, 4
SGD = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
ZEROS = {"class_name": "Zeros", "config": {}}
TABLES = (
    Table("often", 1, json.dumps(ZEROS), json.dumps(SGD), own_learning_rate=True),
    Table("twice", 1, json.dumps(ZEROS), json.dumps(SGD), own_learning_rate=True, min_count=2),
)


def root_of(world: World) -> PsClient:
    """It knows the servers that are there now."""
    links, addresses = world.links()
    return PsClient(links, RUN, 7, replicas=world.replicas, connect=world.connect, addresses=addresses)


class Job:
    """The state of a ring, which goes on from root to root."""

    def __init__(self, world: World):
        self.world = world
        self.step = 0
        self.commit: Commit | None = None
        self.counts = np.zeros(IDS, np.float32)
        self.before: tuple[int, Commit | None, np.ndarray] | None = None  # of the step before, if it was kept
        self.workers = 0
        self.moved = 0

    def ring(self, servers: int) -> PsClient:
        """Formed anew, until it is: as `RowServers.join` and `move` do it."""
        while True:
            self.workers += 1
            root = root_of(self.world)
            root.declare(TABLES, lambda: self.commit)
            root.enter([str(node.index) for node in self.world.nodes], servers)
            try:
                root.claim(self.workers)
                if self.step == 0:
                    root.restore(0, "")
                else:
                    why = root.start_generation(self.step)
                    assert not why, f"rows are lost: {why}"
                if root.moves:
                    self.before = None  # all have this step
                    assert root.move(self.step) == ""
                    self.moved += 1
                return root
            except (RootDied, RingBroken):
                self._comes_back()

    def train(self, root: PsClient, steps: int) -> bool:
        """False: the ring is broken."""
        rng = self.world.random
        try:
            for _ in range(steps):
                ids = np.array(sorted(rng.sample(range(IDS), 20)), np.int64)
                looked_at = np.arange(0, IDS, 7)
                often, twice = root.pull(self.step, [looked_at, looked_at])
                np.testing.assert_array_equal(often[:, 0], self.counts[looked_at])
                expected = np.maximum(self.counts[looked_at] - 1, 0)
                np.testing.assert_array_equal(twice[:, 0], expected)
                gradients = -np.ones((len(ids), 1), np.float32)
                root.stage(self.step, 0, [(ids, gradients), (ids, gradients)])
                self.before = self.step, self.commit, self.counts.copy()
                self.commit = Commit(self.step, False, 1.0, 0.0, self.step, root.generation)
                self.step, self.counts = self.step + 1, self.counts.copy()
                self.counts[ids] += 1
        except (RootDied, RingBroken):
            if self.before is not None and rng.random() < 0.3:  # only the dead one had the last step
                self.step, self.commit, self.counts = self.before
                self.before = None
            self._comes_back()
            return False
        return True

    def _comes_back(self) -> None:
        if self.world.random.random() < 0.7:
            for node in self.world.nodes:
                node.start()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_no_row_is_lost_or_doubled_whoever_dies_while_rows_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, replicas: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # processes die, and the machine does not
    print(f"seed {seed}, {replicas} copies")
    world = World(seed, tmp_path, replicas, rate=0.04)
    job = Job(world)
    servers = world.random.randint(replicas, MAXIMUM)
    world.grow(servers)
    for _ in range(12):
        root = job.ring(servers)
        if root.assignment == ShardAssignment(servers, replicas):
            world.shrink(servers)
            servers = world.random.randint(replicas, MAXIMUM)
            world.grow(max(servers, len(world.nodes)))
        job.train(root, world.random.randint(1, 5))
    world.rate = 0.0
    for node in world.nodes:
        node.start()
    root = job.ring(servers)
    of = ShardAssignment(servers, replicas)
    assert root.assignment == of and job.moved > 1 and world.faults > 3
    world.shrink(servers)
    rows = root.pull(job.step, [np.arange(IDS)])[0]
    np.testing.assert_array_equal(rows[:, 0], job.counts)
    for number, least in enumerate((1, 2)):
        there = np.flatnonzero(job.counts >= least)
        for node in world.nodes:
            assert len(node.start().tables[number]) == of.has(node.index, there).sum(), "rows are left behind"
        world_rows = sum(len(node.start().tables[number]) for node in world.nodes)
        assert world_rows == len(there) * replicas
    for node in world.nodes:
        node.kill()


def test_a_new_server_that_is_gone_for_good_leaves_the_rows_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    world = World(1, tmp_path, replicas=1, rate=0.0)
    job = Job(world)
    world.grow(2)
    assert job.train(job.ring(2), 3)
    world.grow(3)
    new = world.nodes[2]
    for number, dies_late in enumerate((True, False, False)):
        root = root_of(world)
        root.declare(TABLES, lambda: job.commit)
        root.enter([str(node.index) for node in world.nodes], 3)
        if not dies_late:
            new.kill()
        new.is_gone = not dies_late
        root.claim(100 + number)
        assert root.start_generation(job.step) == ""
        if dies_late:  # it has said that it is there
            new.kill()
        new.is_gone = True
        assert root.moves and "server 2" in root.move(job.step)
        assert root.assignment == ShardAssignment(2)
        assert job.train(root, 3)
    new.is_gone = False
    root = job.ring(3)
    assert root.assignment == ShardAssignment(3) and job.moved == 1
    assert job.train(root, 3)
    for node in world.nodes:
        node.kill()


def from_three_to_two(where: Path) -> tuple[World, Job]:
    """Rows that have moved, and all three servers are still there."""
    world = World(0, where, 1, rate=0.0)
    world.grow(3)
    job = Job(world)
    assert job.train(job.ring(3), 2)
    assert job.ring(2).assignment == ShardAssignment(2)
    return world, job


def test_a_fetch_that_arrives_again_after_the_switch_drops_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[pb.FetchRequest] = []
    real = DirectCall._fetch

    def fetch(call: DirectCall, server: ParameterServer, request: pb.FetchRequest) -> Any:
        requests.append(request)
        return real(call, server, request)

    monkeypatch.setattr(DirectCall, "_fetch", fetch)
    world = World(0, tmp_path, 1, rate=0.0)
    job = Job(world)
    world.grow(1)
    assert job.train(job.ring(1), 2)
    world.grow(2)
    root = job.ring(2)
    new = world.nodes[1].start()
    rows, [late] = len(new.tables[0]), requests
    assert new.mode.fetch(late) == [] and len(new.tables[0]) == rows > 0
    assert job.train(root, 2), "the new server serves its rows"


@pytest.mark.parametrize("said", [2, 0])
def test_a_server_that_has_ended_after_its_rows_had_moved_is_not_waited_for(
    tmp_path: Path, said: int
) -> None:
    world, job = from_three_to_two(tmp_path)
    world.nodes[2].kill(lose=True)
    world.nodes[2].start = lambda: pytest.fail("it is waited for")  # type: ignore[method-assign]
    root = job.ring(said)  # whose address the workers still know
    assert root.assignment == ShardAssignment(2) and not root.moves
    assert job.train(root, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_released_server_that_a_removed_root_has_claimed_is_not_waited_for(
    tmp_path: Path, replicas: int
) -> None:
    """The rows go back to a checkpoint with the ring: that root has restored a part of them only."""
    world = World(0, tmp_path, replicas, rate=0.0)
    world.grow(3)
    job = Job(world)
    assert job.train(job.ring(3), 2)  # the removed root's; the master has released the third server
    for node in (world.nodes[0], world.nodes[2]):
        node.kill(lose=True)
    world.nodes[2].start = lambda: pytest.fail("it is waited for")  # type: ignore[method-assign]
    root = root_of(world)
    root.declare(TABLES, lambda: job.commit)
    root.enter(["0", "1"], 2, released_from=2)
    root.claim(99)
    assert "parameter server 2 has lost its log and rows" in root.start_generation(job.step)
    root.restore(0, "")
    assert root.assignment == ShardAssignment(2, replicas)
    world.nodes[2].start = type(world.nodes[2]).start.__get__(world.nodes[2])  # type: ignore[method-assign]
    root.enter(["0", "1", "2"], 3)  # the master wants three again
    root.claim(99)
    job.step, job.commit, job.counts = 0, None, np.zeros(IDS, np.float32)
    root.restore(0, "")
    assert root.assignment == ShardAssignment(3, replicas) and job.train(root, 2)


def test_a_released_server_that_was_requested_since_is_called_after_a_new_master(tmp_path: Path) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(2)
    job = Job(world)
    assert job.train(job.ring(1), 1)
    root = root_of(world)  # it was in a ring of one server, and in none of those that followed
    root.declare(TABLES, lambda: job.commit)
    root.enter(["0", "1"], 1, released_from=1)
    assert job.train(job.ring(2), 1)
    root.enter()  # the order of a new master, which does not know the servers
    root.claim(99)
    assert root.start_generation(job.step) == ""
    assert root.assignment == ShardAssignment(2, 1) and job.train(root, 2)


def test_who_knows_fewer_servers_than_have_rows_does_not_go_back_and_is_told_by_others(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(3)
    job = Job(world)
    root = job.ring(3)
    assert job.train(root, 2)
    del world.nodes[2:]
    other = root_of(world)
    other.declare(TABLES, lambda: job.commit)
    world.grow(3)
    other.enter()
    other.claim(9)
    with pytest.raises(RingBroken, match="rows are on 3 parameter servers, and this worker knows 2"):
        other.start_generation(job.step)
    root = job.ring(3)
    other.generation = root.generation
    other.adopt(root.assignment, root.addresses)
    (rows, _) = other.pull(job.step, [np.arange(IDS), np.arange(0)])
    np.testing.assert_array_equal(rows[:, 0], job.counts)


def test_who_saves_the_model_is_given_no_rows_by_servers_that_have_gone_over_meanwhile(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(1)
    job = Job(world)
    assert job.train(job.ring(1), 3)
    saver = root_of(world)
    saver.declare(TABLES, lambda: job.commit)
    world.grow(2)
    root = job.ring(2)
    saver.generation = root.generation  # it has heard of the ring, which broke before it heard of the move
    with pytest.raises(RingBroken, match="the rows are on 2 servers now; expected by the caller: 1 server"):
        saver.all_rows(0)
    with pytest.raises(RingBroken, match="the rows are on 2 servers now; expected by the caller: 1 server"):
        saver.rows_of(0, np.arange(IDS))
    saver.enter([str(node.index) for node in world.nodes], 2)
    saver.adopt(root.assignment, root.addresses)
    ids, rows = saver.all_rows(0)
    np.testing.assert_array_equal(rows[np.argsort(ids), 0], job.counts[job.counts > 0])


def test_a_server_that_was_away_when_a_generation_was_claimed_hears_what_is_said_in_it(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, replicas=2, rate=0.0)
    world.grow(2)
    world.random.random = lambda: 0.0  # type: ignore[method-assign]  # dead servers are not needed
    job = Job(world)
    assert job.train(job.ring(2), 3)
    world.nodes[1].kill(lose=True)
    world.nodes[1].start()  # which knows of no generation
    world.nodes[0].kill()  # which has all rows, and has not heard that the last step counts
    again = root_of(world)
    again.declare(TABLES, lambda: job.commit)
    again.enter([str(node.index) for node in world.nodes], 2)
    again.claim(job.workers)
    assert again.start_generation(job.step) == ""
    (rows, _) = again.pull(job.step, [np.arange(IDS), np.arange(0)])
    np.testing.assert_array_equal(rows[:, 0], job.counts)


def test_a_root_whose_ring_is_cut_while_it_waits_for_servers_can_still_save_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0, tmp_path, replicas=2, rate=0.0)
    world.grow(2)
    world.random.random = lambda: 0.0  # type: ignore[method-assign]  # dead servers are not needed
    job = Job(world)
    root = job.ring(2)
    assert job.train(root, 3)
    world.nodes[1].kill(lose=True)
    world.nodes[1].start()
    world.nodes[0].kill()  # which may have all rows

    def is_cut(servers: object) -> None:
        raise RingBroken("the ring was cut")

    root.enter(["0", "1"], 2)
    root.claim(9)
    monkeypatch.setattr(root, "_wait_for", is_cut)
    with pytest.raises(RingBroken):
        root.start_generation(job.step)
    assert root.assignment == ShardAssignment(2, 2)


def test_a_further_server_that_ends_after_it_has_answered_is_not_waited_for(tmp_path: Path) -> None:
    world = World(0, tmp_path, replicas=2, rate=0.0)
    world.grow(2)
    world.random.random = lambda: 0.0  # type: ignore[method-assign]  # servers that are down are done without
    job = Job(world)
    assert job.train(job.ring(2), 3)
    world.nodes[1].kill(lose=True)
    world.nodes[1].start()
    world.nodes[0].kill()
    world.grow(3)  # for a moment people wanted three
    root = root_of(world)
    root.declare(TABLES, lambda: job.commit)
    root.enter([str(node.index) for node in world.nodes], 2)
    root.claim(job.workers)
    world.nodes[2].kill(lose=True)
    world.nodes[2].is_gone = True
    assert root.start_generation(job.step) == ""  # once server 0 is back
    assert root.assignment.members == (0,)
    (rows, _) = root.pull(job.step, [np.arange(IDS), np.arange(0)])
    np.testing.assert_array_equal(rows[:, 0], job.counts)


def test_from_one_server_to_two_half_of_the_buckets_move_and_only_to_the_new_one() -> None:
    one, two, three = ShardAssignment(1), ShardAssignment(2), ShardAssignment(3)
    assert not moves(one, two, 1, 0).any()
    assert moves(one, two, 0, 1).sum() / BUCKETS <= 0.55
    assert sum(moves(two, three, source, 2).sum() for source in (0, 1)) / BUCKETS <= 0.4
    assert not moves(two, three, 0, 1).any() and not moves(two, three, 1, 0).any()


def test_each_bucket_is_on_two_servers_and_asked_of_one_that_is_in() -> None:
    whole = ShardAssignment(3, 2)
    held = np.stack([whole.held(index) for index in range(3)])
    assert (held.sum(axis=0) == 2).all()
    assert (held[whole.first, np.arange(BUCKETS)]).all()
    without = whole.without((1,))
    assert without.is_whole and 1 not in without.first and not without.held(1).any()
    assert not whole.without((0, 1)).is_whole
    assert not ShardAssignment(2).without((0,)).is_whole
