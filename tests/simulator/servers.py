# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of a simulated job: their master's view, users' requests, faults and checks.

The servers (server_processes.py), the calls of workers (server_calls.py) and their handling of the answers
are the shipped code. So is the master's handling of servers on a cluster (remote_servers.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from edl.contract.proto import ps_pb2 as ps
from edl.contract.reasons import Reason
from edl.contract.rows.placement import ShardAssignment
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.multiplex import Failed
from tests.simulator import server_checks
from tests.simulator.remote_servers import SimRemoteServers, at_once
from tests.simulator.server_calls import SimInterrupt, SimLink
from tests.simulator.server_processes import RUN, Place
from tests.simulator.stuck_servers import StuckServers

if TYPE_CHECKING:
    from tests.simulator.worker import Sim
    from tests.simulator.world import World

# A server dies with its log, or without it; it hangs; the number of servers changes.
KINDS = ("kill server", "lose server", "hang server", "servers")
KINDS_OF_JOBS = ("hybrid", "ps", "moves", "ps-copies", "copies")  # used in turn by runs with servers
# Special kinds: jobs with checkpoints that lose all their processes and logs at once. The second kind has
# mode=ps and two copies of all rows.
GONE, GONE_COPIES = "gone", "gone-copies"
GONES = GONE, GONE_COPIES
# Special kinds: servers that hang until the master restarts their processes. Two jobs in three have two
# copies of all rows. The second kind has mode=ps.
STUCK, STUCK_PS = "stuck", "stuck-ps"
STUCKS = STUCK, STUCK_PS
MAX_SERVERS = 4
MOVED_SECONDS = 20.0  # time limit for moving the rows to the requested servers
# Calls during the forming of a ring, at which any participant may die.
CRITICAL = {
    "Declare": "settling",
    "StartGeneration": "settling",
    "Restore": "settling",
    "Begin": "settling",
    "Reschedule": "settling",
    "Fetch": "moving",
    "Page": "moving",
    "Assign": "moving",
    "Keep": "keeping",
    "Drain": "keeping",
}
MOMENTS = tuple(dict.fromkeys(CRITICAL.values()))
AMBUSH = {"settling": 0.04, "moving": 0.15, "keeping": 0.03}  # the probability of a fault at these calls
WRITES = ("WritePart", "Committed")  # calls during a checkpoint


