# SPDX-License-Identifier: Apache-2.0
"""Jobs of a script with its own training loop, with faults and newcomers: each record counts once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract.reasons import Reason
from tests.process.conftest import MODELS
from tests.support.jobs.evidence import saved_weights

A_Job = Callable[..., Any]
SCRIPT = f"model.script={MODELS / 'counting_loop.py'}"


async def test_killed_workers_of_a_loop_lose_nothing_and_their_successors_receive_the_state(
    a_job: A_Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TensorFlow; the other libraries below."""
    monkeypatch.setenv("EDL_COUNTING_STATE", "tf")
    async with a_job(SCRIPT, workers=3) as job:
        members = await job.ring_of(3)
        await job.stepping()
        job.kill(members[1])
        members = await job.ring_of(3, without=[members[1]])
        await job.stepping(3)
        job.kill(members[0], members[2])
        await job.ring_of(3, without=[members[0], members[2]])
        summary = await job.exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


async def test_workers_of_a_numpy_loop_join_leave_and_are_killed_and_import_no_framework(
    a_job: A_Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_COUNTING_STATE", "numpy")
    async with a_job(SCRIPT, workers=1, own_fork_server=True) as job:
        (first,) = await job.ring_of(1)
        await job.stepping()
        job.master.scale(3)
        await job.ring_of(3)
        await job.stepping(3)
        job.kill(first, number=signal.SIGTERM)
        members = await job.ring_of(3, without=[first])
        await job.stepping(3)
        assert job.gone(first).code == 0
        job.kill(members[0])
        await job.ring_of(3, without=[members[0]])
        summary = await job.exact()
    assert summary["failures"] == []


@pytest.mark.timeout(360)  # workers start three times, and then the loop alone
@pytest.mark.parametrize("library", ["torch", "jax"])
async def test_a_loop_whose_root_and_then_all_workers_die_has_the_weights_of_the_same_loop_alone(
    a_job: A_Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """The root's successor receives the state; the successors of all go on from the checkpoint."""
    pytest.importorskip(library)
    monkeypatch.setenv("EDL_COUNTING_STATE", library)
    kept = f"checkpoint.dir={tmp_path / 'checkpoints'},checkpoint.steps=5,checkpoint.seconds=0"
    async with a_job(SCRIPT, kept, workers=2, own_fork_server=True) as job:
        members = await job.ring_of(2)
        await job.stepping(3)
        job.kill(members[0])
        members = await job.ring_of(2, without=members[:1])
        assert not job.noticed(Reason.StateLost)
        await job.until(lambda: job.status["checkpoint"]["step"])
        job.kill(*members)
        await job.ring_of(2, without=members)
        assert (await job.exact())["failures"] == []
        assert job.noticed(Reason.Restored)
    environment = {**os.environ, "EDL_COUNTING_EPOCHS": "4", "EDL_FAULTS": str(tmp_path)}
    (alone := tmp_path / "alone").mkdir()
    script = [sys.executable, str(MODELS / "counting_loop.py")]
    subprocess.run(script, cwd=alone, env=environment, check=True, timeout=120)
    ours, theirs = (
        [w for w in saved_weights(model) if w.ndim == 2]
        for model in (job.output / "model.keras", alone / "model.keras")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import edl\n", "the script has ended, and never called edl.join()"),
        ("import sys\nsys.exit(2)\n", "has called sys.exit(2)"),
        (
            "import edl, numpy as np\nw = np.zeros(1, np.float32)\nfor step in edl.join(w, [w]).steps():\n"
            "    w += step.mean([w])\n",
            "Cannot cast ufunc",
        ),
        (
            "import edl, os, numpy as np\nw = np.full(1, os.getpid(), float)\n"
            "for step in edl.join(np.zeros(64), {'w': w}).steps():\n"
            "    if step.mean([w]) is not None:\n        w += os.getpid()\n",
            "at step 2 the workers' states differ in w",
        ),
    ],
    ids=["never joins", "exits", "does not expect None", "state of its own"],
)
async def test_a_script_that_cannot_train_fails_the_job_with_one_sentence(
    a_job: A_Job, tmp_path: Path, text: str, told: str
) -> None:
    (script := tmp_path / "train.py").write_text(text)
    async with a_job(f"model.script={script}", "elastic.maxFailures=0", workers=2) as job:
        summary = await job.end()
    assert summary["phase"] == "Failed"
    assert told in summary["reason"]
    assert summary["reason"].count("train.py") >= 1


LATE_MOMENTUM = """
import time, edl, numpy as np
w, speed = np.zeros(4, np.float32), 0.0
for step in edl.join(np.zeros(6400), {"weights": w}).steps():
    if (mean := step.mean([np.ones(4, np.float32)])) is None:
        continue
    time.sleep(0.02)
    speed = 0.9 * speed + mean[0][0] if step.number > 5 else 0.0  # after the trial, and not in the state
    w -= 0.1 * (mean[0] + speed)
"""


async def test_a_worker_that_joins_without_all_of_the_state_fails_the_job_with_its_first_update(
    a_job: A_Job, tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").write_text(LATE_MOMENTUM)
    async with a_job(f"model.script={script}", "training.epochs=40", workers=1) as job:
        await job.ring_of(1)
        await job.until(lambda: job.status["step"] > 20)
        job.master.scale(2)
        summary = await job.end()
    joined = summary["generations"][-1]
    found = re.search(
        r"train.py, line \d+: at step (\d+) the workers' states differ in weights: either ", summary["reason"]
    )
    assert summary["phase"] == "Failed" and found, summary["reason"]
    assert int(found[1]) - joined["step"] == 2, "its first update is the first one that differs"
    assert summary["reason"].endswith("or bad memory")
