# SPDX-License-Identifier: Apache-2.0
"""Values that change while a real job runs, as an upgrade of the chart would change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edl.contract import artifacts
from edl.contract.reasons import Reason

A_Job = Callable[..., Any]


async def test_live_values_are_applied_and_lose_nothing_and_what_cannot_change_is_refused(
    a_job: A_Job,
) -> None:
    async with a_job(workers=3) as job:
        await job.ring_of(3)
        values = job.master.spec.values
        job.take({**values, "workers": 2, "training": {**values["training"], "batchSize": 64}})
        await job.until(lambda: any("training.batchSize" in t for t in job.noticed(Reason.SpecRefused)))
        assert "training.batchSize" in job.status["refused"]
        await job.ring_of(2)
        job.take({**values, "workers": "many"})
        await job.until(lambda: any("many" in t for t in job.noticed(Reason.SpecRefused)))
        assert job.job.target == 2
        job.take({**values, "workers": 2})
        assert job.status["refused"] == ""
        await job.stepping()
        job.take({**values, "workers": 2, "suspend": True})
        await job.until(lambda: job.job.phase == "Suspended")
        applied, heard = job.applied(), job.heartbeats
        await job.until(lambda: job.heartbeats > heard + 6)
        assert job.applied() == applied
        job.take({**values, "workers": 3, "logLevel": "debug"})
        await job.ring_of(3)
        logs = [path.read_text() for path in (job.output / artifacts.LOGS).glob("worker-*")]
        assert sum("the log level is debug" in log for log in logs) == 3, "those that ran, and the new one"
        summary = await job.exact()
    assert sum(g["redone_records"] for g in summary["generations"]) == 0
    assert summary["goodput_seconds"]["suspended"] > 0
