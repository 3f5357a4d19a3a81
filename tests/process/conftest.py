# SPDX-License-Identifier: Apache-2.0
"""A real job in a test: the real master in this process, with real workers as subprocesses.

A test waits for events and effects of the master, and never for a fixed time. The job idles until the test
has done its work, so it never ends earlier, however slow the machine. Workers are forked from a forkserver.
The model is the counting model, so the weights always decide whether the job was right.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.contract.reasons import Reason
from edl.journal import audit
from edl.master.__main__ import processes, servers_of
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.loop import Master
from edl.master.service import serve
from edl.master.spec import JobSpec, checked
from tests.support.fakes.kubernetes_api import KubernetesApi, serving
from tests.support.jobs import shared_forks
from tests.support.jobs.evidence import CRASHES, check_weights
from tests.support.kubernetes.release_commands import Cluster, commanded
from tests.support.kubernetes.small_release import Release
from tests.support.kubernetes.small_server import SECOND, install

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
SECONDS = 60.0
# Each Python version that edl supports, and its path on this machine; "" if it is not installed.
FIND = '. scripts/dev/lib.sh; for v in $pythons; do echo "$v $(find_python "$v" 2>/dev/null)"; done'
PYTHONS = dict(
    line.split(" ", 1)
    for line in subprocess.check_output(["bash", "-c", FIND], cwd=ROOT, text=True).splitlines()
)


def pytest_report_header() -> str:
    return "pythons: " + ", ".join(
        f"{v} {where or 'was not found and is not tested'}" for v, where in PYTHONS.items()
    )


class Orders:
    """Orders to the faulty counting model, sent as files. Its job idles until `go`."""

    def __init__(self, directory: Path):
        directory.mkdir()
        self.directory = directory
        self.idle()

    def idle(self) -> None:
        """Make every worker slow in each batch."""
        (self.directory / "idle").touch()

    def go(self) -> None:
        """Train the remaining records at full speed."""
        (self.directory / "idle").unlink(missing_ok=True)

    def say(self, order: str) -> None:
        """Send an order to all workers that look for it."""
        (self.directory / order).touch()

    def give(self, pid: int, what: str) -> None:
        """Make the worker with this process ID misbehave."""
        (self.directory / str(pid)).write_text(what)


class Running:
    """A running job, with the actions of a test as methods."""

    def __init__(self, output: Path, records: int, epochs: int, sets: list[str], orders: Orders):
        self.output, self.records, self.epochs, self._orders = output, records, epochs, orders
        merged = values.load([], [f"training.epochs={epochs}", *sets])
        self.master = Master(JobSpec.parse(merged), RunId(secrets.token_hex(8)), [self._observe])
        self.seen: list[tuple[float, ev.Event, list[ef.Effect]]] = []
        self.heartbeats = 0  # the number of heartbeats received
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._emit, self.master.emit = self.master.emit, self._hear  # type: ignore[method-assign]

    def _hear(self, said: ev.Event | facts.Heartbeat) -> None:
        """Pass a message to the master. Heartbeats are no events, but tests also wait for their contents."""
        self._emit(said)
        self.heartbeats += isinstance(said, facts.Heartbeat)
        self._changed.set()

    def _observe(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        self.seen.append((now, event, effects))
        self._changed.set()

    # --- state

    @property
    def job(self) -> Any:
        return self.master.job

    @property
    def ring(self) -> list[int]:
        """The members of the running ring, by rank; empty during a ring change."""
        job = self.job
        whole = job.ring.members and not job.ring.closing and job.ring.up
        return list(job.ring.members) if whole else []

    def pid(self, worker: int) -> int:
        """The process of a worker, which may be lost already, until its exit is reported."""
        return int((self.job.pool.get(worker) or self.job.pool.lost[worker]).handle)

    def noticed(self, reason: Reason) -> list[str]:
        """The texts of the core's notices of this reason."""
        notices = (e for _, _, effects in self.seen for e in effects if isinstance(e, ef.Notice))
        return [notice.text for notice in notices if notice.reason is reason]

    def fenced(self, worker: int) -> ef.FenceReason | None:
        """Why the core has fenced this worker; None if it has not."""
        fences = (e for _, _, effects in self.seen for e in effects if isinstance(e, ef.Fence))
        return next((f.reason for f in fences if f.worker == worker), None)

    def gone(self, worker: int) -> ev.Gone | None:
        return next((e for _, e, _ in self.seen if isinstance(e, ev.Gone) and e.worker == worker), None)

    def applied(self) -> int:
        """Records that are safely in the model."""
        return int(self.status["records"]["applied"])

    @property
    def status(self) -> dict[str, Any]:
        return self.master.status(asyncio.get_running_loop().time())

    # --- waiting

    # Not Callable[[], ...]: a lambda in a loop binds its variables by default arguments.
    async def until(self, happens: Callable[..., Any], seconds: float = SECONDS) -> Any:
        """Wait for and return the first true value of `happens`, called after every event and heartbeat."""
        async with asyncio.timeout(seconds):
            while not (value := happens()):
                assert self._task is None or not self._task.done(), f"the job has ended: {self.job.reason}"
                self._changed.clear()
                await self._changed.wait()
            return value

    async def ring_of(self, size: int, without: Collection[int] = ()) -> list[int]:
        """Wait until a ring of this size is up without the given workers; return its members by rank."""
        return list(
            await self.until(
                lambda: self.ring if len(self.ring) == size and not set(self.ring) & set(without) else None
            )
        )

    async def stepping(self, steps: int = 1) -> None:
        """Wait until the running ring has made this many steps.

        A loop's members compare their states in the second one. Until then, a job that goes on from a member
        which has just joined is not proved (edl audit), so wait for three before the kill of a root.
        """
        generation, before = self.job.ring.generation, self.status["step"] + steps - 1
        await self.until(lambda: self.job.ring.generation > generation or self.status["step"] > before)

    def go(self) -> None:
        """Let the job train the remaining records at full speed."""
        self._orders.go()

    async def end(self) -> dict[str, Any]:
        """Wait until the job has ended, and return its summary."""
        assert self._task is not None
        self.go()
        async with asyncio.timeout(SECONDS * 2):
            await self._task
        return dict(json.loads((self.output / artifacts.SUMMARY).read_text()))

    async def exact(self) -> dict[str, Any]:
        """Check that the job succeeds, and that its weights count every record `epochs` times.

        Returns the summary.
        """
        summary = await self.end()
        assert summary["phase"] == "Succeeded", summary
        assert check_weights(self.output / artifacts.MODEL, self.records, self.epochs) == ""
        assert len(set(summary["digests"].values())) == 1 or self.records == 0
        assert "exactly once" in audit.audit(self.output)
        crashes = [e for _, e, _ in self.seen if isinstance(e, ev.Gone) and e.signal in CRASHES]
        assert not crashes, "a survivor was aborted"
        return summary

    # --- actions

    def take(self, values: dict[str, Any]) -> None:
        """Change the job's values, as an upgrade of the chart does."""
        self.master.take(checked(values))

    def kill(self, *workers: int, number: signal.Signals = signal.SIGKILL) -> None:
        for worker in workers:
            os.kill(self.pid(worker), number)

    def give(self, order: str) -> None:
        """Send an order to the model on every worker that looks for it."""
        self._orders.say(order)

    def order(self, worker: int, what: str) -> None:
        """Make the faulty counting model misbehave on this worker."""
        self.order_process(self.pid(worker), what)

    def order_process(self, pid: int, what: str) -> None:
        """Make the faulty counting model misbehave in this process."""
        self._orders.give(pid, what)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a ring in this process sets for Horovod is not for the jobs of later tests."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith("HOROVOD_") and name not in before]:
        del os.environ[name]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shared_forks.SharedForkServer]:
    """The process that forks the workers of all jobs of this session."""
    shared = shared_forks.SharedForkServer(tmp_path_factory.mktemp("forks") / "forkserver.log")
    yield shared
    shared.close()


