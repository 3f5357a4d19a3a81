# SPDX-License-Identifier: Apache-2.0
"""training.deterministic: models of the zoo and of the examples have the same bits after any history.

A history is random, and its seed is printed: workers are killed, paused and told to leave, their number
changes, and the master stops and another resumes its job. Each commit has one model; EDL_STORMS=all runs all
of them, with more histories.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edl.journal.audit import same
from edl.master.core import events as ev
from tests.process.conftest import ROOT, Running
from tests.support.jobs.by_commit import of_this_commit

EXAMPLES = {
    name: str(ROOT / "examples" / name / f"{name}.py")
    for name in ("masked_sequence", "sample_weights", "segmentation", "several_inputs")
}
ZOO = ("counting", "dcn_v2", "deepfm", "digits", "digits_ids", "wide_deep")
ALL = os.environ.get("EDL_STORMS") == "all"
HISTORIES = int(os.environ.get("EDL_HISTORIES", 20 if ALL else 2))
EPOCHS, MOST = 5, 5  # workers


async def live(job: Running, chance: random.Random) -> bool:
    """Let faults happen until the job has ended; False if its master was stopped before."""
    await job.until(lambda: job.ring)
    while job._task is not None and not job._task.done():
        await asyncio.sleep(chance.uniform(0.0, 1.0))  # at any moment
        if not (members := list(job.ring)):
            continue
        match chance.choice(("kill", "kill", "term", "pause", "scale", "stop")):
            case "kill" if len(members) > 1:
                job.kill(*chance.sample(members, chance.randint(1, len(members) - 1)))
            case "term" if len(members) > 1:
                job.kill(chance.choice(members), number=signal.SIGTERM)
            case "pause":
                worker = chance.choice(members)
                job.kill(worker, number=signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(0.0, 3.0))  # as long as a machine may be moved
                with suppress(KeyError, ProcessLookupError):  # it was lost for its silence, and killed
                    job.kill(worker, number=signal.SIGCONT)
            case "scale":
                job.master.scale(chance.randint(1, MOST))
            case "stop" if job.applied() and chance.random() < 0.3:
                job.master.stop("another master resumes", checkpoint=True, force=True)
                return bool((await job.end())["phase"] == "Succeeded")
    return True


@pytest.mark.timeout(120 + 90 * HISTORIES)  # a busy machine starts a worker in 15 s
@pytest.mark.parametrize("name", of_this_commit([*ZOO, *EXAMPLES]))
async def test_a_model_has_the_same_bits_after_any_history(
    name: str, a_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_CLICKS_RECORDS", "3000")
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "4096")
    sets = ["training.deterministic=true", "mode=train", "training.batchSize=64", "elastic.maxFailures=1000"]
    how = {"model": EXAMPLES.get(name, name), "epochs": EPOCHS, "records": 2000}
    async with a_job(*sets, workers=1, **how) as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    digests = set(summary["digests"].values())
    alone = job.output.rename(tmp_path / "alone")
    for nth in range(HISTORIES):
        seed, over, part, checkpoints = random.randrange(1 << 30), False, 0, tmp_path / f"checkpoints-{nth}"
        print(f"{name}: history {nth}, seed {seed}")
        chance = random.Random(seed)
        while not over:
            resume = f"checkpoint.dir={checkpoints},checkpoint.resume={str(checkpoints.exists()).lower()}"
            async with a_job(*sets, resume, workers=chance.randint(1, MOST), **how) as job:
                over = await live(job, chance)
                summary = await job.end()
            assert not over or summary["phase"] == "Succeeded", summary
            output, part = job.output.rename(tmp_path / f"history-{nth}-{part}"), part + 1
            if any(isinstance(event, ev.EpochEnded) for _, event, _ in job.seen):
                print(f"  {same(output, alone)}; {len(summary['generations'])} rings")
        assert set(summary["digests"].values()) == digests
