"""Rows move to more and fewer servers, and whoever takes part dies anywhere in between, by printed seeds.

The servers (ps/) with their logs, and the client of the ring's root (trainer/servers.py), are what ships;
only the wire between them is another one. Each step counts its ids, so what each row must be is known.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract.arrangement import Arrangement, moves
from edl.contract.buckets import BUCKETS
from edl.contract.proto import ps_pb2 as pb
from ps.durable import Server
from ps.errors import Misplaced, Refused, Stale, Unavailable, Unsettled
from trainer.ring.base import RingBroken
from trainer.roles import Commit, Table
from trainer.server_link import ServerAway, ServerRefused
from trainer.servers import ParameterServers

RUN, IDS, MOST = "run", 300, 4
SGD = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
ZEROS = {"class_name": "Zeros", "config": {}}
TABLES = (
    Table("often", 1, json.dumps(ZEROS), json.dumps(SGD), own_learning_rate=True),
    Table("twice", 1, json.dumps(ZEROS), json.dumps(SGD), own_learning_rate=True, min_count=2),
)


class RootDied(Exception):
    """The process that forms the ring is no more."""


class Node:
    """The place of one server: its log, and its process, if it lives."""

    def __init__(self, index: int, where: Path):
        self.index, self.where = index, where
        self.server: Server | None = None
        self.start()

    def start(self) -> Server:
        if self.server is None:
            self.server = Server(self.index, 0, RUN, self.where, warn=lambda text: None)
        return self.server

    def kill(self, lose: bool = False) -> None:
        if self.server is not None:
            os.close(self.server._log._file)
            self.server = None
        if lose:
            shutil.rmtree(self.where)


class World:
    """All servers, and what goes wrong.

    Args:
        rate: how often something does, of all calls.
    """

    def __init__(self, seed: int, where: Path, replicas: int, rate: float):
        self.random, self.where, self.replicas, self.rate = random.Random(seed), where, replicas, rate
        self.nodes: list[Node] = []
        self.faults = 0

    def grow(self, servers: int) -> None:
        self.nodes += [Node(i, self.where / f"log-{i}") for i in range(len(self.nodes), servers)]

    def shrink(self, servers: int) -> None:
        for node in self.nodes[servers:]:
            node.kill(lose=True)
        del self.nodes[servers:]

    def strikes(self, *nodes: Node) -> None:
        """Between two things that happen: perhaps one of them dies, or the root."""
        if self.random.random() >= self.rate:
            return
        self.faults += 1
        victim = self.random.choice([*nodes, None])
        if victim is None:
            raise RootDied
        victim.kill(lose=self.replicas > 1 and self.all_are_in and self.random.random() < 0.5)

    @property
    def all_are_in(self) -> bool:
        """Whether each row is on two servers: of two copies one is lost at a time."""
        have = [node.server for node in self.nodes if node.server is None or node.server.steps.began]
        return len({s and (s.steps.generation, s.arrangement) for s in have}) == 1 and all(
            s is not None and not s.arrangement.out and s.arrangement.servers == len(have) for s in have
        )

    def root(self, worker: int) -> ParameterServers:
        def connect(index: int, address: str) -> DirectLink:
            return DirectLink(self, int(address))

        addresses = [str(node.index) for node in self.nodes]
        links = [connect(index, address) for index, address in enumerate(addresses)]
        return ParameterServers(links, RUN, 7, replicas=self.replicas, connect=connect, addresses=addresses)


class DirectLink:
    """One server, as the root calls it."""

    def __init__(self, world: World, index: int):
        self.world, self.index = world, index

    def begin(self, method: str, request: Any, generation: int | None = None) -> DirectCall:
        return DirectCall(self, method, request)

    def write_part(self, request: Any) -> Any:
        raise NotImplementedError

    def tell(self, method: str, request: Any) -> None:
        raise NotImplementedError


class DirectCall:
    def __init__(self, link: DirectLink, method: str, request: Any):
        self._world, self._node = link.world, link.world.nodes[link.index]
        self._method, self._request = method, request

    def forget(self) -> None:
        pass

    def result(self, patient: bool = False) -> Any:
        while True:
            self._world.strikes(self._node)
            if self._node.server is None:
                if self._world.replicas > 1 and not patient:
                    raise ServerAway(f"server {self._node.index}")
                self._node.start()
            try:
                answer = self._act(self._node.start())
            except (Stale, Misplaced, Unsettled) as error:
                if self._method == "Declare":
                    raise ServerRefused(str(error)) from error
                raise RingBroken(str(error)) from error
            except Unavailable:  # another server was away
                if self._world.replicas > 1:
                    raise RingBroken("a server was away") from None
                continue
            except Refused as error:
                raise ServerRefused(str(error)) from error
            self._world.strikes(self._node)  # the answer may be lost
            if self._node.server is not None:
                return answer

    def _act(self, server: Server) -> Any:
        request = self._request
        match self._method:
            case "Pull":
                return pb.Rows(rows=[rows.tobytes() for rows in server.pull(request)])
            case "Stage":
                return server.stage(request.SerializeToString())
            case "Fetch":
                return self._fetch(server, request)
        return getattr(server, self._method.lower())(request)

    def _fetch(self, server: Server, request: pb.FetchRequest) -> Any:
        if not (sources := server.fetch(request)):
            return server.position()
        for source in sources:
            giver = self._world.nodes[source]
            for table in range(len(server.tables)):
                page = pb.PageRequest(
                    run_id=RUN, generation=request.generation, step=request.step, of=request.of,
                    to=request.to, index=server.index, table=table, most=600,
                )  # fmt: skip
                while True:
                    self._world.strikes(self._node, giver)
                    if self._node.server is not server or giver.server is None:
                        giver.start() if self._world.replicas == 1 else None
                        raise Unavailable("away")
                    given = server.take_page(request, giver.server.page(page).SerializeToString())
                    if not given.next:
                        break
                    page.bucket = given.next
        return server.fetched(request)


class Job:
    """The state of a ring, which goes on from root to root."""

    def __init__(self, world: World):
        self.world = world
        self.step, self.commit = 0, None
        self.counts = np.zeros(IDS, np.float32)
        self.before: tuple[int, Commit | None, np.ndarray] | None = None  # of the step before, if it was kept
        self.workers = 0
        self.moved = 0

    def ring(self, servers: int) -> ParameterServers:
        """Formed anew, until it is: as `Worker.join_servers` and `move_rows` do it."""
        while True:
            self.workers += 1
            root = self.world.root(self.workers)
            root.follow(TABLES, lambda: self.commit)
            root.enter([str(node.index) for node in self.world.nodes], servers)
            try:
                root.speak_of(root.claim(self.workers))
                if self.step == 0:
                    root.restore(0, "")
                else:
                    why = root.settle(self.step)
                    assert not why, f"rows are lost: {why}"
                if root.moves:
                    self.before = None  # all have this step
                    assert root.move(self.step) == ""
                    self.moved += 1
                return root
            except (RootDied, RingBroken):
                self._comes_back()

    def train(self, root: ParameterServers, steps: int) -> bool:
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
    servers = world.random.randint(replicas, MOST)
    world.grow(servers)
    for _ in range(12):
        root = job.ring(servers)
        if root.arrangement == Arrangement(servers, replicas):
            world.shrink(servers)
            servers = world.random.randint(replicas, MOST)
            world.grow(max(servers, len(world.nodes)))
        job.train(root, world.random.randint(1, 5))
    world.rate = 0.0
    for node in world.nodes:
        node.start()
    root = job.ring(servers)
    of = Arrangement(servers, replicas)
    assert root.arrangement == of and job.moved > 1 and world.faults > 3
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


def from_three_to_two(where: Path) -> tuple[World, Job]:
    """Rows that have moved, and all three servers are still there."""
    world = World(0, where, 1, rate=0.0)
    world.grow(3)
    job = Job(world)
    assert job.train(job.ring(3), 2)
    assert job.ring(2).arrangement == Arrangement(2)
    return world, job


@pytest.mark.parametrize("said", [2, 0])
def test_a_server_that_has_ended_after_its_rows_had_moved_is_not_waited_for(
    tmp_path: Path, said: int
) -> None:
    world, job = from_three_to_two(tmp_path)
    world.nodes[2].kill(lose=True)
    world.nodes[2].start = lambda: pytest.fail("it is waited for")  # type: ignore[method-assign]
    root = job.ring(said)  # whose address the workers still know
    assert root.arrangement == Arrangement(2) and not root.moves
    assert job.train(root, 2)


def test_who_knows_fewer_servers_than_have_rows_does_not_go_back_and_is_told_by_others(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, 1, rate=0.0)
    world.grow(3)
    job = Job(world)
    root = job.ring(3)
    assert job.train(root, 2)
    del world.nodes[2:]
    other = world.root(9)
    other.follow(TABLES, lambda: job.commit)
    world.grow(3)
    other.enter()
    other.speak_of(other.claim(9))
    with pytest.raises(RingBroken, match="rows are on 3 parameter servers, of which this worker knows 2"):
        other.settle(job.step)
    root = job.ring(3)
    other.speak_of(root.generation)
    other.adopt(root.arrangement, root.addresses)
    (rows, _) = other.pull(job.step, [np.arange(IDS), np.arange(0)])
    np.testing.assert_array_equal(rows[:, 0], job.counts)


def test_from_one_server_to_two_half_of_the_buckets_move_and_only_to_the_new_one() -> None:
    one, two, three = Arrangement(1), Arrangement(2), Arrangement(3)
    assert not moves(one, two, 1, 0).any()
    assert moves(one, two, 0, 1).sum() / BUCKETS <= 0.55
    assert sum(moves(two, three, source, 2).sum() for source in (0, 1)) / BUCKETS <= 0.4
    assert not moves(two, three, 0, 1).any() and not moves(two, three, 1, 0).any()


def test_each_bucket_is_on_two_servers_and_asked_of_one_that_is_in() -> None:
    whole = Arrangement(3, 2)
    held = np.stack([whole.held(index) for index in range(3)])
    assert (held.sum(axis=0) == 2).all()
    assert (held[whole.first, np.arange(BUCKETS)]).all()
    without = whole.without((1,))
    assert without.is_whole and 1 not in without.first and not without.held(1).any()
    assert not whole.without((0, 1)).is_whole
    assert not Arrangement(2).without((0,)).is_whole
