"""A job whose model has its own training step of several sums, with faults in it: each record counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

A_Job = Callable[..., Any]
MODEL = "counting_own_step.py"


async def test_a_worker_killed_in_a_step_of_several_sums_loses_nothing(a_job: A_Job) -> None:
    async with a_job(workers=3, model=MODEL) as job:
        members = await job.ring_of(3)
        await job.stepping()
        job.kill(members[1])
        members = await job.ring_of(3, without=[members[1]])
        await job.stepping()
        job.kill(members[0], members[2])
        await job.ring_of(3, without=[members[0], members[2]])
        summary = await job.exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0
