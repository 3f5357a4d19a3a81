"""Jobs whose rows begin with what another job has learned, brought to any number of servers.

The model counts each record in a row of its own (tests/models/counting_rows.py): so the rows say how often
each was trained in all, in this job and in the ones before it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from tests.evidence import saved_weights
from tests.process.conftest import Running
from tests.process.test_rows_on_servers import kill_server, lose_log
from tests.process.test_saved import A_Job
from tests.rows import difference, saved_rows

pytestmark = pytest.mark.process
RECORDS = 600


async def counted(job: Running, epochs: int) -> dict[str, Any]:
    """The job succeeds, and each record was counted so often in all; its summary."""
    summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    model = job.output / artifacts.MODEL
    assert difference(*saved_rows(model), RECORDS, epochs) == ""
    [dense] = [w for w in saved_weights(model) if w.shape == (1,)]
    assert dense[0] == RECORDS * epochs, "the ring has counted others than the servers"
    return summary


async def test_rows_go_from_job_to_job_also_when_a_server_loses_them_at_once(
    a_job: A_Job, tmp_path: Path
) -> None:
    where, model = tmp_path / "checkpoints", tmp_path / "model.keras"
    sets = {"workers": 1, "records": RECORDS, "model": "counting_rows.py"}
    kept = f"checkpoint.dir={where}", "checkpoint.steps=3"
    async with a_job("mode=hybrid", "ps.servers=2", *kept, epochs=1, **sets) as job:
        await counted(job, 1)
    shutil.rmtree(job.output)

    begun = f"checkpoint.from={where}", "checkpoint.fromState=everything"
    async with a_job("mode=hybrid", "ps.servers=1", *begun, epochs=30, **sets) as job:
        await job.ring_of(1)
        await job.stepping()
        await lose_log(job, 0)  # both begin anew, with these rows
        await kill_server(job, 0)
        summary = await counted(job, 31)
    assert "all of the checkpoint of step" in summary["began_with"]
    shutil.copy(job.output / artifacts.MODEL, model)
    shutil.rmtree(job.output)

    async with a_job("mode=hybrid", "ps.servers=3", f"checkpoint.from={model}", epochs=20, **sets) as job:
        await job.ring_of(1)
        await job.stepping()
        await kill_server(job, 1)  # whose log has the rows
        await counted(job, 51)
