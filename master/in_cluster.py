"""`python -m master --backend kubernetes`: the master of a release of the chart.

A run begins with the values that the chart's object holds. It survives its masters: what the last
one has left (the run's id, the values it began with, how many workers there have been) is in the
status ConfigMap, and what it did is in the workers. A change that a run cannot take is refused,
and the run goes on with its own values; but another model file is another run.

When a run has ended, its master stays, so that the Deployment does not start it again, until the
values are others; it deletes the ended workers' pods when `ttlSecondsAfterFinished` has passed.

When another master has taken over while this one lived (see `leader_election`), it does nothing any more,
until it is told to end.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog

from edl import config as config_module
from edl.contract.ids import RunId
from edl.errors import ConfigError
from edl.kubernetes.client import Api, Timing
from master.backends.kubernetes import Found, Kubernetes, Place, Term, patiently
from master.core import events as ev
from master.http.metrics import Metrics
from master.http.server import Server
from master.log import log_at
from master.loop import Master

log = structlog.get_logger()
T = TypeVar("T")

ANOTHER_RUN = frozenset({"model.source"})  # whose change ends a run that has not ended


class Release:
    """One release's master, over all its runs.

    Args:
        output: directory for journals.
        listen: host:port for workers.
        metrics: host:port for whoever watches over the master.
    """

    def __init__(self, output: Path, listen: str, metrics: str):
        self._output, self._listen, self._metrics_address = output, listen, metrics
        self._place = Place.from_environment()
        self._leaving = asyncio.Event()  # this process is to end; the run goes on
        self._another = asyncio.Event()  # the values want another run
        self._master: Master | None = None
        self._backend: Kubernetes | None = None
        self._term: Term | None = None
        self._metrics = Metrics(self._status, self._numbers)
        self._http = Server(self._ready, {"/metrics": self._metrics.page})

    async def run(self) -> int:
        """Until SIGTERM: one run after the other. Returns the exit code.

        Raises:
            ConfigError: the release's objects make no sense, or the account lacks a right.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        await self._http.start(self._metrics_address)
        api = Api(Timing())
        term = self._term = Term(api, self._place, self._superseded)
        try:
            await self._unless_leaving(patiently(api.pace, term.take))
            watching = asyncio.create_task(term.watch())
            while not self._leaving.is_set() and not term.over:
                self._another.clear()
                backend = Kubernetes(self._place, api)
                found = await self._unless_leaving(backend.open())
                if found is not None and not term.over:
                    self._backend = backend
                    await self._next(backend, found)
            watching.cancel()
            # Superseded: to end would only have this container started again, to take the Lease back.
            await self._leaving.wait()
        finally:
            await api.close()
            await self._http.close()
        return 0

    async def _next(self, backend: Kubernetes, found: Found) -> None:
        """What there is to do, until there is something else to do."""
        values, run_id, refused = _which_run(found)
        if found.ended and run_id == found.run_id:
            log.info(f"run {run_id} has ended: {found.ended}; waiting for other values")
            await self._rest(backend, found)
        elif wrong := _wrong(values):
            await self._refuse(backend, found, wrong)
        else:
            await self._one_run(backend, found, values, run_id, refused)

    async def _one_run(
        self, backend: Kubernetes, found: Found, values: dict[str, Any], run_id: RunId, refused: list[str]
    ) -> None:
        mine = run_id == found.run_id
        adopted = found.adopted if mine else ev.Adopted((), found.next_id)
        master = self._master = Master(
            values, self._output, self._listen, backend,
            [self._metrics.observe, self._note_end(backend), backend.observe], (run_id, adopted),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        backend.settle(run_id, master.inbox.put_nowait, self._take, lambda: master.status(loop.time()))
        log_at(master.config.log_level)
        log.info(f"run {run_id}: {'taken over' if mine else 'begins'}")
        if refused:
            master.take(found.values)  # says so, as when it had happened before our eyes
        await master.run()
        self._master = None

    async def _refuse(self, backend: Kubernetes, found: Found, wrong: str) -> None:
        """No run can begin with these values, and no worker is made: say so until they are others."""
        log.error(wrong)
        await backend.refuse(found.ended or "Failed", wrong, self._another.set)
        await self._until_told()
        await backend.close()

    async def _rest(self, backend: Kubernetes, found: Found) -> None:
        assert found.run_id is not None
        backend.settle(found.run_id, lambda _: None, self._take_at_rest(found), dict)
        await backend.start()
        backend.clear_away()
        await self._until_told()
        await backend.close()

    async def _until_told(self) -> None:
        """Until this process is to end, or the values want another run."""
        waits = [asyncio.create_task(e.wait()) for e in (self._leaving, self._another)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

    async def _unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What it returns; None when this process is to end before it does."""
        task, leaving = asyncio.create_task(work), asyncio.create_task(self._leaving.wait())
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    def _ready(self) -> bool:
        """It has read what there is. An outage later changes nothing: workers are to find their master."""
        return self._backend is not None and self._term is not None and not self._term.over

    def _status(self) -> dict[str, Any]:
        return self._master.status(asyncio.get_running_loop().time()) if self._master is not None else {}

    def _numbers(self) -> dict[str, Any]:
        return self._backend.numbers() if self._backend is not None else {}

    def _superseded(self) -> None:
        """Another master acts: leave it the workers, and write nothing more."""
        self._another.set()
        if self._master is not None:
            self._master.abandon()

    def _leave(self) -> None:
        self._leaving.set()
        if self._master is not None:
            self._master.abandon()

    def _take(self, values: dict[str, Any]) -> None:
        """The chart's object has changed while a run goes on."""
        assert self._master is not None
        if ANOTHER_RUN & set(_changes(self._master.values, values)):
            log.info("the model is another one: this run ends, and another one begins")
            self._another.set()
            self._master.abandon()
        else:
            self._master.take(values)

    def _take_at_rest(self, found: Found) -> Any:
        def take(values: dict[str, Any]) -> None:
            if _wrong(values) or _changes(found.earlier or found.values, values):
                self._another.set()

        return take

    def _note_end(self, backend: Kubernetes) -> Any:
        def observe(now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
            if self._master is not None and self._master.job.ended:
                backend.status.end(self._master.summary())

        return observe


def _which_run(found: Found) -> tuple[dict[str, Any], RunId, list[str]]:
    """The values to go on with, the run's id, and which of the chart's values such a run refuses."""
    if _wrong(found.values):
        if found.earlier is None or found.run_id is None or found.ended:
            return found.values, RunId(secrets.token_hex(8)), []
        return found.earlier, found.run_id, ["all"]  # what the last master has refused, this one does too
    changes = _changes(found.earlier, found.values) if found.earlier is not None else []
    if found.run_id is None or (changes and (found.ended or ANOTHER_RUN & set(changes))):
        return found.values, RunId(secrets.token_hex(8)), []
    if changes:
        assert found.earlier is not None
        return found.earlier, found.run_id, changes
    return found.values, found.run_id, []


def _wrong(values: dict[str, Any]) -> str:
    """What keeps a run from beginning with these values; nothing if it may."""
    try:
        config_module.parse(values)
    except ConfigError as error:
        return str(error)
    return ""


def _changes(earlier: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What a run cannot take of new values; nothing if they make no sense at all, which is told elsewhere."""
    try:
        return config_module.frozen_changes(config_module.parse(earlier), config_module.parse(values))
    except ConfigError:
        return []
