# SPDX-License-Identifier: Apache-2.0
"""The master of one job: one loop that owns the job's state.

Adapters put events into the inbox. The loop passes them to the core one by one, writes the journal, and has
the adapters perform the effects. Nothing else changes the job's state. The caller chooses backend, server
and observers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import structlog

from edl import config as config_module
from edl.contract.ids import RunId, WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Severity
from edl.errors import ConfigError
from edl.log import log_at
from edl.master.backends.base import Backend
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, past, view
from edl.master.jobs import new_job
from edl.master.journal.journal import Journal
from edl.master.parameter_servers.base import NoServers, ParameterServers
from edl.master.rpc.server import MasterServer
from edl.master.spec import JobSpec, Wanted
from edl.master.telemetry import Telemetry

log = structlog.get_logger()
NEWS = 50  # notices that a new watcher of the status receives

Observer: TypeAlias = Callable[[float, ev.Event, list[ef.Effect]], None]


class Master:
    """Inbox, core and the requests of users.

    Args:
        spec: the values of the job.
        run_id: id of this run.
        observers: called with time, event and effects, after the journal is written.
        adopted: workers of an earlier master of this run that may be alive.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_id: RunId,
        observers: Sequence[Observer] = (),
        adopted: ev.Adopted | None = None,
    ):
        self.spec, self.run_id, self.observers = spec, run_id, observers
        self.job = new_job(spec.config)
        self.telemetry = Telemetry(spec.config)
        self.inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.servers: ParameterServers = NoServers()
        self.abandoned = False
        self.refused = ""  # which wanted values are not applied, in words; empty: none
        self._backend: Backend | None = None  # while it runs
        self._journal_trouble = ""  # as reported to the core
        self.news: list[dict[str, Any]] = []
        if adopted is not None:  # before any of its workers can connect
            self.emit(adopted)
        self.emit(ev.Begin())

    @property
    def succeeded(self) -> bool:
        return self.job.phase == Phase.Succeeded

    def emit(self, said: ev.Event | facts.Heartbeat) -> None:
        """Put an event into the inbox."""
        for event in self.telemetry.hears(said, asyncio.get_running_loop().time()):
            self.inbox.put_nowait(event)

    async def run(self, backend: Backend, server: MasterServer, journal: Journal) -> None:
        """Run the job to its end, or until it is abandoned.

        Raises:
            EdlError: the backend cannot start.
            OSError: the backend cannot start.
        """
        try:
            await backend.start()
            self._backend = backend
            await self.live(server, backend, journal)
        finally:
            self._backend = None
            await backend.close()

    async def live(self, server: MasterServer, backend: Backend, journal: Journal) -> None:
        """Process events until the job has ended, or a different master takes over."""
        loop = asyncio.get_running_loop()
        while not self.job.ended:
            event = await self.next_event()
            if self.abandoned:
                return
            now = loop.time()
            effects = self.job.handle(event, now)
            journal.note(now, event, effects)
            if journal.full:  # in a thread: streams, the Lease and watchers are served while the disk is slow
                await asyncio.to_thread(journal.begin_another)
            if journal.trouble != self._journal_trouble:
                self._journal_trouble = journal.trouble
                self.emit(ev.Degraded("the journal", journal.trouble))
            self.note_news([e for e in effects if isinstance(e, ef.Notice)], now)
            for effect in effects:
                if isinstance(effect, ef.ModeDecided):
                    self.spec = self.spec.decided(effect.mode)
                if isinstance(effect, ef.ForWorkers):
                    server.perform(effect)
                if isinstance(effect, ef.ForBackend):
                    backend.perform(effect)
                if isinstance(effect, ef.ForServers):
                    self.servers.perform(effect)
            if isinstance(event, ev.Saved):
                server.acknowledge(event)  # not before it is in the journal
            server.changed()
            for observe in self.observers:
                observe(now, event, effects)

    def note_news(self, notices: list[ef.Notice], now: float) -> None:
        """Write notices to the log and to the status."""
        for notice in notices:
            write = log.warning if notice.reason.severity is Severity.WARNING else log.info
            write(notice.text, reason=str(notice.reason))
            self.news.append(
                {
                    "number": self.news[-1]["number"] + 1 if self.news else 1,
                    "seconds": self.job.lifetime.seconds(now),
                    "reason": str(notice.reason),
                    "text": notice.text,
                }
            )
        del self.news[:-NEWS]

    async def next_event(self) -> ev.Event:
        """Return the next event: from the inbox, of heartbeat timeouts, or a Tick at a deadline."""
        while self.inbox.empty():
            due = self.job.next_deadline()
            silence = self.telemetry.next_deadline()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    min((at for at in (due, silence) if at is not None), default=None)
                ):
                    return await self.inbox.get()
            now = asyncio.get_running_loop().time()
            for event in self.telemetry.passes(now):
                self.inbox.put_nowait(event)
            if due is not None and due <= now:
                self.inbox.put_nowait(ev.Tick())
        return self.inbox.get_nowait()

    def status(self, now: float) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "model": self.spec.config.model.name,
            "refused": self.refused,
            **view.status(self.job, now, self.telemetry.beats, self.telemetry.newest),
            "servers": [
                {**said, "state": "out"} if said["index"] in self.job.servers.out else said
                for said in self.servers.status()
            ],
            "news": self.news,
        }

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        """Change the number of workers or of parameter servers. Returns a message for the user.

        Raises:
            ConfigError: the values do not allow that number.
        """
        wrong = [] if workers is None else config_module.unscalable(self.spec.values, workers)
        if servers is not None:
            wrong += config_module.unscalable_servers(self.spec.config, servers)
        if wrong:
            raise ConfigError("\n".join(wrong))
        said = []
        if workers is not None:
            said.append(f"workers {self.job.target} -> {workers}")
            self.emit(ev.Scale(workers))
        if servers is not None:
            said.append(f"parameter servers {self.servers.wanted} -> {servers}")
            self.servers.resize(servers)
        return ", ".join(said)

    def vacant(self) -> WorkerId | None:
        """Return the oldest worker that is needed and not started; None if all are started."""
        return self.job.pool.vacant

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        """Return the id of the worker that replaces an ended one in the same pod; None if none is needed."""
        return await self._backend.replace_in_place(ended) if self._backend is not None else None

    def take(self, wanted: Wanted) -> None:
        """Apply the live values of `wanted`.

        A change of other values is refused, and the status shows this refusal until the change is reverted.
        """
        self.spec, refused = self.spec.with_live_values(wanted)
        new = self.spec.config
        log_at(new.log_level)
        deadline = new.active_deadline_seconds
        self.servers.resize(new.servers)
        if refused and refused != self.refused:
            self.emit(ev.Refused(refused))
        self.refused = refused
        self.emit(ev.Live(new.workers, new.min_workers, new.suspend, new.training.epochs, deadline))

    def abandon(self) -> None:
        """Leave the job to a different master; its workers continue to train."""
        self.abandoned = True
        self.emit(ev.Tick())

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        """Request the end of the job.

        Args:
            checkpoint: stop once the state is in a checkpoint.
            force: stop even if the checkpoint fails.
            id: id of this request, with which the status reports its outcome.

        Raises:
            ConfigError: the job writes no checkpoints.
        """
        if checkpoint:
            self._checkpoints()
        self.emit(ev.StopAsked(why, checkpoint, force, id))
        return "the job ends once its state is in a checkpoint" if checkpoint else "the job is ending"

    def checkpoint(self) -> str:
        """Request a checkpoint. Returns a message for the user.

        Raises:
            ConfigError: the job writes no checkpoints.
        """
        where = self._checkpoints()
        self.emit(ev.CheckpointAsked())
        return f"a checkpoint is written to {where} after one of the next steps"

    def _checkpoints(self) -> str:
        """The directory or address of the checkpoints.

        Raises:
            ConfigError: the job writes no checkpoints.
        """
        if not (where := self.spec.config.checkpoint.dir):
            raise ConfigError("the job writes no checkpoints: its checkpoint.dir is empty")
        return where

    def past(self) -> facts.Past:
        """The history of the job, for the summary of the next master."""
        return past.of(self.job)

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""
        return {"run_id": self.run_id, **view.summary(self.job)}
