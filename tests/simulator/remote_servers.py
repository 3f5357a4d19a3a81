# SPDX-License-Identifier: Apache-2.0
"""A simulated master's view of its parameter servers: the shipped RemoteServers, polling in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.base import ANSWER_SECONDS, LOOK_SECONDS
from edl.master.parameter_servers.monitor import Watch
from edl.master.parameter_servers.remote import RemoteServers
from edl.trainer.ps_client.multiplex import Failed
from tests.simulator.server_processes import LATENCY

if TYPE_CHECKING:
    from tests.simulator.servers import Servers


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class SimRemoteServers(RemoteServers):
    """A master's handling of its servers."""

    def __init__(self, servers: Servers, hear: Callable[[ev.Event], None], acts: Callable[[], bool]):
        running = lambda: sum(place.wanted for place in servers.places)  # noqa: E731
        super().__init__(hear, str, "ps-{}".format, servers.wanted, servers.scale, running=running)
        self._watch = SimWatch(servers, hear, self._looked, acts)
        self._places = servers

    def perform(self, effect: ef.ForServers) -> None:
        if isinstance(effect, ef.RestartServer):
            self._places.stuck.restart(effect.server)
        super().perform(effect)


class SimWatch(Watch):
    """The master's polling of its servers, while it is the leader."""

    def __init__(
        self,
        servers: Servers,
        hear: Callable[[ev.Event], None],
        looked: Callable[[], None],
        acts: Callable[[], bool],
    ):
        super().__init__(hear, str, servers.wanted, looked, restarts=servers.restarts)
        self._places, self._acts = servers, acts

    def find(self, index: int, address: str) -> None:
        server = self._servers[index]
        if server.address != address:
            server.address = address
            self._question(server)

    def _question(self, server: Any) -> None:
        clock, chance, place = self._places.clock, self._places.random, self._places.at(server.address)
        asked, answered = clock.now, False

        def hears(answer: bytes | Failed) -> None:
            nonlocal answered
            if not answered and self._goes_on(server):
                answered = True
                self._hears(server, answer, asked)
                clock.later(LOOK_SECONDS, lambda: self._question(server) if self._goes_on(server) else None)

        def comes_back(answer: bytes | Failed) -> None:
            clock.later(chance.expovariate(LATENCY), lambda: hears(answer))

        raw = pb.DescribeRequest().SerializeToString()
        clock.later(chance.expovariate(LATENCY), lambda: place.ask("Describe", raw, comes_back))
        late = Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
        clock.later(ANSWER_SECONDS, lambda: hears(late))

    def _goes_on(self, server: Any) -> bool:
        return self._acts() and server in self._servers

    def _hears(self, server: Any, answer: bytes | Failed, asked: float) -> None:
        now = self._places.clock.now
        if isinstance(answer, Failed):
            if answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # else it is known that no process listens
                self._left_unanswered(server)
            self._unanswered(server, asked)
        else:
            self._answered(server, pb.Description.FromString(answer), now)
        self._tell_of_silent(now)
