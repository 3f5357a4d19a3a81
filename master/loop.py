"""The master of one job: one loop that owns the job's state.

Adapters put events into the inbox; the loop hands them to the core one by one, writes the
journal, and has the effects performed. Nothing else touches the job's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from edl import config as config_module
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.contract.reasons import Severity
from edl.errors import ConfigError
from master import failover
from master.backends.external import External
from master.backends.processes import Processes
from master.core import events as ev
from master.core import view
from master.core.job import Job
from master.journal import Journal
from master.log import log_at
from master.rpc.server import Server

log = structlog.get_logger()
NEWS = 50  # how many sentences a watcher who comes late is told


class Backend(Protocol):
    """What starts and ends workers, and emits `Seen`, `Delayed` and `Gone` of them."""

    async def start(self) -> None: ...

    def perform(self, effect: ev.Effect) -> None:
        """Start or end a worker, or whatever else the effect asks of a backend."""

    async def close(self) -> None: ...


class Master:
    """The process: inbox, core, adapters.

    Args:
        values: the job's merged values.
        output: the directory that keeps what the job leaves.
        listen: host:port.
        backend: "processes" or "external", or one that is made already (it may end before the job does).
        observers: are shown every event with its time and effects, after the journal.
        inherited: of an earlier master of this job: its run's id, and the workers that may live.
    """

    def __init__(
        self,
        values: dict[str, Any],
        output: Path,
        listen: str = "127.0.0.1:0",
        backend: str | Backend = "processes",
        observers: Sequence[Callable[[float, ev.Event, list[ev.Effect]], None]] = (),
        inherited: tuple[RunId, ev.Adopted] | None = None,
    ):
        self.values, self.output, self.listen = values, output, listen
        self.config = config_module.parse(values)
        self.run_id = RunId(secrets.token_hex(8))
        self.heritage: ev.Adopted | None = None
        if inherited is not None:
            self.run_id, self.heritage = inherited
        self.token = os.environ.get("EDL_TOKEN") or failover.token_of(output) or secrets.token_urlsafe(24)
        self.job = Job(self.config)
        self.inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.backend = backend
        self.observers = observers
        self.abandoned = False
        self.news: list[dict[str, Any]] = []

    async def run(self) -> int:
        """The job from its first to its last moment; returns the exit code."""
        loop = asyncio.get_running_loop()
        if self.heritage is not None:  # before any of its workers can speak
            self.inbox.put_nowait(self.heritage)
        self.inbox.put_nowait(ev.Begin())
        self.output.mkdir(parents=True, exist_ok=True)
        journal = Journal(self.output / artifacts.JOURNAL, self.run_id, self.values)
        server = Server(
            self.run_id, self.token, json.dumps(self.values), str(self.output.resolve()),
            emit=self.inbox.put_nowait,
            status=lambda: self.status(loop.time()),
            scale=self.scale,
            stop=self.stop,
            vacant=lambda: self.job.pool.vacant,
            patience=(
                0.0 if self.backend == "processes" else self.config.elastic.master_outage_timeout_seconds
            ),
        )  # fmt: skip
        port = await server.start(self.listen)
        host = self.listen.rsplit(":", 1)[0]
        address = f"{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"
        secret = {"EDL_TOKEN": self.token, "EDL_RUN_ID": self.run_id}
        backend: Backend
        if self.backend == "processes":
            backend = Processes(self.inbox.put_nowait, address, self.output / artifacts.LOGS, secret,
                                fork=self.config.local.start_method == "fork")  # fmt: skip
        elif isinstance(self.backend, str):
            backend = External(address)
        else:
            backend = self.backend
        artifacts.write_contact(self.output, artifacts.Contact(address, self.token, os.getpid()))
        print(address, flush=True)  # whoever started us may now talk to us
        if isinstance(self.backend, str):
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop, f"the master got {number.name}")
        try:
            await backend.start()
            await self.live(server, backend, journal)
        finally:
            await backend.close()
            journal.close()
            self.keep_summary(server.foreign)
            await server.close()
        return 0 if self.job.phase == "Succeeded" else 1

    async def live(self, server: Server, backend: Backend, journal: Journal) -> None:
        """Events in, effects out, until the job has ended, or this master leaves it to another one."""
        loop = asyncio.get_running_loop()
        while not self.job.ended:
            event = await self.next_event()
            if self.abandoned:
                return
            now = loop.time()
            effects = self.job.handle(event, now)
            journal.write(now, event, effects)
            self.note_news([e for e in effects if isinstance(e, ev.Notice)], now)
            for effect in effects:
                server.perform(effect)
                backend.perform(effect)
            server.changed()
            for observe in self.observers:
                observe(now, event, effects)

    def note_news(self, notices: list[ev.Notice], now: float) -> None:
        """Notices go to the log, and to whoever watches the status."""
        for notice in notices:
            write = log.warning if notice.reason.severity is Severity.WARNING else log.info
            write(notice.text, reason=str(notice.reason))
            self.news.append({
                "number": self.news[-1]["number"] + 1 if self.news else 1,
                "seconds": now - (self.job.began_at or now),
                "reason": str(notice.reason),
                "text": notice.text,
            })  # fmt: skip
        del self.news[:-NEWS]

    async def next_event(self) -> ev.Event:
        """What the inbox has, or a Tick when a deadline of the core comes first."""
        deadline = self.job.next_deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await self.inbox.get()
        return ev.Tick()

    def status(self, now: float) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "model": self.config.model.name,
            **view.status(self.job, now),
            "news": self.news,
        }

    def scale(self, workers: int) -> str:
        """Ask for another number of workers.

        Raises:
            ConfigError: the values do not allow that number.
        """
        if wrong := config_module.unscalable(self.values, workers):
            raise ConfigError("\n".join(wrong))
        before, now = self.job.target, workers
        self.inbox.put_nowait(ev.Scale(workers))
        return f"workers {before} -> {now}"

    def take(self, values: dict[str, Any]) -> None:
        """The job's values as somebody has changed them: live ones hold from now on, others are refused."""
        try:
            new = config_module.parse(values)
        except ConfigError as error:
            self.inbox.put_nowait(ev.Refused(f"the new values are refused: {error}"))
            return
        if changes := config_module.frozen_changes(self.config, new):
            told = ", ".join(changes)
            why = f"a running job keeps its {told}: the change is refused, it needs a new job"
            self.inbox.put_nowait(ev.Refused(why))
            return
        log_at(new.log_level)
        self.inbox.put_nowait(ev.Live(new.workers, new.min_workers, new.suspend))

    def abandon(self) -> None:
        """Leave the job as it is: its workers train on, and another master takes over from them."""
        self.abandoned = True
        self.inbox.put_nowait(ev.Tick())

    def stop(self, why: str) -> str:
        self.inbox.put_nowait(ev.StopAsked(why))
        return "the job is ending"

    def summary(self) -> dict[str, Any]:
        """What is kept of the job."""
        return {"run_id": self.run_id, **view.summary(self.job)}

    def keep_summary(self, foreign: int) -> None:
        """Write summary.json, whole or not at all. `foreign`: messages of another run, refused."""
        summary = {"foreign_messages": foreign, **self.summary()}
        artifacts.write_whole(self.output / artifacts.SUMMARY, json.dumps(summary, indent=1) + "\n")
