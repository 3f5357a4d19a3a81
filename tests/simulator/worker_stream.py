# SPDX-License-Identifier: Apache-2.0
"""Simulated workers whose streams are the shipped code, on the simulated network of two masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from tests.simulator.cluster import SERVICE, TOKEN
from tests.simulator.fleet import Fleet
from tests.simulator.network import Channel
from tests.simulator.processes import Process
from tests.simulator.worker import Bell, Sim

if TYPE_CHECKING:
    from tests.simulator.world import World


class Stream(MasterStream):
    """A worker's stream, on a loop in simulated time."""

    def __init__(self, w: Sim, fleet: Crew):
        masters = fleet.world.master
        self._w, self._fleet = w, fleet
        self.process = Process(masters.clock, f"worker-{w.id}", masters.failed)  # type: ignore[abstract]  # a loop in part

        def connect(to: str, _options: Any) -> Any:
            return Channel(masters.network, self.process, to)

        super().__init__(SERVICE, TOKEN, w.id, "", connect)
        self._loop.close()
        self._loop = self.process
        self._store = NoStore()  # type: ignore[assignment]
        self.session = Session(w.id, self._send, Bell(w))
        self.found: set[tuple[int, int, str]] = set()  # (term, generation, peer) of each peer found
        self.greatest = 0  # the greatest term that it has obeyed

    def connect(self) -> None:
        self._tasks = set()
        self.process.start(self._talk())

    def _send(self, message: pb.FromWorker) -> None:
        self._fleet.world.checks.says_the_truth(self._w, message)
        super()._send(message)

    def _hear(self, message: pb.ToWorker) -> None:
        w, body, term = self._w, message.WhichOneof("body"), message.term
        assert term >= self.greatest, f"worker {w.id} obeys term {term} after {self.greatest}"
        self.greatest = w.master = term
        if body == "form":
            self._fleet.world.rings.opens(w, message)
            self.session.say(message.generation, key_value=pb.KeyValue(key=str(w.id)))
        elif body == "key_value":
            self.found.add((term, message.generation, message.key_value.key))
        elif body == "welcome":
            w.greeted, w.greeted_at = True, self._fleet.clock.now
        elif body == "stop":
            w.stopping = True
            self._fleet.stop(w)
        super()._hear(message)
        if self.session.stopped:
            self._fleet.must_end(w)

    def _end(self, why: str) -> None:
        super()._end(why)
        if self._w.is_ready:
            self._fleet.must_end(self._w)
        else:
            self._fleet.does(self._w, 0.05, lambda: self._fleet.exit(self._w, code=WorkerExit.LOST))


class NoStore:
    """The rendezvous store: simulated rings need no addresses, their members only have to find each other."""

    async def start(self) -> int:
        return 0

    def open(self, generation: int) -> None: ...

    def put(self, generation: int, key: str, value: bytes, times: int = 1) -> None: ...

    def call_off(self) -> None: ...


class Crew(Fleet):
    """Workers with real streams."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.streams: dict[WorkerId, Stream] = {}

    def session(self, w: Sim) -> Session:
        stream = self.streams[w.id] = Stream(w, self)
        return stream.session

    def say(
        self, w: Sim, what: Any
    ) -> None: ...  # messages outside of the stream; the stream itself notices its end

    def create(self, worker: WorkerId) -> None:
        if self.clock.now < self.world.master.unsettled_until:
            self.world.faults.to_blame.add(worker)
        super().create(worker)

    def greet(self, w: Sim) -> None:
        self.streams[w.id].connect()
        self.world.faults.moment("starting")

    def fence(self, w: Sim, fence: ef.Fence) -> None:
        self.world.checks.differs(w, fence)
        if fence.reason is ef.FenceReason.HeartbeatTimeout and not self.world.master.was_deaf(w.id):
            self.world.checks.was_silent(w, fence.why)
        w.fenced = True

    def ends(self, w: Sim, code: int) -> None:
        """Exit after closing the stream, if possible."""
        self.streams[w.id].close(timeout=0.0)
        self.does(w, 0.2, lambda: self.exit(w, code=code))

    def freeze(self, w: Sim, seconds: float) -> None:
        self.streams[w.id].process.stop_for(seconds)
        super().freeze(w, seconds)

    def exit(self, w: Sim, *args: Any, **how: Any) -> None:
        if w.alive:
            super().exit(w, *args, **how)
            self.streams[w.id].process.kill()

    def met(self, form: ef.Form, term: int) -> bool:
        """Whether all members have found each other through their master."""
        members = form.members
        met = all(
            (term, form.generation, str(other)) in self.streams[m].found
            for m in members
            for other in members
            if other != m
        )
        if met and len(members) > 1:
            masters = self.world.master
            assert term >= masters.ring_term, (
                f"a ring comes up in term {term}, after one in {masters.ring_term}"
            )
            masters.ring_term = term
        return met

    def bury(self) -> None:
        for stream in self.streams.values():
            stream.process.bury()
