# SPDX-License-Identifier: Apache-2.0
"""The core of a master that takes over a job from an earlier one, for stories."""

from __future__ import annotations

from edl import config
from edl.config import values
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.jobs import new_job

DATA = Layout(100)
FAILOVER_SECONDS, PROMPT_SECONDS = 10.0, 3.0


class NewMaster:
    """The core of a master that finds workers of an earlier one."""

    def __init__(
        self,
        *adopted: int,
        next_id: int = 0,
        pending: tuple[int, ...] = (),
        workers: int = 3,
        load_balancing: str = "none",
        began_with: str = "",
        prompt: tuple[int, ...] = (),
        mode: str = "auto",
        past: facts.Past | None = None,
        active_seconds: float = 0.0,
    ):
        overrides = {
            "mode": mode,
            "workers": workers,
            "training": {"epochs": 1, "batchSize": 10, "loadBalancing": load_balancing},
            "elastic": {"joinDelaySeconds": 0, "startupTimeoutSeconds": 60},
        }
        self.job = new_job(config.parse(values.merge(values.defaults(), overrides)))
        self.now = 100.0
        known = [(WorkerId(w), f"pod-{w}") for w in adopted] + [(WorkerId(w), "") for w in pending]
        near = tuple(map(WorkerId, prompt))
        self.tell(
            ev.Adopted(tuple(known), next_id, 10.0, active_seconds, began_with, near, PROMPT_SECONDS, past)
        )
        self.first = self.tell(ev.Begin())

    def tell(self, *events: ev.Event, after: float = 0.01) -> list[ef.Effect]:
        effects = []
        for event in events:
            self.now += after
            effects += self.job.handle(event, self.now)
        return effects

    def back(
        self,
        worker: int,
        generation: int = 7,
        members: tuple[int, ...] = (0, 1, 2),
        *,
        up: bool = True,
        out: ev.LeftRing | None = None,
        left: bool = False,
    ) -> list[ef.Effect]:
        w = WorkerId(worker)
        return self.tell(
            ev.Hello(w, resumes=True),
            ev.Resume(w, DATA, Generation(generation), tuple(map(WorkerId, members)), left, up, out),
        )

    def out(self, *workers: int, step: int = 4, generation: int = 7, broken: str = "") -> list[ef.Effect]:
        return self.tell(*(said(w, step, generation, broken) for w in workers))


def said(worker: int, step: int = 4, generation: int = 7, broken: str = "") -> ev.LeftRing:
    return ev.LeftRing(WorkerId(worker), Generation(generation), step, True, broken=broken)
