# SPDX-License-Identifier: Apache-2.0
"""A bit flips in the memory of one worker: real jobs find out at the next checkpoint, and end exactly.

A worker that computes a different model than the others is refused before it is in a ring.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edl.checkpoints import Store
from edl.contract.exit_codes import WorkerExit
from edl.contract.reasons import Reason
from edl.journal import audit
from edl.master.core import effects as ef
from tests.process.jobs.test_saved import A_Job

pytestmark = pytest.mark.process
MODEL = "counting_flips.py"


async def test_a_worker_in_whose_memory_a_bit_flips_is_dropped_and_nothing_is_redone(
    a_job: A_Job, tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    values = f"checkpoint.dir={where}", "checkpoint.seconds=1"
    async with a_job(*values, workers=3, model=MODEL, epochs=2) as job:
        members = await job.ring_of(3)
        job.give("other")  # to the worker that takes the place of the odd one
        job.give("flip")
        (told,) = await job.until(lambda: job.noticed(Reason.ReplicaDivergence))
        (odd,) = [w for w in members if job.fenced(w) is ef.FenceReason.StateDiffers]
        assert f"1 of 3 members held another state; worker {odd} is dropped" in told
        gone = await job.until(lambda: job.gone(odd))
        log = next(job.output.rglob(f"worker-{odd}.log")).read_text()
        assert f"edl worker {odd}: worker {odd} holds another state than 2 of 3 members" in log, log
        assert gone.code == WorkerExit.STOPPED
        before = job.status["checkpoint"]["step"]
        refused = max(members) + 1
        await job.ring_of(3, without=[odd, refused])
        await job.until(lambda: job.status["checkpoint"]["step"] > before)
        summary = await job.exact()
    assert summary["state_losses"] == 0
    assert [f["worker"] for f in summary["failures"]] == [odd, refused]
    assert "holds another state than 2 of 3 members" in summary["failures"][0]["why"]
    one, other = sorted(set(members) - {odd})
    why = rf"worker {refused} computes a loss of (\S+) for the first records with fixed weights, "
    why += rf"workers {one} and {other} compute (\S+): their models or data differ\."
    assert (losses := re.match(why, summary["failures"][1]["why"])), summary["failures"]
    assert float(losses[1]) == pytest.approx(1.5 * float(losses[2]), rel=1e-4)
    for checkpoint in Store.open(str(where)).checkpoints():
        checkpoint.verify()


async def test_of_two_workers_nobody_knows_whose_state_is_right_so_both_go_back_to_the_checkpoint(
    a_job: A_Job, tmp_path: Path
) -> None:
    values = f"checkpoint.dir={tmp_path / 'checkpoints'}", "checkpoint.seconds=1"
    async with a_job(*values, workers=2, model=MODEL, epochs=2) as job:
        await job.ring_of(2)
        await job.until(lambda: job.status["checkpoint"]["step"])
        job.give("flip")
        (told,) = await job.until(lambda: job.noticed(Reason.ReplicaDivergence))
        assert "all go back to the newest checkpoint of step" in told
        await job.until(lambda: job.noticed(Reason.Restored))
        await job.ring_of(2)
        summary = await job.exact()
        assert "the newest state was lost once" in audit.audit(job.output)
    assert summary["state_losses"] == 1 and summary["failures"] == []
    assert not job.noticed(Reason.StateLost), "no worker was lost"
    assert len(job.noticed(Reason.ReplicaDivergence)) == 1
