# SPDX-License-Identifier: Apache-2.0
"""A long job in virtual time: the real core, with workers that join and leave, and without heartbeats.

In a `Month`, every other ring change is a preemption, and the next one adds the replacement worker. A
`BusyMonth` adds further events of a real job: progress reports, checkpoints, evaluations, and parameter
servers that are lost, return, and change in number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edl.config import values
from edl.contract import artifacts
from edl.contract.evaluation import VALIDATION
from edl.contract.heartbeats import Staleness
from edl.contract.ids import WorkerId
from edl.contract.layout import Layout
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, snapshot, view
from edl.master.jobs import new_job
from edl.master.journal.journal import SEGMENT, Journal
from edl.master.spec import JobSpec
from edl.master.telemetry import PROGRESS_SECONDS

RUN = "a month"
BREATH = 0.0005  # seconds between two events
CHECKPOINT_SECONDS = 120
HELD_OUT = 100_000  # records
Hear = Callable[[float, ev.Event, list[ef.Effect]], None]


class Month:
    """A job that trains for a month.

    Args:
        changes: the least number of ring changes.
        records: the records of each epoch. batch: the records of a step.
        most: the value of journal.maxBytes.
    """

    def __init__(
        self,
        workers: int,
        changes: int,
        records: int = 10_000,
        epochs: int = 10,
        batch: int = 100,
        most: int = 1 << 20,
        more: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.spec = JobSpec.parse(
            values.merge(
                values.merge(
                    values.defaults(),
                    {
                        "workers": workers,
                        "maxWorkers": workers,
                        "journal": {"maxBytes": most},
                        "training": {"epochs": epochs, "batchSize": batch},
                    },
                ),
                dict(more),
            )
        )
        self.layout, self.times, self.nth = Layout(records), max(changes // 2, 1), 0
        self.chance = random.Random(1)
        self.steps, self.end = Steps(records, batch), Steps(records, batch).end(0, epochs)
        self.job = new_job(self.spec.config)
        self.now, self.step = 1000.0, 0
        self.created: list[WorkerId] = []  # workers that have not started yet
        self._leaving = False
        self.days = 30.0
        self.hear: Hear = lambda now, event, effects: None

    def run(self) -> None:
        """Run the job from its first event to its end."""
        self.begin()
        for _ in range(self.times):
            self.change()
        self.finish()

    def begin(self) -> None:
        self._tell(ev.Begin())
        self._start()

    def change(self) -> None:
        """Train for a while, then lose and replace a worker, which changes the ring twice."""
        self._train(self.end * self.nth // self.times)
        self.nth += 1
        self._lose(self.chance.choice(self.job.ring.members))
        self._start()

    def _tell(self, event: ev.Event, after: float = BREATH) -> None:
        self.now += after
        effects = self.job.handle(event, self.now)
        self.hear(self.now, event, effects)
        self._heard(effects)
        self.created += [effect.worker for effect in effects if isinstance(effect, ef.Create)]
        if any(isinstance(effect, ef.Leave) for effect in effects) and not self._leaving:
            self._leave()
        elif any(isinstance(effect, ef.Form) for effect in effects):
            self._join()

    def _heard(self, effects: list[ef.Effect]) -> None:
        """Handle further effects, in jobs with checkpoints and servers. A Month has none."""

    def _start(self) -> None:
        """Start all created workers, and wait until they are ready and in the ring."""
        started, self.created = self.created, []
        for w in started:
            for event in (ev.Seen(w, f"edl-worker-{w}"), ev.Hello(w), self._ready(w)):
                self._tell(event)
        self._tell(ev.Tick(), after=self.spec.config.elastic.join_delay_seconds)
        # The core puts off a join that would cost more now.
        while (at := self.job.next_ring.join_at) is not None:
            self._tell(ev.Tick(), after=max(at - self.now, BREATH))
        assert len(self.job.ring.members) == self.job.target, self.job.reason

    def _join(self) -> None:
        generation, members = self.job.ring.generation, self.job.ring.members
        for w in members:
            self._tell(self._joined(w))
        for w in members:
            self._tell(ev.Stepped(w, generation, self.step + 1, 0.2, 0, 0.0))

    def _ready(self, worker: WorkerId) -> ev.Ready:
        return ev.Ready(worker, self.layout, "a model")

    def _joined(self, worker: WorkerId) -> ev.JoinedRing:
        return ev.JoinedRing(worker, self.job.ring.generation, self.step)

    def _left(self, worker: WorkerId, broken: str, digest: str) -> ev.LeftRing:
        return ev.LeftRing(worker, self.job.ring.generation, self.step, True, broken=broken, digest=digest)

    def _leave(self, broken: str = "", digest: str = "") -> None:
        self._leaving = True
        for w in [w.id for w in self.job.ring.inside]:
            self._leaving = w != self.job.ring.inside[-1].id  # the last report triggers the next ring
            self._tell(self._left(w, broken, digest))

    def _train(self, step: int) -> None:
        before, seconds = self.steps.epoch(self.step), self.days * 86400 / self.times
        self.step = max(step, self.step)
        for epoch in range(before, self.steps.epoch(self.step)):
            self._end_epoch(epoch, seconds)
            seconds = BREATH
        self.now += seconds

    def _end_epoch(self, epoch: int, after: float = BREATH) -> None:
        loss, ring = facts.EpochLoss(epoch, self.layout.records, 0.5), self.job.ring
        self._tell(ev.EpochEnded(ring.members[0], ring.generation, epoch + 1, loss), after=after)

    def _lose(self, worker: WorkerId) -> None:
        self._tell(ev.Closed(worker, "its stream ended"))
        self._tell(ev.Gone(worker, code=0, free=True, why="preempted"))
        self._leave(broken="the connection was reset by a peer")

    def finish(self) -> None:
        self._train(self.end)
        self._leave(digest="of the weights")
        assert self.job.exporter is not None, self.job.reason
        self._tell(ev.Finished(self.job.exporter, {"accuracy": 0.9}, "model.keras"))
        for w in [w.id for w in self.job.pool]:
            self._tell(ev.Gone(w, code=0))
        assert self.job.phase == "Succeeded", self.job.reason


class BusyMonth(Month):
    """A month with the further events of a real job.

    The training reports its progress every ten seconds. It writes a checkpoint every two minutes and at the
    end of each epoch, and evaluates the model at intervals. With every `rare`-th lost worker, a parameter
    server's process dies, too. The server restarts with its log or, one time in ten, without it, so that ring
    and servers roll back to the last checkpoint. Equally often, the number of servers changes: one to three.

    Args:
        days: the duration of the job. evaluations: their number in that time.
        rare: the number of worker changes between two server changes.
        others: see Month.
    """

    def __init__(
        self,
        workers: int,
        changes: int,
        mode: str = "hybrid",
        days: float = 30.0,
        evaluations: int = 1000,
        rare: int = 100,
        records: int = 10_000,
        epochs: int = 10,
        batch: int = 100,
        most: int = 1 << 20,
    ):
        self.evaluated_every = max(Steps(records, batch).end(0, epochs) // evaluations, 1)
        more = {
            "mode": mode,
            "ps": {"servers": 2},
            "checkpoint": {"dir": "/checkpoints", "seconds": CHECKPOINT_SECONDS},
            "evaluation": {"steps": self.evaluated_every, "batchSize": HELD_OUT // 10},
        }
        super().__init__(workers, changes, records, epochs, batch, most, more)
        self.days, self.rare = days, rare
        self.servers, self.kept = 2, 0  # the step of the newest checkpoint
        self._rolled_back = ""

    @property
    def rings(self) -> int:
        """The number of rings formed so far."""
        return int(self.job.ring.generation)

    def begin(self) -> None:
        for server in range(self.servers):
            self._tell(ev.ServerListens(server, 1.0, again=False))
        super().begin()

    def change(self) -> None:
        super().change()
        if self.nth % self.rare == 0:
            self._lose_server(self.chance.randrange(self.servers), log=self.nth % (10 * self.rare) != 0)
        if self.nth % self.rare == self.rare // 2:
            self._resize(self.chance.choice([n for n in (1, 2, 3) if n != self.servers]))

    def _join(self) -> None:
        if self._rolled_back:
            self.step = self.kept
        super()._join()

    def _ready(self, worker: WorkerId) -> ev.Ready:
        held_out = {VALIDATION: HELD_OUT}
        return ev.Ready(worker, self.layout, "a model", self.kept, held_out=held_out, tables=2)

    def _joined(self, worker: WorkerId) -> ev.JoinedRing:
        generation, servers = self.job.ring.generation, self.job.servers.wanted or self.servers
        return ev.JoinedRing(
            worker, generation, self.step, self._rounds, rolled_back=self._rolled_back, servers=servers
        )

    def _left(self, worker: WorkerId, broken: str, digest: str) -> ev.LeftRing:
        return replace(super()._left(worker, broken, digest), round=self._rounds)

    @property
    def _rounds(self) -> int:
        assert self.job.train is not None
        return (
            self.job.train.evaluation.rounds(self.step, self.job.epochs) if self.job.train.evaluation else 0
        )

    def _train(self, step: int) -> None:
        began, first, seconds = self.now, self.step, self.days * 86400 / self.times
        last, until = max(step, first), began + seconds
        while self.now < until:
            at = min(self.now + PROGRESS_SECONDS, until)
            if (due := self.job.next_deadline()) is not None and due < at:
                self._tell(ev.Tick(), after=max(due - self.now, BREATH))
                continue
            self._reach(first + int((last - first) * (at - began) / seconds))
            self._tell(self._progress(), after=at - self.now)
        self._reach(last)

    def _reach(self, step: int) -> None:
        """Train up to this step, with all epoch ends and evaluations that are due on the way."""
        while (found := self._next_due(self.step)) <= step:
            self.step = found
            if self.steps.ends_epoch(found):
                self._end_epoch(self.steps.epoch(found) - 1)
                self._write("epoch")
            metrics: dict[str, float | None] = {"loss": 0.25, "accuracy": 0.93}
            said = ev.Evaluated(
                self.job.ring.members[0], self.job.ring.generation, found, VALIDATION, HELD_OUT, metrics
            )
            self._tell(said)
        self.step = step

    def _next_due(self, step: int) -> int:
        per_epoch, each = self.steps.per_epoch, self.evaluated_every
        return min((step // per_epoch + 1) * per_epoch, (step // each + 1) * each)

    def _progress(self) -> ev.Progress:
        epoch = self.steps.epoch(self.step)
        done = self.step * self.steps.batch - epoch * self.layout.records
        loss = facts.EpochLoss(epoch, done, self.chance.random()) if done > 0 else None
        told = Staleness(64_000, 62.0, 240, 3) if self.job.config.asynchronous else None
        ring = self.job.ring
        return ev.Progress(ring.generation, self.step, self.chance.random(), loss, staleness=told)

    def _heard(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ef.Checkpoint):
                self._write("due")
            elif isinstance(effect, ef.Commit):
                self.kept = effect.step
                self._tell(ev.Checkpointed(effect.worker, effect.step, effect.attempt, 300_000_000))

    def _write(self, why: str) -> None:
        """Report that each member has written its checkpoint part; the last member sends the report."""
        members, attempt = self.job.ring.members, f"{self.step}-{why}-{self.chance.getrandbits(32):08x}"
        self._tell(ev.PartsWritten(members[-1], self.step, attempt, members), after=1.0)

    def _lose_server(self, server: int, log: bool) -> None:
        """Kill a server's process; a new process replaces it. With `log`, it still has its log."""
        self._tell(ev.ServerExited(server, "SIGKILL"))
        self._tell(ev.ServerAway(server, 1.0, "restarting"), after=1.0)
        self._tell(ev.ServerListens(server, 2.0, again=True), after=1.0)
        if not log:
            self._rolled_back = f"parameter server {server} has lost its log and rows"
            self._leave(broken=self._rolled_back)
            self._rolled_back = ""

    def _resize(self, servers: int) -> None:
        self.servers = servers
        addresses = tuple(f"edl-ps-{index}.edl-ps:8600" for index in range(max(servers, 3)))
        self._tell(ev.ServersReady(servers, addresses))


def journal(month: Month, output: Path, full_at: int = SEGMENT) -> Journal:
    """Open a journal of the month's job, like its master."""
    return Journal(output / artifacts.JOURNAL, RUN, month.spec, partial(snapshot.dump, month.job), full_at)


def keep(month: Month, output: Path, full_at: int = SEGMENT) -> None:
    """Run the month and write its journal and summary, in segments with `full_at` bytes of lines."""
    kept = journal(month, output, full_at)
    month.hear = kept.write
    month.run()
    kept.close()
    summarize(month, kept, output)


def summarize(month: Month, kept: Journal, output: Path) -> None:
    """Write the summary, as a master does at the end of a job."""
    summary = {"run_id": RUN, "foreign_messages": 0, "journal": asdict(kept.link), **view.summary(month.job)}
    (output / artifacts.SUMMARY).write_text(json.dumps(summary))
