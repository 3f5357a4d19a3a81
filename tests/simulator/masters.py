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

from typing import TYPE_CHECKING, Any

from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.core.job import Job
from edl.master.jobs import new_job
from tests.simulator.cluster import API, HOSTS, SERVICE, Cluster
from tests.simulator.master import left_by
from tests.simulator.master_process import MasterProcess, Term
from tests.simulator.network import Network
from tests.support.jobs.invariants import Watchdog

if TYPE_CHECKING:
    from tests.simulator.world import World

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
        self.left = facts.Past({}, "starting"), 0.0  # the status for the next master, and when it was written
        self._shown = ""  # the phase in that status
        self.unsettled_until = 0.0  # workers that start until then may be late
        self._first = Watchdog(new_job(world.config))

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

    @property
    def hears_since(self) -> float:
        return self.unsettled_until

    @property
    def greets_as(self) -> int:
        assert self.top is not None
        return self.top.number

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

    def shows(self, job: Job) -> None:
        """Write the status: a new phase at once, other changes once a second."""
        if job.phase != self._shown or self.clock.now >= self.left[1] + 1.0:
            self.left, self._shown = left_by(job, self.clock.now), job.phase

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
