# SPDX-License-Identifier: Apache-2.0
"""Jobs with mode=ps: real ones, whose workers and servers are killed.

The model counts each record in a row of its own, and all of them in a dense weight
(tests/models/counting_rows.py): both are on servers, and the last word is theirs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.journal import audit
from tests.models import digits_by_id
from tests.process.conftest import Running
from tests.process.jobs.test_saved import A_Job
from tests.process.ps.test_rows_on_servers import counted, lose_log, started
from tests.support.jobs.commands import edl
from tests.support.jobs.evidence import saved_weights
from tests.support.ps.rows import saved_rows

pytestmark = pytest.mark.process
PS = ("mode=ps", "ps.servers=2", "evaluation.epochs=0", "training.batchSize=20")
RECORDS = 2000


async def lose_server(job: Running, index: int) -> None:
    """Kill it, with all that it remembers, and wait for the one that takes its place."""
    before = await lose_log(job, index)
    os.kill(before, signal.SIGKILL)
    await job.until(lambda: started(job, index) not in (0, before))


async def test_nothing_is_lost_with_a_server_that_hangs_and_with_all_workers_at_once(a_job: A_Job) -> None:
    async with a_job(*PS, workers=2, records=RECORDS, epochs=2, model="counting_rows.py") as job:
        first = await job.ring_of(2)
        await job.until(lambda: job.status["step"] > 3)
        hangs = await job.until(lambda: started(job, 1))
        os.kill(hangs, signal.SIGSTOP)
        await job.until(lambda: "the ring waits for parameter server 1 (not answering" in job.status["waits"])
        os.kill(hangs, signal.SIGCONT)
        await job.until(lambda: not job.status["waits"] and job.status["staleness"])
        await job.stepping()
        before = job.status["step"]
        job.kill(*first)
        await job.ring_of(2, without=first)
        assert job.status["step"] >= before - 1
        summary = await counted(job)
    assert summary["state_losses"] == 0
    assert not job.noticed(Reason.StateLost) and not job.noticed(Reason.RolledBack)
    assert summary["staleness"]["most"] >= summary["staleness"]["median"] >= 0


async def test_a_server_that_lost_its_log_has_its_steps_made_again(a_job: A_Job, tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    sets = (*PS, f"checkpoint.dir={where}", "checkpoint.steps=5", "checkpoint.seconds=0")
    async with a_job(*sets, workers=2, records=RECORDS, epochs=2, model="counting_rows.py") as job:
        await job.ring_of(2)
        await job.until(lambda: job.status["checkpoint"]["step"] >= 5)
        await lose_server(job, 1)
        await job.until(lambda: job.noticed(Reason.RolledBack))
        await counted(job)
    assert "parameter server 1 has lost its log and rows" in job.noticed(Reason.RolledBack)[0]


async def test_another_job_goes_on_from_its_checkpoint_with_another_number_of_servers(
    a_job: A_Job, tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    sets = (*PS, f"checkpoint.dir={where}", "checkpoint.seconds=0", "checkpoint.steps=100")
    async with a_job(*sets, workers=2, records=RECORDS, epochs=1, model="counting_rows.py") as job:
        await counted(job)
    shutil.rmtree(job.output)
    shutil.rmtree(tmp_path / "orders", ignore_errors=True)
    (tmp_path / "orders").mkdir()
    more = (*sets, "ps.servers=3", "checkpoint.resume=true")
    async with a_job(*more, workers=1, records=RECORDS, epochs=3, model="counting_rows.py") as job:
        summary = await counted(job)
    assert summary["task"]["steps_done"] == 300


async def test_steps_that_wait_for_each_other_count_with_their_mean(a_job: A_Job) -> None:
    sets = (*PS, "ps.gradsToWait=2")
    async with a_job(*sets, workers=2, records=RECORDS, epochs=2, model="counting_rows.py") as job:
        await job.ring_of(2)
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert "exactly once" in audit.audit(job.output)
    _, rows = saved_rows(job.output / artifacts.MODEL)
    [dense] = [w for w in saved_weights(job.output / artifacts.MODEL) if w.shape == (1,)]
    # An epoch has an even number of steps, so each of them is one half of an update.
    np.testing.assert_array_equal(rows, 2 / 2)
    assert dense[0] == RECORDS * 2 / 2


async def test_what_was_learned_is_evaluated_at_boundaries_and_exported_from_its_checkpoint(
    a_job: A_Job, tmp_path: Path
) -> None:
    """The optimizer's slots, and the metrics of the training, are in the checkpoint and not in the export."""
    where = tmp_path / "checkpoints"
    sets = (*PS, "ps.replicas=2", "evaluation.epochs=1", "evaluation.steps=30", f"checkpoint.dir={where}")
    async with a_job(*sets, workers=2, epochs=2, model="digits_by_id.py") as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    steps = [text.split(" on ")[0] for text in job.noticed(Reason.Evaluated)]
    assert steps[:2] == ["Evaluation at step 30", "Evaluation at step 50"], steps
    trained: Any = keras.models.load_model(job.output / artifacts.MODEL)
    # The rows of unlearned ids are initial rows in a job, and zeros in a saved model (docs/embeddings.md).
    x, y = digits_by_id.records("test")
    assert trained.evaluate(x, y, verbose=0, return_dict=True) == pytest.approx(summary["metrics"], rel=1e-5)
    exported = tmp_path / "exported.keras"
    done = await asyncio.to_thread(edl, "model", "export", str(where), "--output", str(exported))
    assert done.returncode == 0, done.stderr
    again: Any = keras.models.load_model(exported)
    for there, here in zip(trained.weights, again.weights, strict=True):
        np.testing.assert_array_equal(there, here, there.path)
