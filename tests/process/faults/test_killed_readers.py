# SPDX-License-Identifier: Apache-2.0
"""Jobs whose workers read in processes of their own (data.workers); the weights have the last word."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import psutil

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.support.jobs.evidence import saved_weights

A_Job = Callable[..., Any]


def readers_of(pid: int) -> list[psutil.Process]:
    """The reader processes of a worker, after the process that they are forked from."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            process
            for process in psutil.Process(pid).children(recursive=True)
            if "edl.trainer.input.fork_server" in process.cmdline()
        ]
    return []


async def test_readers_are_killed_and_an_error_is_told_and_every_record_counts_once(a_job: A_Job) -> None:
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed}")  # pytest shows it if the test fails
    async with a_job("data.workers=2", workers=2) as job:
        members = await job.ring_of(2)
        for _ in range(5):
            await job.stepping()
            worker = draw.choice(members)
            readers = await job.until(lambda worker=worker: readers_of(job.pid(worker))[1:])
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(readers).kill()
        readers = await job.until(lambda: readers_of(job.pid(members[1]))[1:])
        job.order_process(readers[-1].pid, "raise")
        await job.until(lambda: job.gone(members[1]))
        _, alive = psutil.wait_procs(readers, timeout=10)
        assert not alive, "readers end with their worker"
        await job.ring_of(2)
        summary = await job.exact()
    assert len(summary["failures"]) == 1
    assert summary["failures"][0]["why"].startswith("Ordered: the storm said so (counting_faulty.py, line ")


async def test_a_record_that_crashes_its_reader_is_left_out_and_named(a_job: A_Job) -> None:
    async with a_job(
        "data.workers=2", "data.maxBadRecords=1", workers=1, model="deadly_records.py", records=400, epochs=2
    ) as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert summary["reason"].endswith("except 2 bad records that were left out")
    (counts,) = [a for a in saved_weights(job.output / artifacts.MODEL) if a.shape == (400,)]
    assert counts.tolist() == [0 if record == 200 else 2 for record in range(400)]
    assert job.noticed(Reason.BadRecord)[0] == (
        "record 200 of epoch 1 is left out: its reader process has crashed (SIGSEGV), twice"
    )
