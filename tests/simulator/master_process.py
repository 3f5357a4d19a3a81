# SPDX-License-Identifier: Apache-2.0
"""The process of one of two simulated masters, over all of its terms: election, server, loop and backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from edl.contract.ids import RunId, WorkerId
from edl.contract.reasons import Reason
from edl.kubernetes.client import ApiError
from edl.kubernetes.names import MASTER_PORT
from edl.master import loop
from edl.master.backends.kubernetes.leader_election import Superseded
from edl.master.cluster.candidate import Candidate
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.journal.journal import Journal
from edl.master.rpc.server import MasterServer
from edl.master.rpc.standby import vouches
from edl.master.spec import JobSpec
from tests.simulator.cluster import API, TOKEN, SimulatedApi, place
from tests.simulator.network import Channel, Pipe, Wire
from tests.simulator.processes import Process
from tests.support.jobs.invariants import Watchdog

if TYPE_CHECKING:
    from tests.simulator.masters import Masters

RUN = RunId("simulated")


class MasterProcess:
    """The process of one master, over all of its terms."""

    def __init__(self, masters: Masters, host: str):
        self.masters, self.world = masters, masters.world
        self.process = Process(masters.clock, host, masters.failed)  # type: ignore[abstract]  # a loop in part
        self.ready = False
        self.process.start(self._main())

    async def _main(self) -> None:
        masters, host = self.masters, self.process.host
        self.api = SimulatedApi(masters.cluster, self.process)
        self.address = f"{host}:{MASTER_PORT}"
        self.candidate = Candidate(
            self.api,
            place(host),
            self._ask,
            self._listener,
            self.address,
            self._prepare,
            self._act,
            lambda: masters.clock.now,
        )
        self.ready = True
        await self.candidate.run()

    def _listener(self) -> Any:
        return Wire(self.masters.network, self.process)

    async def _ask(self, address: str, term: int) -> bool:
        def connect(to: str, _options: Any) -> Any:
            return Channel(self.masters.network, self.process, to)

        return await vouches(address, "edl-master", TOKEN, term, self.api.pace.renew, connect)

    async def _prepare(self) -> None: ...

    async def _act(self) -> None:
        election, world = self.candidate.election, self.world
        news: list[ev.Event] = []
        adopting = asyncio.create_task(self._adopt(news))
        lost = asyncio.create_task(election.lost.wait())
        await asyncio.wait((adopting, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not adopting.done():
            adopting.cancel()
            return
        found, born, follow = adopting.result()
        prompt = tuple(map(WorkerId, sorted(self.candidate.take_witnesses())))
        spec = JobSpec(world.values, world.config)
        past, at = self.masters.left
        active = sum(past.seconds.values()) + self.masters.clock.now - at
        adopted = ev.Adopted(
            found, born, active_seconds=active, prompt=prompt, prompt_seconds=world.silence, past=past
        )
        master = loop.Master(spec, RUN, adopted=adopted)
        term = Term(self.masters, self.process, election.term, master)
        self.masters.acts(term)
        if world.servers is not None:

            def hear(event: ev.Event) -> None:
                self.process.call_soon(master.emit, event)

            acts = lambda: self.masters.top is term and self.process.alive  # noqa: E731
            master.servers = world.servers.another_master(hear, acts)
        for event in news:
            master.emit(event)
        follow.append(master.emit)
        outage = world.config.elastic.master_outage_timeout_seconds
        server = MasterServer(
            master,
            self._listener(),
            json.dumps(world.values),
            "",
            outage,
            authority=Checked(self.masters, election),
        )
        await server.start(self.address)
        over = asyncio.create_task(self.candidate.until(asyncio.Event()))
        over.add_done_callback(lambda _: master.abandon())
        try:
            await master.run(Pods(self.api, term), server, cast(Journal, NoJournal()))
        finally:
            over.cancel()
            follow.clear()
            await server.close()

    async def _adopt(self, news: list[ev.Event]) -> tuple[Any, int, list[Callable[[Any], None]]]:
        """List the live workers through the API. Further pod events go to `news`, or to the followers."""
        cluster, process, world = self.masters.cluster, self.process, self.world
        answered = process.create_future()
        told: list[Callable[[Any], None]] = []

        def hears(event: Any) -> None:
            if isinstance(event, tuple):
                if not answered.done():
                    answered.set_result(event)
                return
            for tell in told or [news.append]:
                tell(event)

        back = Pipe(self.masters.network, API, process, hears)

        def look(_: object) -> None:
            workers = world.fleet.workers
            found = tuple((w.id, "pid" if w.placed else "") for w in workers.values() if w.alive)
            back.put((found, len(workers)))
            cluster.follows(back)

        Pipe(self.masters.network, process.host, cluster, look).put(None)
        found, born = await answered
        return found, born, told


class Checked:
    """The election as the server's authority, with a check that only the leader sends orders."""

    def __init__(self, masters: Masters, election: Any):
        self._masters, self._election = masters, election
        self.outranked = election.outranked

    @property
    def term(self) -> int:
        return int(self._election.term)

    @property
    def standbys(self) -> tuple[str, ...]:
        return tuple(self._election.standbys)

    async def confirmed(self) -> bool:
        may = await self._election.confirmed()
        if may:
            self._masters.speaks(self.term)
        return bool(may)


