# SPDX-License-Identifier: Apache-2.0
"""Jobs whose workers read in processes of their own (data.workers); the weights have the last word."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.master.core import events as ev
from edl.master.core.silence import BUSY_SECONDS
from edl.trainer.records.fork_server import NAME
from tests.process.conftest import MODELS
from tests.support.jobs.evidence import saved_weights

A_Job = Callable[..., Any]
MUCH_LESS = 10.0  # seconds: on a busy machine; it takes a fraction of one


def readers_of(pid: int) -> list[psutil.Process]:
    """The reader processes of a worker, after the process that they are forked from."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [
            process for process in psutil.Process(pid).children(recursive=True) if process.name() == NAME
        ]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return []


def successor(pid: int, parent: psutil.Process) -> psutil.Process | None:
    """The process that a worker's readers are forked from instead of `parent`, once it has forked both."""
    found = readers_of(pid)
    return found[0] if len(found) == 3 and found[0] != parent else None


async def test_readers_are_killed_and_an_error_is_told_and_every_record_counts_once(a_job: A_Job) -> None:
    now = asyncio.get_running_loop().time
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed}")  # pytest shows it if the test fails
    async with a_job("data.workers=2", workers=2) as job:
        members = await job.ring_of(2)
        parents = [readers_of(job.pid(worker))[0].cmdline() for worker in members]
        assert not any("edl.trainer.records.fork_server" in parent for parent in parents), "they are forked"
        for _ in range(5):
            await job.stepping()
            worker = draw.choice(members)
            readers = await job.until(lambda worker=worker: readers_of(job.pid(worker))[1:])
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(readers).kill()
        for worker in members * 2:  # the second time it is a spare that has taken over
            (parent := readers_of(job.pid(worker))[0]).kill()
            began = now()
            found = await job.until(lambda worker=worker, parent=parent: successor(job.pid(worker), parent))
            await job.stepping()
            print(f"worker {worker} steps {now() - began:.2f} s after the end of its readers' parent")
            assert "edl.trainer.records.fork_server" not in found.cmdline(), "a spare took over"
            assert now() - began < MUCH_LESS, "nothing is imported again"
        readers = await job.until(lambda: readers_of(job.pid(members[1]))[1:])
        job.order_process(readers[-1].pid, "raise")
        await job.until(lambda: job.gone(members[1]))
        _, alive = psutil.wait_procs(readers, timeout=10)
        assert not alive, "readers end with their worker"
        await job.ring_of(2)
        summary = await job.exact()
    assert len(summary["failures"]) == 1
    assert summary["failures"][0]["why"].startswith("Ordered: the storm said so (orders.py, line ")


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


@pytest.mark.parametrize(
    ("values", "readers", "what", "seconds"),
    [
        ("data.workers=0", False, "waits for records of step", 0.0),
        ("data.workers=2", True, "waits for records of step", 0.0),
        (f"model.script={MODELS / 'counting_loop.py'}", False, "is busy with step", BUSY_SECONDS),
    ],
    ids=["read", "reader process", "body of a loop"],
)
async def test_a_slow_call_of_one_worker_does_not_hold_the_others_when_a_third_is_killed(
    a_job: A_Job, values: str, readers: bool, what: str, seconds: float
) -> None:
    """The others do not wait for a read, and for code of the user only as long as it is documented."""
    now = asyncio.get_running_loop().time
    async with a_job(values, workers=3) as job:
        slow, killed, other = await job.ring_of(3)
        step = job.status["step"] + 4  # after two steps, members of a loop have compared their states
        await job.until(lambda: job.status["step"] >= step)
        reading = readers_of(job.pid(slow))[1:] if readers else [psutil.Process(job.pid(slow))]
        for process in reading:
            job.order_process(process.pid, "sleep")
        waits = f"no step is made: waiting for worker {slow}, which {what}"
        await job.until(lambda: job.status["reason"].startswith(waits))
        if not readers and not seconds:
            assert "counting_faulty.py: feed() of the records" in job.status["reason"]
        job.kill(killed)
        began = now()
        generation = job.job.ring.generation + 1
        await job.until(lambda: stepped(job, other, generation))
        print(f"worker {other} steps {now() - began:.2f} s after the kill")
        assert slow not in job.ring
        assert seconds <= now() - began < seconds + MUCH_LESS, "it waits for a call that takes a minute"
        if readers:
            for process in reading:
                process.kill()  # so that the reads are made again, and return
            await job.until(lambda: slow in job.ring)
        summary = await job.exact()
    assert summary["failures"] == []


def stepped(job: Any, worker: int, generation: int) -> bool:
    """Whether the worker has made a step in a ring that is not older than this."""
    return any(
        isinstance(event, ev.Stepped) and event.worker == worker and event.generation >= generation
        for _, event, _ in job.seen
    )
