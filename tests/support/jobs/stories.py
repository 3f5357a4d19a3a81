# SPDX-License-Identifier: Apache-2.0
"""Stories of a job: the test acts for its workers, and receives the effects of the core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from edl import config
from edl.config import values
from edl.contract.ids import WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.jobs import new_job
from edl.master.telemetry import Telemetry
from tests.support.jobs.invariants import Watchdog

E = TypeVar("E")


class Story:
    """A job whose workers are driven by the test: 100 records, 1 epoch, batches of 10."""

    def __init__(
        self, workers: int = 3, records: int = 100, checkpoint: dict[str, Any] | None = None, **elastic: Any
    ):
        overrides = {
            "mode": elastic.pop("mode", "train"),
            "workers": workers,
            "minWorkers": int(elastic.pop("least", 1)),
            "training": {"epochs": 1, "batchSize": 10} | elastic.pop("training", {}),
            "checkpoint": checkpoint or {},
            "ps": elastic.pop("ps", {}),
            "model": elastic.pop("model", {}),
            "horovod": elastic.pop("horovod", {}),
            "elastic": {
                "joinDelaySeconds": 0,
                "heartbeatTimeoutSeconds": 3,
                "startupTimeoutSeconds": 60,
                "maxFailures": 2,
            }
            | elastic,
        }
        self.values = values.merge(values.defaults(), overrides)
        self.job = new_job(config.parse(self.values))
        self.watchdog = Watchdog(self.job)
        self.telemetry = Telemetry(self.job.config)
        self.records, self.now = records, 100.0
        self.tell(ev.Begin())

    def tell(self, *said: ev.Event | facts.Heartbeat, after: float = 0.01) -> list[ef.Effect]:
        effects = []
        for what in said:
            self.now += after
            for event in (*self.telemetry.hears(what, self.now), *self.telemetry.passes(self.now)):
                effects += self.watchdog.handle(event, self.now)
        return effects

    def waits(self, seconds: float) -> list[ef.Effect]:
        """Let time pass, with a Tick at each deadline and at the end."""
        effects, until = [], self.now + seconds
        while (deadline := self.next_deadline()) is not None and deadline <= until:
            effects += self.tell(ev.Tick(), after=deadline - self.now)
        return effects + self.tell(ev.Tick(), after=until - self.now)

    def next_deadline(self) -> float | None:
        times = (self.job.next_deadline(), self.telemetry.next_deadline())
        return min((at for at in times if at is not None), default=None)

    def ready(self, *workers: int) -> list[ef.Effect]:
        return [
            e
            for w in workers
            for e in self.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), Layout(self.records)))
        ]

    def up(self, step: int = 0) -> list[ef.Effect]:
        """Report that the formed ring is up, and its first step done."""
        g, members = self.job.ring.generation, self.job.ring.members
        effects = [e for m in members for e in self.tell(ev.JoinedRing(m, g, step))]
        return effects + [e for m in members for e in self.tell(ev.Stepped(m, g, step + 1, 0.2, 0, 0.0))]

    def out(
        self, *workers: int, step: int = 1, broken: str = "", digest: str = "", made_in: int = 0
    ) -> list[ef.Effect]:
        """Report that these workers have left the ring, with a state that `made_in` has made."""
        generation = self.job.ring.generation
        return [
            e
            for w in workers
            for e in self.tell(
                ev.LeftRing(
                    WorkerId(w),
                    generation,
                    step,
                    True,
                    broken=broken,
                    digest=digest,
                    made_in=made_in,
                )
            )
        ]

    def running(self, *workers: int) -> Story:
        self.ready(*(workers or range(self.job.target)))
        self.up()
        return self

    def kill(self, worker: int) -> list[ef.Effect]:
        return self.tell(
            ev.Closed(WorkerId(worker), "its stream ended"), ev.Gone(WorkerId(worker), signal="SIGKILL")
        )

    def beats(self, *workers: int, after: float = 0.0) -> list[ef.Effect]:
        return [
            e
            for w in workers
            for e in self.tell(facts.Heartbeat(WorkerId(w), self.job.ring.generation, 1), after=after)
        ]

    @property
    def exporter(self) -> WorkerId:
        assert self.job.exporter is not None, "no worker exports the model"
        return self.job.exporter

    @property
    def notices(self) -> list[ef.Notice]:
        return of([e for _, _, effects in self.watchdog.history for e in effects], ef.Notice)

    def noticed(self, reason: Reason) -> list[str]:
        """The texts of all notices of this reason."""
        return [notice.text for notice in self.notices if notice.reason is reason]


def only(effects: Iterable[object], kind: type[E]) -> E:
    (found,) = of(effects, kind)
    return found


def of(effects: Iterable[object], kind: type[E]) -> list[E]:
    return [e for e in effects if isinstance(e, kind)]


def finish(story: Story, digests: tuple[str, ...] = ("same", "same"), first: int = 0) -> list[ef.Effect]:
    """Report that all records are applied; the members, from `first` on, leave the ring."""
    story.tell(ev.Progress(story.job.ring.generation, 10))
    outs = enumerate(digests, first)
    return [e for w, digest in outs for e in story.out(w, step=10, digest=digest)]


def ended_job(**more: Any) -> dict[str, Any]:
    """The summary of a job that has succeeded, as far as it is printed; `more` replaces parts of it."""
    nothing = {"reason": "", "traceback": "", "loss": None, "seconds": 1.0, "state_losses": 0}
    empty: dict[str, Any] = {"task": {}, "metrics": {}, "goodput_seconds": {}, "generations": []}
    return {"phase": "Succeeded", "records": {"size": None}, **nothing, **empty, **more}
