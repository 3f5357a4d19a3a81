# SPDX-License-Identifier: Apache-2.0
"""Parameter servers without a network, for tests with printed seeds; each server can die like a process.

The servers (ps/) with their logs, and their client (trainer/ps_client/client.py), are the shipped code. Only
the transport between them is replaced.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import GenerationPending, Misplaced, Refused, Stale, Unavailable
from edl.ps.server import ParameterServer
from edl.trainer.ps_client.calls import ServerAway, ServerRefused
from edl.trainer.ring.base import RingBroken
from tests.support.ps.requests import RUN


class RootDied(Exception):
    """The process of the root, which forms the ring, has died."""


class Node:
    """The node of one server: its log, and its process, if it lives."""

    def __init__(self, index: int, where: Path):
        self.index, self.where = index, where
        self.server: ParameterServer | None = None
        self.is_gone = False  # for good
        self.start()

    def start(self) -> ParameterServer:
        if self.server is None:
            self.server = ParameterServer(self.index, 0, RUN, self.where, warn=lambda text: None)
        return self.server

    def kill(self, lose: bool = False) -> None:
        if self.server is not None:
            os.close(self.server._log._file)
            self.server = None
        if lose:
            shutil.rmtree(self.where)


class World:
    """All servers, and their faults.

    Args:
        rate: the probability of a fault between two events of a call.
    """

    def __init__(self, seed: int, where: Path, replicas: int, rate: float):
        self.random, self.where, self.replicas, self.rate = random.Random(seed), where, replicas, rate
        self.loses = 0.0  # the probability that a dying server loses its log, too
        self.spares = replicas > 1  # lose at most one of two copies at a time
        self.nodes: list[Node] = []
        self.faults = 0

    def grow(self, servers: int) -> None:
        self.nodes += [Node(i, self.where / f"log-{i}") for i in range(len(self.nodes), servers)]

    def shrink(self, servers: int) -> None:
        for node in self.nodes[servers:]:
            node.kill(lose=True)
        del self.nodes[servers:]

    def strikes(self, *nodes: Node) -> None:
        """Perhaps kill one of these nodes, or the root. Called between two events."""
        if self.random.random() >= self.rate:
            return
        self.faults += 1
        victim = self.random.choice([*nodes, None])
        if victim is None:
            raise RootDied
        if self.spares:
            victim.kill(lose=self.all_are_in and self.random.random() < 0.5)
        else:
            victim.kill(lose=self.random.random() < self.loses)

    @property
    def all_are_in(self) -> bool:
        """Whether each row is on two servers, so that losing one copy is safe."""
        have = [node.server for node in self.nodes if node.server is None or node.server.mode.phase.has_rows]
        return len({s and (s.mode.state.generation, s.assignment) for s in have}) == 1 and all(
            s is not None and not s.assignment.out and s.assignment.servers == len(have) for s in have
        )

    def links(self) -> tuple[list[DirectLink], list[str]]:
        """Links to all servers, and the servers' addresses."""
        addresses = [str(node.index) for node in self.nodes]
        return [self.connect(index, address) for index, address in enumerate(addresses)], addresses

    def connect(self, index: int, address: str) -> DirectLink:
        return DirectLink(self, int(address))


class DirectLink:
    """The root's link to one server."""

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

    def check(self) -> None:
        pass

    def result(
        self, wait_forever: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> Any:
        while True:
            self._world.strikes(self._node)
            if self._node.server is None:
                assert not (self._node.is_gone and wait_forever), "it is waited for without limit"
                # Otherwise a new server is started in its place.
                done_without = (
                    self._world.replicas > 1 and not wait_forever and self._world.random.random() < 0.8
                )
                if self._node.is_gone or done_without:
                    raise ServerAway(f"server {self._node.index}")
                self._node.start()
            try:
                answer = self._act(self._node.start())
            except (Stale, Misplaced, GenerationPending) as error:
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

    def _act(self, server: ParameterServer) -> Any:
        request = self._request
        match self._method:
            case "Pull":
                return pb.Rows(rows=[r.tobytes() for r in server.pull(request)], version=server.version)
            case "List":
                return server.listed(request)
            case "Fetch":
                return self._fetch(server, request)
            case "Describe":
                return server.describe(0.0, request.kept)
            case "StartGeneration":
                return server.mode.start_generation(request)
            case "Begin" | "Push":
                return getattr(server.mode, self._method.lower())(request.SerializeToString())
            case "Lease" | "Drain" | "Reschedule" | "Keep":
                return getattr(server.async_server, self._method.lower())(request)
            case "Declare" | "Committed":
                return getattr(server, self._method.lower())(request)
        return getattr(server.mode, self._method.lower())(request)

    def _fetch(self, server: ParameterServer, request: pb.FetchRequest) -> Any:
        if not (sources := server.mode.fetch(request)):
            return server.position()
        for source in sources:
            giver = self._world.nodes[source]
            for table in range(len(server.tables)):
                page = pb.PageRequest(
                    run_id=RUN,
                    generation=request.generation,
                    step=request.step,
                    of=request.of,
                    to=request.to,
                    index=server.index,
                    table=table,
                    most=600,
                )
                while True:
                    self._world.strikes(self._node, giver)
                    if self._node.server is not server or giver.server is None:
                        giver.start() if self._world.replicas == 1 else None
                        raise Unavailable("away")
                    given = server.mode.take_page(request, giver.server.mode.page(page).SerializeToString())
                    if not given.next:
                        break
                    page.bucket = given.next
        return server.mode.fetched(request)
