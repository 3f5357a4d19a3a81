# SPDX-License-Identifier: Apache-2.0
"""Jobs whose rows begin with what another job has learned, brought to any number of servers.

The model counts each record in a row of its own (tests/models/counting_rows.py): so the rows say how often
each was trained in all, in this job and in the ones before it, and a job that predicts says the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract import artifacts
from edl.journal import audit
from tests.process.conftest import Running
from tests.process.jobs.test_saved import A_Job
from tests.process.ps.test_rows_on_servers import kill_server, lose_log
from tests.support.jobs.evidence import saved_weights
from tests.support.ps.rows import difference, saved_rows

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


@pytest.mark.timeout(400)  # four jobs, one after the other
async def test_rows_go_from_job_to_job_also_when_a_server_loses_them_at_once(
    a_job: A_Job, tmp_path: Path
) -> None:
    where, model = tmp_path / "checkpoints", tmp_path / "model.keras"
    sets = {"workers": 1, "records": RECORDS, "model": "counting_rows.py"}
    kept: tuple[str, ...] = (f"checkpoint.dir={where}", "checkpoint.steps=3")
    async with a_job("mode=hybrid", "ps.servers=2", *kept, epochs=1, **sets) as job:
        await counted(job, 1)
    shutil.rmtree(job.output)

    begun: tuple[str, ...] = (f"initFrom.path={where}", "initFrom.state=everything")
    async with a_job("mode=hybrid", "ps.servers=1", *begun, epochs=30, **sets) as job:
        await job.ring_of(1)
        await job.stepping()
        await lose_log(job, 0)  # both begin anew, with these rows
        await kill_server(job, 0)
        summary = await counted(job, 31)
    assert "all of the checkpoint of step" in summary["began_with"]
    shutil.copy(job.output / artifacts.MODEL, model)
    shutil.rmtree(job.output)

    more = tmp_path / "more"
    kept = f"checkpoint.dir={more}", "checkpoint.steps=100", "evaluation.epochs=0"
    async with a_job("mode=ps", "ps.servers=3", *kept, f"initFrom.path={model}", epochs=20, **sets) as job:
        await job.ring_of(1)
        await job.stepping()
        await kill_server(job, 1)  # whose log has the rows
        await counted(job, 51)
    shutil.rmtree(job.output)

    begun = f"initFrom.path={more}", "ps.servers=2", "prediction.partRecords=2"
    (tmp_path / "orders" / "idle").touch()
    sets["workers"] = 2
    async with a_job("mode=predict", *begun, **sets) as job:
        parts = job.output / artifacts.PREDICTIONS

        async def goes_on() -> None:
            before = len(list(parts.glob("part-*")))
            await job.until(lambda: len(list(parts.glob("part-*"))) > before)

        first = await job.ring_of(2)
        await goes_on()
        job.kill(first[0])
        await job.until(lambda: job.ring and first[0] not in job.ring)
        await goes_on()
        await kill_server(job, 0)
        await goes_on()
        await lose_log(job, 1)  # its rows are read once more
        await kill_server(job, 1)
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert "exactly once" in audit.audit(job.output)
    found = [np.load(path) for path in sorted(parts.glob("part-*"))]
    assert np.concatenate([part["ids"] for part in found]).tolist() == list(range(RECORDS))
    outputs = np.concatenate([part["output"] for part in found])
    assert (outputs[:, :2] == 51).all() and (outputs[:, 2] == 51 * RECORDS).all()
