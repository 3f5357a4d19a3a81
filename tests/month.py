"""A long job in no time: the real core, and workers that come and go in virtual time, with no heartbeats.

Every other change of the ring is a preemption; the next one takes in the worker that replaces it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import WorkerId
from edl.contract.layout import Layout
from edl.contract.steps import Steps
from master.core import effects as ef
from master.core import events as ev
from master.core import snapshot, view
from master.core.job import Job
from master.journal import SEGMENT, Journal
from master.spec import JobSpec

RUN = "a month"
DAYS = 30
BREATH = 0.0005  # seconds between what two workers say
Hear = Callable[[float, ev.Event, list[ef.Effect]], None]


class Month:
    """A job that trains for a month.

    Args:
        changes: of its ring, at least.
        records: in each of the epochs. batch: records in a step.
        most: journal.maxBytes.
    """

    def __init__(
        self,
        workers: int,
        changes: int,
        records: int = 10_000,
        epochs: int = 10,
        batch: int = 100,
        most: int = 1 << 20,
    ):
        self.spec = JobSpec.parse(values.merge(values.defaults(), {
            "workers": workers, "maxWorkers": workers, "journal": {"maxBytes": most},
            "training": {"epochs": epochs, "batchSize": batch},
        }))  # fmt: skip
        self.layout, self.times, self.nth = Layout(records), max(changes // 2, 1), 0
        self.chance = random.Random(1)
        self.steps, self.end = Steps(records, batch), Steps(records, batch).end(0, epochs)
        self.job = Job(self.spec.config)
        self.now, self.step = 1000.0, 0
        self.created: list[WorkerId] = []  # and not started yet
        self._leaving = False
        self.hear: Hear = lambda now, event, effects: None

    def run(self) -> None:
        """From the first event to the end of the job."""
        self.begin()
        for _ in range(self.times):
            self.change()
        self.finish()

    def begin(self) -> None:
        self._tell(ev.Begin())
        self._start()

    def change(self) -> None:
        """It trains for a while; then a worker is lost and replaced, which changes the ring twice."""
        self._train(self.end * self.nth // self.times)
        self.nth += 1
        self._lose(self.chance.choice(self.job.ring.members))
        self._start()

    def _tell(self, event: ev.Event, after: float = BREATH) -> None:
        self.now += after
        effects = self.job.handle(event, self.now)
        self.hear(self.now, event, effects)
        self.created += [effect.worker for effect in effects if isinstance(effect, ef.Create)]
        if any(isinstance(effect, ef.Leave) for effect in effects) and not self._leaving:
            self._leave()
        elif any(isinstance(effect, ef.Form) for effect in effects):
            self._join()

    def _start(self) -> None:
        """All that were asked for start and get ready, and are in the ring."""
        started, self.created = self.created, []
        for w in started:
            for event in (ev.Seen(w, f"edl-worker-{w}"), ev.Hello(w), ev.Ready(w, self.layout, "a model")):
                self._tell(event)
        self._tell(ev.Tick(), after=self.spec.config.elastic.join_delay_seconds)
        assert len(self.job.ring.members) == self.job.target, self.job.reason

    def _join(self) -> None:
        generation, members = self.job.ring.generation, self.job.ring.members
        for w in members:
            self._tell(ev.JoinedRing(w, generation, self.step))
        for w in members:
            self._tell(ev.Stepped(w, generation, self.step + 1, 0.2, 0, 0.0))

    def _leave(self, broken: str = "", digest: str = "") -> None:
        generation, self._leaving = self.job.ring.generation, True
        for w in [w.id for w in self.job.ring.inside]:
            self._leaving = w != self.job.ring.inside[-1].id  # the last one's word has the next ring formed
            self._tell(ev.LeftRing(w, generation, self.step, True, broken=broken, digest=digest))

    def _train(self, step: int) -> None:
        ring, before, seconds = self.job.ring, self.steps.epoch(self.step), DAYS * 86400 / self.times
        self.step = max(step, self.step)
        for epoch in range(before, self.steps.epoch(self.step)):
            loss = ev.EpochLoss(epoch, self.layout.records, 0.5)
            self._tell(ev.EpochEnded(ring.members[0], ring.generation, epoch + 1, loss), after=seconds)
            seconds = BREATH
        self.now += seconds

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


def journal(month: Month, output: Path, full_at: int = SEGMENT) -> Journal:
    """An open journal of the month's job, as its master has it."""
    return Journal(output / artifacts.JOURNAL, RUN, month.spec, partial(snapshot.dump, month.job), full_at)


def keep(month: Month, output: Path, full_at: int = SEGMENT) -> None:
    """Live the month, and keep what a master would, in segments with so many bytes of lines."""
    kept = journal(month, output, full_at)
    month.hear = kept.write
    month.run()
    kept.close()
    summarize(month, kept, output)


def summarize(month: Month, kept: Journal, output: Path) -> None:
    """Write the summary, as a master does at the end."""
    summary = {"run_id": RUN, "foreign_messages": 0, "journal": asdict(kept.link), **view.summary(month.job)}
    (output / artifacts.SUMMARY).write_text(json.dumps(summary))