class Servers:
    """All servers of one run."""

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.clock, self.kind = world, world.clock, kind
        self.random = random.Random(f"servers of {world.seed}")  # so that a seed's other choices stay
        self.fate = random.Random(f"when all is lost of {world.seed}")
        self.doomed = self.fate.choice((1, 1, 2, 3)) if kind in GONES else 0  # how often everything is lost
        self.config = world.config.ps
        self.wanted = self.config.servers  # requested by users
        self.wanted_since = 0.0
        self.places = [Place(self, index) for index in range(self.wanted)]
        self.rolled_back: list[int] = []  # the steps of the restored checkpoints
        self.judged = False
        self.backend: SimRemoteServers | None = None
        self.stuck = StuckServers(self)

    @property
    def moves(self) -> bool:
        return self.kind in ("moves", "copies", "ps-copies", *GONES)

    @property
    def restarts(self) -> bool:
        """Whether the master restarts the processes of servers that hang."""
        return self.kind in STUCKS

    def place(self, index: int) -> Place:
        """The place of the server with this number; created on first use."""
        self.places += [Place(self, more) for more in range(len(self.places), index + 1)]
        return self.places[index]

    def at(self, address: str) -> Place:
        return self.place(int(address.removeprefix("ps-")))

    def bury(self) -> None:
        for place in self.places:
            place.bury()

    # --- as their masters see them

    def another_master(self, hear: Callable[[ev.Event], None], acts: Callable[[], bool]) -> SimRemoteServers:
        """Start the server handling of a new master, which knows only the requested number of servers.

        Args:
            hear: takes the events of servers.
            acts: whether this master is still the leader.
        """
        self.backend = SimRemoteServers(self, hear, acts)
        at_once(self.backend.start())
        return self.backend

    def addresses(self) -> tuple[str, ...]:
        assert self.backend is not None
        found: tuple[str, ...] = at_once(self.backend.addresses())
        return found

    def perform(self, effect: ef.ForServers) -> None:
        assert self.backend is not None
        self.backend.perform(effect)

    def scale(self, servers: int) -> None:
        """Scale the servers a little later, like the cluster."""
        self.clock.later(self.random.choice((0.0, 0.05, 0.5)), lambda: self._run(servers))

    def _run(self, servers: int) -> None:
        if self.backend is None or servers != self.backend._scaled:
            return  # the number has changed meanwhile
        for index in range(servers):
            self._wants(self.place(index))
        for place in self.places[servers:]:
            if place.wanted:
                place.wanted = False
                self.stuck.forget(place)
                place.kill(lose=self.random.random() < 0.5)  # its volume may stay

    def _wants(self, place: Place) -> None:
        if not place.wanted:
            place.wanted = True
            self.starts(place, self.random.choice((0.02, 0.3, 1.0)))

    def starts(self, place: Place, seconds: float) -> None:
        self.clock.later(seconds, place.start)

    # --- users' requests

    def wants(self, servers: int) -> None:
        """Request a different number of servers. The chart starts missing servers, but stops none."""
        if self.world.ended or servers == self.wanted:
            return
        self.wanted, self.wanted_since = servers, self.clock.now
        self.world.faults.kinds["servers"] += 1
        self.world.faults.last = self.clock.now
        self.world.wants_servers(servers)
        for index in range(servers):
            self._wants(self.place(index))
        if self.backend is not None and self.world.master.lives:
            self.backend.resize(servers)

    # --- faults

    def schedule(self, until: float) -> None:
        """Schedule faults of servers, and changes of their number, until this time."""
        at, rate = 0.0, self.random.choice((0.2, 0.6, 1.5)) / (8 if self.world.gone else 1)
        while (at := at + self.random.expovariate(rate)) < until:
            self.clock.later(at, self.strike)
        if self.doomed and self.fate.random() < 0.5:  # else while a checkpoint is written
            self.clock.later(self.fate.uniform(0, 10), self.lose_everything)
        if self.kind in STUCKS:
            self.stuck.schedule(until)
        if self.moves:
            at, rate = 0.0, self.random.choice((0.1, 0.3, 1.0)) / (4 if self.world.gone else 1)
            while (at := at + self.random.expovariate(rate)) < until + 3:
                least = self.config.replicas
                servers = self.random.randint(least, MAX_SERVERS)
                self.clock.later(at, lambda servers=servers: self.wants(servers))  # type: ignore[misc]

    def strike(self, place: Place | None = None) -> None:
        """Let one or all servers die or hang."""
        if self.world.ended:
            return
        there = [p for p in self.places if p.wanted]
        victims = [self.random.choice(there)] if self.random.random() < 0.8 else there
        for victim in victims if place is None else [place]:
            if self.random.random() < 0.2:
                self.hang(victim)
            else:
                self.kill(victim)

    def lose_everything(self) -> None:
        """Lose all machines: all workers, all servers with their logs, and perhaps the master.

        Only checkpoints are left.
        """
        world = self.world
        if world.ended or not self.doomed or self.clock.now >= world.faults.calm_at:
            return
        self.doomed -= 1
        world.faults.kinds["everything"] += 1
        acts = [partial(world.fleet.exit, w, "SIGKILL") for w in world.fleet.workers.values() if w.alive]
        acts += [partial(self._loses_all, place) for place in self.places]
        for act in acts:
            self.clock.later(self.fate.uniform(0, 0.05), act)
        if world.master.lives and self.fate.random() < 0.3:
            world.faults.kinds["new master"] += 1
            world.master.dies()

    def _loses_all(self, place: Place) -> None:
        self.note_fault()
        self.stuck.forget(place)
        place.kill(lose=True)
        self.starts(place, self.fate.choice((0.02, 0.3, 3.0)))
        self.clock.later(3.0, self.note_fault)

    def kill(self, place: Place) -> None:
        if not place.alive:
            return
        self.world.faults.last = self.clock.now
        self.stuck.forget(place)
        lose = self.random.random() < 0.3
        self.world.faults.kinds[KINDS[lose]] += 1
        place.kill(lose)
        self.starts(place, self.random.choice((0.02, 0.3, 3.0)))
        self.clock.later(3.0, self.note_fault)

    def hang(self, place: Place) -> None:
        if not place.alive or place.frozen:
            return
        self.world.faults.kinds["hang server"] += 1
        seconds = self.random.choice((0.3, 1.5, 4.0))
        place.stop_for(seconds)
        self.clock.later(seconds, self.note_fault)

    def note_fault(self) -> None:
        """Record the end of a fault: until now, workers may have waited for this server."""
        self.world.faults.last = self.clock.now

    def called(self, place: Place, method: str) -> None:
        """Perhaps strike when a call arrives at a server."""
        if method in WRITES and self.doomed and self.fate.random() < 0.1:
            self.clock.later(self.fate.choice((0.0, 0.002, 0.1, 1.0)), self.lose_everything)
        moment = CRITICAL.get(method)
        faults = self.world.faults
        if moment is None or self.clock.now >= faults.calm_at or self.random.random() >= AMBUSH[moment]:
            return
        faults.moments[moment] += 1
        later = self.random.choice((0.0, 0.0, 0.001, 0.003))
        match self.random.choice(("this", "another", "root", "master", "members")):
            case "this":
                self.clock.later(later, lambda: self.strike(place))
            case "another":
                self.clock.later(later, lambda: self.strike(self.random.choice(self.places)))
            case "root" if self.world.rings.forms:
                root = self.world.rings.forms[-1].root
                self._strike_worker(root, later)
            case "members" if self.world.rings.forms:
                for member in self.world.rings.forms[-1].members:
                    self._strike_worker(member, later + self.random.random() * 0.005)
            case "master" if self.world.master.lives:
                faults.kinds["new master"] += 1
                self.clock.later(later, lambda: self.world.master.lives and self.world.master.dies())

    def _strike_worker(self, worker: Any, later: float) -> None:
        w, faults = self.world.fleet.workers[worker], self.world.faults
        if w.alive and self.random.random() < 0.3:
            faults.kinds["freeze"] += 1
            seconds = self.random.choice((0.3, 2.5))
            self.clock.later(later, lambda: w.alive and self.world.fleet.freeze(w, seconds))
        else:
            faults.kinds["kill"] += 1
            self.clock.later(later, lambda: self.world.fleet.exit(w, "SIGKILL"))

    # --- as workers see them

    def of(self, w: Sim) -> PsClient:
        """The client of one worker."""
        interrupt, addresses = SimInterrupt(w), self.addresses()
        replicas = self.config.replicas
        patience = None if replicas < 2 else self.config.timeout_seconds

        def connect(index: int, address: str) -> SimLink:
            return SimLink(w, self.at(address), interrupt, patience)

        links = [connect(index, address) for index, address in enumerate(addresses)]
        if self.world.config.asynchronous:
            how = self.config
            return PsClient(
                links,
                RUN,
                0,
                interrupt,
                replicas,
                connect,
                addresses,
                ps.Asynchronous(
                    grads_to_wait=how.grads_to_wait,
                    max_staleness=how.max_staleness,
                    scale_rate=how.scale_rate_by_staleness,
                ),
            )
        return SimServers(self, links, interrupt, replicas, connect, addresses)

    # --- checks

    def speaks(self, w: Sim, place: Place, method: str, request: Any) -> ShardAssignment | None:
        """Return the assignment in which a worker calls a server; None if it must not be checked.

        A checkpoint part is as of its begin, but answered later.
        """
        if method not in ("Pull", "Push", "List") or not request.generation:
            return None
        assert w.servers is not None
        return w.servers.assignment

    def answered(
        self, place: Place, method: str, request: Any, answer: bytes | Failed, spoken: ShardAssignment | None
    ) -> None:
        """Check that a server that has served a call has the caller's assignment."""
        if spoken is not None and isinstance(answer, bytes) and place.server is not None:
            there = place.server.assignment
            assert there == spoken, (
                f"server {place.index} is one of {there}, and obeys a caller that uses {spoken} ({method})"
            )

    def meets(self, members: Sequence[Sim]) -> None:
        """Check the servers when the members of a ring make a step."""
        if not self.world.config.asynchronous:
            server_checks.of_members(self, members)

    def moves_end(self) -> None:
        """Check that, between faults, rows move soon to the requested servers, or a notice says why not."""
        job, now = self.world.job, self.clock.now
        known = job.servers
        if not (job.ring.running and job.ring.up and known.have and known.wanted):
            return
        # A ring of mode=ps moves them after it is up.
        since = self.world.faults.last, self.wanted_since, job.ring.changes[-1].formed_at
        if now - max(since) <= MOVED_SECONDS:
            return
        stays = any(
            isinstance(effect, ef.Notice) and effect.reason is Reason.ReshardFailed
            for _, _, effects in self.world.watchdog.history
            for effect in effects
        )
        assert known.have == self.wanted or stays, (
            f"rows are on {known.have} servers for long, not {self.wanted}"
        )

    def judge(self, w: Sim) -> bool:
        """Check that the servers have the state of this worker's model; False if a part is unavailable."""
        judge = server_checks.of_steps if self.world.config.asynchronous else server_checks.of_ring
        self.judged = self.judged or judge(self, w)
        return self.judged


class SimServers(PsClient):
    """The shipped client, with a record of its rollbacks."""

    def __init__(
        self,
        servers: Servers,
        links: Sequence[SimLink],
        interrupt: SimInterrupt,
        replicas: int,
        connect: Callable[[int, str], SimLink],
        addresses: Sequence[str],
    ):
        super().__init__(links, RUN, 0, interrupt, replicas, connect, addresses)
        self._servers = servers
        self.restored = False  # whether this ring restored a checkpoint

    def enter(self, addresses: Sequence[str] = (), servers: int = 0, released_from: int = 0) -> None:
        self.restored = False
        super().enter(addresses, servers, released_from)

    def restore(self, step: int, attempt: str, lost: Iterable[int] | None = None) -> None:
        self.restored = True
        self._servers.rolled_back.append(step)
        super().restore(step, attempt, lost)