class NoJournal:
    trouble, full = "", False

    def note(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None: ...


class Pods:
    """The backend: sends requests to the API one by one, and retries until the API answers."""

    def __init__(self, api: SimulatedApi, term: Term):
        self._api, self._term = api, term
        self._orders: asyncio.Queue[ef.Create | ef.Delete] = asyncio.Queue()

    async def start(self) -> None:
        self._writing = asyncio.create_task(self._write())
        self._writing.add_done_callback(self._term.process.ended)

    def perform(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.Create | ef.Delete):
            self._orders.put_nowait(effect)

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        self._writing.cancel()

    async def _write(self) -> None:
        path = "/api/v1/namespaces/n/pods"
        while True:
            order = await self._orders.get()
            while True:
                try:
                    if isinstance(order, ef.Create):
                        await self._api.create(path, {"metadata": {"name": str(order.worker)}})
                    else:
                        grace = {"gracePeriodSeconds": order.grace_period_seconds}
                        await self._api.delete(f"{path}/{order.worker}", grace)
                except Superseded:
                    return
                except ApiError as error:
                    if error.out:
                        await asyncio.sleep(0.5)
                        continue
                    last = self._term.masters.pods.get(order.worker)
                    if error.status == 409 and last is not None:  # a late request created it
                        self._term.master.emit(last)
                break


class Term:
    """A leader's term: its core, with the watchdog's checks."""

    def __init__(self, masters: Masters, process: Process, number: int, master: loop.Master):
        self.masters, self.process, self.number, self.master = masters, process, number, master
        self.began = masters.clock.now
        self.watchdog = Watchdog(master.job)
        self._job = master.job
        master.job = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        """Handle an event in place of the core, with all checks."""
        masters, world = self.masters, self.masters.world
        acts = masters.top is self  # else a newer leader exists, and nothing obeys this one
        checks, ought = world.checks, None
        if acts and isinstance(event, ev.Gone):
            ought = checks.ought_to_be_charged(event)
        if acts and isinstance(event, ev.Live):
            masters.epochs = event.epochs
        effects = self.watchdog.handle(event, now)
        if world.talk:
            print(f"{now:9.3f} term {self.number}{'' if acts else ' (superseded)'}: {event}")
            for effect in effects:
                print(f"{'':12}-> {effect}")
        for effect in effects:
            if isinstance(effect, ef.Form):
                if acts:
                    checks.keeps_the_state(effect, effects)
                world.rings.form(effect, self.number)
            if acts:
                self._note(effect)
        if isinstance(event, ev.Gone) and ought is not None and now >= masters.unsettled_until:
            checks.is_charged(event, ought)
        if acts:
            checks.hears(event, self._job.ring.generation)
            checks.tells_losses(effects)
            masters.shows(self._job)
        if acts and now >= masters.unsettled_until:
            checks.keeps_replacements(effects)
            checks.nobody_waits_long()
        return effects

    def _note(self, effect: ef.Effect) -> None:
        world = self.masters.world
        match effect:
            case ef.Form():
                world.faults.moment("forming")
            case ef.Leave():
                world.faults.moment("draining")
            case ef.Export():
                world.faults.moment("exporting")
            case ef.Fence(worker):
                late = effect.reason is ef.FenceReason.StartupTimeout
                if late and self.masters.clock.now < self.masters.unsettled_until + 10.0:
                    world.faults.to_blame.add(worker)  # or the network lost its messages
                world.fleet.fence(world.fleet.workers[worker], effect)
            case ef.Notice(Reason.SpecRefused):
                world.refused = True
            case ef.End():
                world.ended = effect
