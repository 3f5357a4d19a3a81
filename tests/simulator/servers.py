"""The parameter servers of a simulated job: their processes, which are killed and come back with their log
or without it, and the calls that workers make, in virtual time.

What a server does with a call is tests/fakes/parameter_server.py; what a worker asks, in which order, and
what it makes of the answers is what ships (trainer/servers.py). Only the link is another one: it waits in
virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from edl.errors import CheckpointError
from tests.counting_rows import counts
from tests.fakes.parameter_server import FakeServer, Refused, Unsettled
from trainer.ring.base import RingBroken
from trainer.server_link import Interrupt
from trainer.servers import ParameterServers

if TYPE_CHECKING:
    from tests.simulator.worker import Sim
    from tests.simulator.world import World

KINDS = ("kill server", "lose server")  # with its log, or without
AGAIN_SECONDS = 0.05
LOOK_SECONDS = 1.0


class Process:
    """One server's process, and those that follow it in its place."""

    def __init__(self, server: FakeServer):
        self.server = server
        self.alive = True
        self.life = 0  # which process it is
        self.waiting: list[Callable[[], None]] = []  # calls of a generation that is not settled


class Servers:
    """All servers of one run."""

    def __init__(self, world: World, count: int) -> None:
        self.world, self.clock = world, world.clock
        self.random = random.Random(f"servers of {world.seed}")  # so that a seed's other choices stay
        self.count = count
        self.processes = [Process(self._fresh(index)) for index in range(count)]
        self.went_back: list[int] = []  # to which step
        self.judged = False

    def _fresh(self, index: int) -> FakeServer:
        return FakeServer(index, self.count, self.world.store)

    def schedule(self, until: float) -> None:
        """Servers are killed until then."""
        at, rate = 0.0, self.random.choice((0.2, 0.6, 1.5))
        while (at := at + self.random.expovariate(rate)) < until:
            self.clock.later(at, self.strike)

    def strike(self) -> None:
        """One or all of them die."""
        if self.world.ended:
            return
        victims = [self.random.choice(self.processes)] if self.random.random() < 0.8 else self.processes
        for process in victims:
            self.kill(process)

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.world.faults.last = self.clock.now
        process.alive, process.waiting, process.life = False, [], process.life + 1
        kept = self.random.random() < 0.7
        self.world.faults.kinds[KINDS[not kept]] += 1
        self.clock.later(self.random.choice((0.02, 0.3, 3.0)), lambda: self._comes_back(process, kept))

    def _comes_back(self, process: Process, kept: bool) -> None:
        if not kept:
            process.server = self._fresh(process.server.index)
        process.alive, self.world.faults.last = True, self.clock.now

    def of(self, w: Sim) -> SimServers:
        """As one worker sees them."""
        interrupt = Interrupt()
        links = [SimLink(w, self, process, interrupt) for process in self.processes]
        return SimServers(self, links, interrupt)

    def judge(self, w: Sim) -> bool:
        """The rows of the state that a worker has count what its model counts; False: some are lost."""
        servers = [process.server for process in self.processes]
        if any(server.step != w.step or server.empty for server in servers):
            return False
        found = counts(servers, len(w.weights))
        wrong = np.flatnonzero(found != w.weights)
        assert not len(wrong), f"the rows of {wrong} count {found[wrong]}, the model {w.weights[wrong]}"
        self.judged = True
        return True


class SimServers(ParameterServers):
    """What ships, with a note of what goes back."""

    def __init__(self, servers: Servers, links: list[SimLink], interrupt: Interrupt):
        super().__init__(links, "a-run", 0, interrupt)
        self._servers = servers
        self.restored = False  # in this ring

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        self.restored = False
        super().enter(addresses, servers)

    def restore(self, step: int, attempt: str) -> None:
        self.restored = True
        self._servers.went_back.append(step)
        super().restore(step, attempt)


