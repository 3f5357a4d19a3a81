# SPDX-License-Identifier: Apache-2.0
"""Jobs whose models sum several times within a step, with faults and newcomers: each record counts once."""

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


async def test_who_joins_a_ring_that_sums_rows_one_by_one_does_not_stop_it(a_job: A_Job) -> None:
    """Until it has the state it has no records, and makes the sums within a step all the same."""
    async with a_job(workers=1, model="rows_in_ring.py", records=600, epochs=20) as job:
        await job.ring_of(1)
        await job.stepping()
        job.master.scale(2)
        await job.ring_of(2)
        await job.stepping()
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert len(set(summary["digests"].values())) == 1