@pytest.fixture
def a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: shared_forks.SharedForkServer
) -> Callable[..., Any]:
    """Start a job of the counting model: `async with a_job(workers=3) as job`.

    Its workers come from the session's fork server, or with `own_fork_server` from a fork server of the job.
    """
    orders = Orders(tmp_path / "orders")

    @asynccontextmanager
    async def start(
        *sets: str,
        workers: int = 3,
        records: int = 3000,
        epochs: int = 4,
        model: str = "counting_faulty.py",
        own_fork_server: bool = False,
    ) -> AsyncIterator[Running]:
        monkeypatch.setenv("EDL_FAULTS", str(orders.directory))
        monkeypatch.setenv("EDL_COUNTING_RECORDS", str(records))
        if not own_fork_server:
            await fork_server.imports()
        module = str(MODELS / model) if model.endswith(".py") else model
        job = Running(
            tmp_path / "job",
            records,
            epochs,
            [
                f"workers={workers}",
                f"model.module={module}",
                "elastic.heartbeatTimeoutSeconds=2.5",
                "elastic.gracePeriodSeconds=4",
                "export.verify=false",  # takes seconds; tests of exported models enable it
                *sets,
            ],
            orders,
        )
        shared = None if own_fork_server else partial(shared_forks.Launcher, fork_server)
        backend = processes(job.master, job.output, "a-token", shared)
        listen = "127.0.0.1:0"
        servers = servers_of(job.master, job.output, listen, "a-token")
        work = serve(job.master, job.output, listen, "a-token", backend, workers_stay=False, servers=servers)
        job._task = asyncio.create_task(work)
        job._task.add_done_callback(lambda _: job._changed.set())
        try:
            yield job
        finally:
            if not job._task.done():
                job.master.stop("the test is over")
                await job.end()
            assert not left_over(job), "a process was left"

    return start


def left_over(job: Running) -> list[int]:
    """The process IDs of the job's workers that still run."""
    pids = [int(e.handle) for _, e, _ in job.seen if isinstance(e, ev.Seen)]
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
async def server() -> AsyncIterator[KubernetesApi]:
    """A running API server of this test, with a release of three workers."""
    async with serving(SECOND) as api:
        install(api, "workers=3")
        yield api


@pytest.fixture
async def small_release(tmp_path: Path) -> AsyncIterator[Release]:
    """A release at a running API server of this test; its masters are processes."""
    async with serving(0.05) as server:
        yield Release(server, tmp_path)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """An API server with a release, and the edl command with a kubeconfig for it."""
    async with commanded(tmp_path) as server:
        yield server
