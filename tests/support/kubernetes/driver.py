# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes backend driven by a test: the test sends a core's effects and records all emitted events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from edl import config
from edl.config import values
from edl.contract.ids import RunId, WorkerId
from edl.kubernetes.client import Api
from edl.master.backends.kubernetes import Found, Installed, Kubernetes, Place
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.spec import JobSpec, Wanted


def job_values(*sets: str) -> dict[str, Any]:
    """The job's part of the values, as the chart renders it."""
    return config.of_job(values.load([], list(sets)))


class Driven:
    """A backend with all the events that it has emitted. It also serves as the backend's run."""

    def __init__(self, installed: Installed, run: str):
        self.found: Found = installed.found
        self.wanted = installed.wanted()
        self.run_id = RunId(run)
        earlier = self.found.earlier if run == self.found.run_id else None
        spec = earlier or self.wanted
        assert isinstance(spec, JobSpec), spec
        self.spec = spec
        self.backend = Kubernetes(installed, self)
        self.emitted: list[ev.Event] = []
        self.heard: list[Callable[[ev.Event], None]] = []  # further listeners
        self.taken: list[dict[str, Any]] = []
        self.told: dict[str, Any] = {}  # the status of the job

    def emit(self, event: ev.Event) -> None:
        """Record an event and pass it to the observers, as the master's loop does after handling it."""
        self.emitted.append(event)
        for tell in self.heard:
            tell(event)
        asyncio.get_running_loop().call_soon(self.backend.observe, 0.0, event, [])

    def take(self, wanted: Wanted) -> None:
        self.spec, refused = self.spec.with_live_values(wanted)
        self.taken.append(self.spec.values)
        if refused:
            self.emit(ev.Refused(refused))

    def status(self, now: float) -> dict[str, Any]:
        return self.told

    def summary(self) -> dict[str, Any]:
        return {"phase": self.told["phase"], "step": 7}

    def past(self) -> facts.Past:
        return facts.Past({}, "starting")

    def of(self, kind: type, worker: int | None = None) -> list[Any]:
        return [e for e in self.emitted if isinstance(e, kind) and worker in (None, getattr(e, "worker", -1))]

    @property
    def seen(self) -> list[int]:
        return sorted(e.worker for e in self.of(ev.Seen))

    def delays(self, worker: int) -> list[str]:
        return [e.why for e in self.of(ev.Delayed, worker)]

    def create(self, *workers: int) -> None:
        for worker in workers:
            self.backend.perform(ef.Create(WorkerId(worker)))

    def delete(self, worker: int, grace: float = 1.0) -> None:
        self.backend.perform(ef.Delete(WorkerId(worker), grace))

    def give_up(self, worker: int) -> None:
        """Fence and delete a worker whose heartbeats are missing."""
        self.backend.perform(ef.Fence(WorkerId(worker), "no heartbeat", ef.FenceReason.HeartbeatTimeout))
        self.delete(worker)

    # Not Callable[[], ...]: a lambda in a loop binds its variables by default arguments.
    async def until(self, happens: Callable[..., Any], seconds: float = 10.0) -> Any:
        async with asyncio.timeout(seconds):
            while not (value := happens()):
                await asyncio.sleep(0.002)
            return value

    async def running(self, *workers: int, seconds: float = 10.0) -> None:
        self.create(*workers)
        await self.until(lambda: set(workers) <= set(self.seen), seconds)

    async def gone(self, worker: int, seconds: float = 10.0) -> ev.Gone:
        (gone,) = await self.until(lambda: self.of(ev.Gone, worker), seconds)
        return gone


@asynccontextmanager
async def driving(place: Place, api: Api, run: str = "run-1") -> AsyncIterator[Driven]:
    """Start a backend as the master does, and close it at the end."""
    try:
        driven = Driven(await Installed.open(place, api), run)
        try:
            await driven.backend.start()
            yield driven
        finally:
            await driven.backend.close()
    finally:
        await api.close()
