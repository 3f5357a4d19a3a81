"""The master of one job: one loop that owns the job's state.

Adapters put events into the inbox; the loop hands them to the core one by one, writes the
journal, and has the effects performed. Nothing else touches the job's state. Which backend, which server
and which observers there are is wiring, and not decided here.
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
from edl.master.core import past, view
from edl.master.core.job import Job
from edl.master.journal.journal import Journal
from edl.master.parameter_servers.monitor import NoServers, ParameterServers
from edl.master.rpc.server import Server
from edl.master.spec import JobSpec, Wanted
from edl.master.telemetry import Telemetry

log = structlog.get_logger()
NEWS = 50  # notices that a late watcher still gets

Observer: TypeAlias = Callable[[float, ev.Event, list[ef.Effect]], None]


class Master:
    """Inbox, core, and what people may ask.

    Args:
        spec: what the job is to be.
        run_id: of this run of it.
        observers: are shown every event with its time and effects, after the journal.
        adopted: the workers of an earlier master of this run, which may live.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_id: RunId,
        observers: Sequence[Observer] = (),
        adopted: ev.Adopted | None = None,
    ):
        self.spec, self.run_id, self.observers = spec, run_id, observers
        self.job = Job(spec.config)
        self.telemetry = Telemetry(spec.config)
        self.inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.servers: ParameterServers = NoServers()
        self.abandoned = False
        self.refused = ""  # what of the values that people want is not applied, in words
        self._backend: Backend | None = None  # while it runs
        self._journal_trouble = ""  # as the core knows it
        self.news: list[dict[str, Any]] = []
        if adopted is not None:  # before any of its workers can speak
            self.emit(adopted)
        self.emit(ev.Begin())

    @property
    def succeeded(self) -> bool:
        return self.job.phase == Phase.Succeeded

    def emit(self, said: ev.Event | ev.Heartbeat) -> None:
        """Have the loop handle an event, after all that have come before."""
        for event in self.telemetry.hears(said, asyncio.get_running_loop().time()):
            self.inbox.put_nowait(event)

    async def run(self, backend: Backend, server: Server, journal: Journal) -> None:
        """From the first event to the end of the job, or until it is abandoned.

        Raises:
            EdlError: the backend cannot start. OSError: the same.
        """
        try:
            await backend.start()
            self._backend = backend
            await self.live(server, backend, journal)
        finally:
            self._backend = None
            await backend.close()

    async def live(self, server: Server, backend: Backend, journal: Journal) -> None:
        """Events in, effects out, until the job has ended, or this master leaves it to another one."""
        loop = asyncio.get_running_loop()
        while not self.job.ended:
            event = await self.next_event()
            if self.abandoned:
                return
            now = loop.time()
            effects = self.job.handle(event, now)
            journal.note(now, event, effects)
            if journal.full:  # streams, the Lease and who watches are served while the disk is waited for
                await asyncio.to_thread(journal.begin_another)
            if journal.trouble != self._journal_trouble:
                self._journal_trouble = journal.trouble
                self.emit(ev.Degraded("the journal", journal.trouble))
            self.note_news([e for e in effects if isinstance(e, ef.Notice)], now)
            for effect in effects:
                if isinstance(effect, ef.ModeDecided):
                    self.spec = self.spec.decided(effect.mode)
                server.perform(effect)
                backend.perform(effect)
                self.servers.perform(effect)
            server.changed()
            for observe in self.observers:
                observe(now, event, effects)

    def note_news(self, notices: list[ef.Notice], now: float) -> None:
        """Notices go to the log, and to those who watch the status."""
        for notice in notices:
            write = log.warning if notice.reason.severity is Severity.WARNING else log.info
            write(notice.text, reason=str(notice.reason))
            self.news.append({
                "number": self.news[-1]["number"] + 1 if self.news else 1,
                "seconds": self.job.active_before + now - (self.job.began_at or now),
                "reason": str(notice.reason),
                "text": notice.text,
            })  # fmt: skip
        del self.news[:-NEWS]

    async def next_event(self) -> ev.Event:
        """What the inbox has, or who has fallen silent, or a Tick when a deadline of the core comes first."""
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
        """Ask for another number of workers, or of parameter servers.

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
        """The oldest worker that is needed and that nobody has started."""
        return self.job.pool.vacant

    async def succeed(self, ended: ev.Gone) -> WorkerId | None:
        """Which worker follows one that has ended, in its place; None: no one is needed there."""
        return await self._backend.succeed(ended) if self._backend is not None else None

    def take(self, wanted: Wanted) -> None:
        """Apply the live values of `wanted`. A change of other values is refused, and the status shows this
        refusal until the change is reverted."""
        self.spec, refused = self.spec.taking(wanted)
        new = self.spec.config
        log_at(new.log_level)
        deadline = new.active_deadline_seconds
        self.servers.resize(new.servers)
        if refused and refused != self.refused:
            self.emit(ev.Refused(refused))
        self.refused = refused
        self.emit(ev.Live(new.workers, new.min_workers, new.suspend, new.training.epochs, deadline))

    def abandon(self) -> None:
        """Leave the job as it is: its workers train on, and another master takes over from them."""
        self.abandoned = True
        self.emit(ev.Tick())

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        """Ask the job to end.

        Args:
            checkpoint: once its state is in a checkpoint.
            force: also if that fails.
            id: of this asking; the status says with it what has come of it.

        Raises:
            ConfigError: the job writes none.
        """
        if checkpoint:
            self._checkpoints()
        self.emit(ev.StopAsked(why, checkpoint, force, id))
        return "the job ends once its state is in a checkpoint" if checkpoint else "the job is ending"

    def checkpoint(self) -> str:
        """Ask for a checkpoint.

        Raises:
            ConfigError: the job writes none.
        """
        where = self._checkpoints()
        self.emit(ev.CheckpointAsked())
        return f"a checkpoint is written to {where} after one of the next steps"

    def _checkpoints(self) -> str:
        """Where they are."""
        if not (where := self.spec.config.checkpoint.dir):
            raise ConfigError("the job writes no checkpoints: its checkpoint.dir is empty")
        return where

    def past(self) -> ev.Past:
        """What the job has done, for the summary of the next master."""
        return past.of(self.job)

    def summary(self) -> dict[str, Any]:
        """What is kept of the job."""
        return {"run_id": self.run_id, **view.summary(self.job)}