class SimLink:
    """One server, as one worker calls it."""

    def __init__(self, w: Sim, servers: Servers, process: Process, interrupt: Interrupt):
        self.w, self.servers, self.process, self.interrupt = w, servers, process, interrupt

    def begin(self, method: str, request: Any, generation: int | None = None) -> SimCall:
        return SimCall(self, method, request, generation)

    def write_part(self, request: Any) -> SimWriting:
        return SimWriting(SimCall(self, "WritePart", request, None))

    def tell(self, method: str, request: Any) -> None:
        process = self.process
        later = self.servers.random.expovariate(200)
        self.servers.clock.later(
            later, lambda: process.server.handle(method, request) if process.alive else None
        )


class SimCall:
    """A call: it arrives a little later, and so does its answer, unless the server dies in between."""

    def __init__(self, link: SimLink, method: str, request: Any, generation: int | None):
        self._link, self._method, self._request, self._generation = link, method, request, generation
        self._attempt = 0
        self.answer: Any = None
        self.error: Refused | None = None
        self.is_lost = False  # this attempt fails
        self._cancelled = False
        link.interrupt.begins(self)
        self._send()

    def cancel(self) -> None:
        """From the interrupt."""
        self._cancelled = True
        w = self._link.w
        w.fleet.does(w, 0, w.go_on)

    def forget(self) -> None:
        self._link.interrupt.ends(self)
        self._attempt += 1  # what is on its way arrives, and its answer is nobody's

    def _send(self) -> None:
        servers, w, process = self._link.servers, self._link.w, self._link.process
        self._attempt, self.is_lost = self._attempt + 1, False
        attempt, life = self._attempt, process.life

        def comes_back(answer: Any, error: Refused | None) -> None:
            if attempt == self._attempt:
                self.answer, self.error = answer, error
                self.is_lost = answer is None and error is None
                w.go_on()

        def arrives() -> None:
            answer = error = None
            if process.alive and process.life == life:
                try:
                    answer = process.server.handle(self._method, self._request)
                except Unsettled:
                    process.waiting.append(arrives)
                    return
                except Refused as refused:
                    error = refused
                if self._method in ("Settle", "Restore"):
                    waiting, process.waiting = process.waiting, []
                    for one in waiting:
                        one()
            w.fleet.does(w, servers.random.expovariate(500), lambda: comes_back(answer, error))

        servers.clock.later(servers.random.expovariate(500), arrives)

    @property
    def _done(self) -> bool:
        return self.answer is not None or self.error is not None or self.is_lost

    def once(self) -> Any:
        """The answer to one attempt; None: the server died."""
        w, since = self._link.w, self._link.w.clock.now
        while not self._done and not self._cancelled:
            # What waits at a server that has died is lost with it: nobody says so here.
            w.waits(lambda: self._done or self._cancelled, LOOK_SECONDS)
            if w.clock.now - since >= LOOK_SECONDS and not self._done:
                self._look()
                self.is_lost = not self._link.process.alive
        if self._cancelled:
            raise RingBroken("the ring was cut while a parameter server was waited for")
        if self.error is not None:
            if self.error.code is grpc.StatusCode.ABORTED:
                raise RingBroken(str(self.error))
            raise self.error
        return None if self.is_lost else self.answer

    def result(self, patient: bool = False) -> Any:
        while (answer := self.once()) is None:
            self._link.w.waits(lambda: self._cancelled, AGAIN_SECONDS)
            self._look()
            self._send()
        self.forget()
        return answer

    def _look(self) -> None:
        process = self._link.process
        if self._generation is not None and process.alive and process.server.generation != self._generation:
            raise RingBroken("a parameter server has come back without its log")


class SimWriting:
    def __init__(self, call: SimCall):
        self._call = call
        self._written: Any = None

    def taken(self) -> None:
        try:
            self._written = self._call.once()
        except (RingBroken, Refused) as error:
            raise CheckpointError(str(error)) from error
        finally:
            self._call.forget()
        if self._written is None:
            raise CheckpointError("a parameter server has died")

    def written(self) -> Any:
        if self._written.why:
            raise CheckpointError(self._written.why)
        return self._written
