# SPDX-License-Identifier: Apache-2.0
"""Two masters in a cluster: one is the leader, one stands by, and the network between all processes breaks.

`Candidate` with its election, both servers, the loop of the master, and the streams of each worker are the
shipped code. They run on a simulated network and a simulated API. In addition to the checks of every run:

- a master that sends orders to a worker has the greatest term of all leaders so far;
- no worker obeys an older master after a newer one;
- no ring comes up under an older master after one came up under a newer one. A ring of one worker needs no
  peers: it may carry out an older master's order late, and then the newer master fences that worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import RunId, WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.contract.reasons import Reason
from edl.kubernetes.client import ApiError
from edl.kubernetes.names import MASTER_PORT
from edl.master import loop
from edl.master.backends.kubernetes.leader_election import Superseded
from edl.master.cluster.candidate import Candidate
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.job import Job
from edl.master.journal.journal import Journal
from edl.master.rpc.server import Server
from edl.master.rpc.standby import vouches
from edl.master.spec import JobSpec
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from tests.simulator.cluster import API, HOSTS, SERVICE, Cluster, SimulatedApi, place
from tests.simulator.fleet import Fleet
from tests.simulator.network import Channel, Network, Pipe, Wire
from tests.simulator.processes import Process
from tests.simulator.worker import Bell, Sim
from tests.support.jobs.invariants import Watchdog

if TYPE_CHECKING:
    from tests.simulator.world import World

RUN, TOKEN = RunId("simulated"), "token"
KINDS = (
    "cut",
    "cut",
    "split",
    "split",
    "split",
    "cut off",
    "cut off",
    "API down",
    "kill master",
    "freeze master",
    "freeze master",
)
SECONDS = (0.5, 2.0, 3.5, 4.5, 7.0, 7.0, 12.0, 20.0)  # of a cut


class Masters:
    """Everything between the workers and the core; the counterpart of `Master` for two masters."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.clock = world, world.random, world.clock
        self.network = Network(self.clock, self.random, self._resolve)
        self.cluster = Cluster(self, self.network, self.random)  # type: ignore[abstract]  # a loop in part
        self.processes: list[MasterProcess] = []
        self.pods: dict[WorkerId, ev.Seen | ev.Gone] = {}  # the last event of each pod
        self.top: Term | None = None  # the greatest term that has begun
        self.terms = 0  # the number of terms so far
        self.ring_term = 0  # the term of the last ring that came up
        self.epochs = world.config.training.epochs
        self.unsettled_until = 0.0  # workers that start until then may be late
        self._first = Watchdog(Job(world.config))

    def _resolve(self, address: str) -> str:
        return self.cluster.acting() if address == SERVICE else address

    def failed(self, error: BaseException) -> None:
        raise error

    # --- as `Master`

    @property
    def watchdog(self) -> Watchdog:
        return self.top.watchdog if self.top is not None else self._first

    @property
    def job(self) -> Job:
        return self.watchdog.job

    @property
    def number(self) -> int:
        """The number of leaders after the first one."""
        return max(self.terms - 1, 0)

    @property
    def lives(self) -> bool:
        return self.top is not None and self.top.process.alive

    def hear(self, event: ev.Event) -> None:
        """Pass pod events to all masters through the API, and users' requests to the leader only."""
        match event:
            case ev.Begin():
                for host in HOSTS:
                    self.clock.later(self.random.random(), lambda host=host: self._start(host))  # type: ignore[misc]
                self.clock.later(self.world.faults.calm_at, self._mend)
            case ev.Seen(worker) | ev.Gone(worker):
                self.pods[worker] = event
                self.cluster.tell(event)
            case _ if self.top is not None:
                self.top.process.call_soon(self.top.master.emit, event)

    def dies(self) -> None:
        acting = [p for p in self.processes if p.process.alive and p.candidate.election.term]
        if acting:
            self._kill(self.random.choice(acting))

    def stall(self, seconds: float) -> None:
        living = [p for p in self.processes if p.process.alive]
        if living:
            self._unsettle(seconds)
            self.random.choice(living).process.stop_for(seconds)

    # --- faults

    def strikes(self, kind: str) -> None:
        seconds = self.random.choice(SECONDS)
        workers = [f"worker-{w.id}" for w in self.world.fleet.workers.values() if w.alive]
        match kind:
            case "cut":
                pairs = [(a, b) for a in HOSTS for b in (*workers, API, HOSTS[1]) if a != b]
                self._cut([pair for pair in pairs if self.random.random() < 0.4], seconds)
            case "split" if self.top is not None:  # the leader keeps some workers, the standby the API
                one = self.top.process.host
                some = [w for w in workers if self.random.random() < 0.5]
                other = [h for h in HOSTS if h != one and self.random.random() < 0.7]
                self._cut([(one, host) for host in (API, *other, *some)], max(seconds, 7.0))
            case "cut off":  # cut one master off from some kinds of peers
                one, kinds = self.random.choice(HOSTS), self.random.choice((1, 2, 3, 4, 5, 6, 7))
                others = [
                    *(workers if kinds & 1 else ()),
                    *([API] if kinds & 2 else ()),
                    *([h for h in HOSTS if h != one] if kinds & 4 else ()),
                ]
                self._cut([(one, other) for other in others], seconds)
            case "API down":
                self._unsettle(seconds)
                self.cluster.down = True
                self.clock.later(seconds, self._api_up)
            case "kill master":
                self.dies()
            case "freeze master":
                self.stall(seconds)

    def _cut(self, pairs: list[tuple[str, str]], seconds: float) -> None:
        self._unsettle(seconds)
        for pair in pairs:
            self.network.cut(*pair)
        self.clock.later(seconds, lambda: self.network.heal(pairs))

    def _unsettle(self, seconds: float) -> None:
        """Excuse starting workers that exceed their time limit, and tolerate late workers for a while."""
        world, now = self.world, self.clock.now
        self.unsettled_until = max(self.unsettled_until, now + seconds + 15.0)
        world.faults.last = max(world.faults.last, now + seconds + 15.0)
        world.faults.to_blame |= {w.id for w in world.fleet.workers.values() if w.alive and not w.is_ready}

    def _api_up(self) -> None:
        self.cluster.down = False

    def _mend(self) -> None:
        self.network.heal(None)
        self._api_up()

    def _start(self, host: str) -> None:
        self.processes.append(MasterProcess(self, host))
        self.cluster.call_later(0.3, self.cluster.ready, host, True)

    def _kill(self, victim: MasterProcess) -> None:
        self._unsettle(5.0)
        victim.process.kill()
        self.cluster.call_later(0.3, self.cluster.ready, victim.process.host, False)
        after = self.random.choice((0.05, 1.0, 5.0)) * self.random.random() + 0.4
        self.clock.later(after, lambda: self._start(victim.process.host))

    # --- the API's side of pods

    def creates(self, worker: WorkerId) -> tuple[int, Any]:
        if worker in self.world.fleet.workers:
            return 409, {"message": "it exists"}
        assert worker == len(self.world.fleet.workers), f"worker {worker} is created out of turn"
        self.world.fleet.create(worker)
        return 201, {}

    def deletes(self, worker: WorkerId, grace: float) -> tuple[int, Any]:
        self.world.fleet.delete(self.world.fleet.workers[worker], grace)
        return 200, {}

    def find_servers(self) -> None:
        """Do nothing, because no master is the leader yet."""

    # --- the leader

    def acts(self, term: Term) -> None:
        """Record that a master has become the leader."""
        world = self.world
        if self.top is None or term.number > self.top.number:
            self.top, self.epochs = term, world.config.training.epochs
            world.checks.waiting = {}
            world.faults.last = max(world.faults.last, self.clock.now)
            for w in world.fleet.workers.values():
                w.fenced = False

    def speaks(self, term: int) -> None:
        """Check that a master that sends an order to a worker has the greatest term."""
        self.terms = max(self.terms, *(p.candidate.election.term for p in self.processes if p.ready))
        assert term == self.terms, f"the master of term {term} speaks, though one has acted in {self.terms}"

    def was_deaf(self, worker: WorkerId) -> bool:
        """Whether messages of this worker may not have reached the leader recently."""
        assert self.top is not None
        host = self.top.process.host
        lately = self.clock.now - self.top.began < 10.0 or self.clock.now < self.unsettled_until
        return lately or self.network.were_cut(host, f"worker-{worker}", 10.0)

    def bury(self) -> None:
        for process in [*(p.process for p in self.processes), self.cluster]:
            process.bury()


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
        adopted = ev.Adopted(found, born, prompt=prompt, prompt_seconds=world.silence)
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
        server = Server(
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
        if acts and now >= masters.unsettled_until:
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


class Stream(MasterStream):
    """A worker's stream, on a loop in simulated time."""

    def __init__(self, w: Sim, fleet: Crew):
        masters = fleet.world.master
        self._w, self._fleet = w, fleet
        self.process = Process(masters.clock, f"worker-{w.id}", masters.failed)  # type: ignore[abstract]  # a loop in part

        def connect(to: str, _options: Any) -> Any:
            return Channel(masters.network, self.process, to)

        brings_state = w.memory is not None and w.memory.is_there
        super().__init__(SERVICE, TOKEN, w.id, "", connect, brings_state=brings_state)
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
            w.greeted = True
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
