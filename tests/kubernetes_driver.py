"""A Kubernetes backend in a test, driven by hand: told what a core would tell it, and all it says is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from edl import config
from edl.config import values
from edl.contract.ids import RunId, WorkerId
from edl.kubernetes.client import Api
from master.backends.kubernetes import Found, Kubernetes, Place
from master.core import events as ev


def job_values(*sets: str) -> dict[str, Any]:
    """The job's part of the values, as the chart renders it."""
    return {key: value for key, value in values.load([], list(sets)).items() if key in config.JOB}


class Driven:
    """A backend, and all that it has emitted."""

    def __init__(self, backend: Kubernetes, found: Found):
        self.backend, self.found = backend, found
        self.emitted: list[ev.Event] = []
        self.taken: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self._news = asyncio.Event()

    def emit(self, event: ev.Event) -> None:
        self.emitted.append(event)
        self._news.set()

    def of(self, kind: type, worker: int | None = None) -> list[Any]:
        return [e for e in self.emitted if isinstance(e, kind) and worker in (None, getattr(e, "worker", -1))]

    @property
    def seen(self) -> list[int]:
        return sorted(e.worker for e in self.of(ev.Seen))

    def delays(self, worker: int) -> list[str]:
        return [e.why for e in self.of(ev.Delayed, worker)]

    def create(self, *workers: int) -> None:
        for worker in workers:
            self.backend.perform(ev.Create(WorkerId(worker)))

    def delete(self, worker: int, grace: float = 1.0) -> None:
        self.backend.perform(ev.Delete(WorkerId(worker), grace))

    def give_up(self, worker: int) -> None:
        """Nothing is heard of it."""
        self.backend.perform(ev.Fence(WorkerId(worker), "no heartbeat", ev.FenceReason.HeartbeatTimeout))
        self.delete(worker)

    async def until(self, happens: Callable[[], Any], seconds: float = 10.0) -> Any:
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
    """A backend that has started, as the master starts it."""
    backend = Kubernetes(place, api)
    try:
        driven = Driven(backend, await backend.open())
        backend.settle(RunId(run), driven.emit, driven.taken.append, lambda: driven.status)
        await backend.start()
        yield driven
    finally:
        await backend.close()
        await api.close()
