# SPDX-License-Identifier: Apache-2.0
"""Jobs with mode=ps: real ones, whose workers and servers are killed.

The model counts each record in a row of its own, and all of them in a dense weight
(tests/models/counting_rows.py): both are on servers, and the last word is theirs.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.data import RandomAccess
from edl.journal import audit
from tests.process.conftest import Running
from tests.process.jobs.test_saved import A_Job
from tests.process.ps.test_rows_on_servers import counted, kill_server, lose_log, started
from tests.support.jobs.evidence import saved_weights
from tests.support.ps.rows import saved_rows

pytestmark = pytest.mark.process
PS = ("mode=ps", "ps.servers=2", "evaluation.epochs=0", "training.batchSize=20")
RECORDS, EPOCHS = 2000, 3
FAULTS = 4


async def lose_server(job: Running, index: int) -> None:
    """Kill it, with all that it remembers, and wait for the one that takes its place."""
    before = await lose_log(job, index)
    os.kill(before, signal.SIGKILL)
    await job.until(lambda: started(job, index) not in (0, before))


async def test_every_record_counts_once_whoever_is_killed_when(a_job: A_Job, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sets = (*PS, f"checkpoint.dir={tmp_path / 'checkpoints'}", "checkpoint.seconds=0.5")
    async with a_job(*sets, workers=2, records=RECORDS, epochs=EPOCHS, model="counting_rows.py") as job:
        for _ in range(FAULTS):
            await job.until(lambda: job.ring)
            await job.stepping()
            await asyncio.sleep(dice.uniform(0, 0.3))  # any moment will do
            match dice.choice(("worker", "workers", "server", "server and worker", "server and its log")):
                case "worker":
                    job.kill(*[w for w in job.ring[:1] if job.job.pool.get(w)])
                case "workers":
                    job.kill(*[w for w in job.ring if job.job.pool.get(w)])
                case "server":
                    await kill_server(job, dice.randrange(2))
                case "server and worker":
                    os.kill(await job.until(lambda: started(job, 0)), signal.SIGKILL)
                    job.kill(*[w for w in job.ring[-1:] if job.job.pool.get(w)])
                case "server and its log":
                    await lose_server(job, 1)
        await counted(job)


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


async def test_what_was_learned_is_evaluated_at_boundaries(a_job: A_Job) -> None:
    sets = ("mode=ps", "ps.servers=2", "evaluation.steps=30", "training.batchSize=64")
    async with a_job(*sets, workers=2, records=1, epochs=2, model="digits") as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    steps = [text.split(" on ")[0] for text in job.noticed(Reason.Evaluated)]
    assert steps[:2] == ["Evaluation at step 23", "Evaluation at step 30"], steps
    assert evaluated(job) == pytest.approx(summary["metrics"], rel=1e-4)


def evaluated(job: Running) -> dict[str, float]:
    """What Keras makes of the saved model and the held-out records."""
    import keras

    from edl.zoo import digits

    model = keras.models.load_model(job.output / artifacts.MODEL)
    reader = digits.data("validation")
    assert isinstance(reader, RandomAccess)
    x, y = reader.take(np.arange(len(reader)))
    found: dict[str, float] = model.evaluate(x, y, verbose=0, return_dict=True)
    return found
