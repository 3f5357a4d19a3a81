# SPDX-License-Identifier: Apache-2.0
"""Every fault of the catalogue, one at a time, on real workers; the weights have the last word."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.journal.audit import audit
from edl.master.core import effects as ef
from tests.support.jobs.evidence import saved_weights

A_Job = Callable[..., Any]


async def test_a_killed_rank_is_replaced_and_nothing_is_lost(a_job: A_Job) -> None:
    """The root, and then the last rank; at last the root again, in the last steps."""
    async with a_job(workers=3) as job:
        members = await job.ring_of(3)
        for rank, newest in ((0, 3), (2, 4)):
            await job.stepping()
            job.kill(members[rank])
            survivors = await job.ring_of(2)
            assert survivors == [m for m in members if m != members[rank]]
            members = await job.ring_of(3)
            assert members == [*survivors, newest]
        job.go()
        await job.until(lambda: job.applied() > job.epochs * job.records - 300)
        job.kill(members[0])  # in the last steps
        summary = await job.exact()
    losses = [c for c in summary["generations"] if not c["planned"]]
    assert len(losses) in (2, 3)
    assert all(change["stall_seconds"] < 3 for change in losses)
    assert summary["failures"] == []


async def test_all_but_one_killed(a_job: A_Job) -> None:
    async with a_job(workers=4) as job:
        members = await job.ring_of(4)
        await job.stepping()
        job.kill(*members[:2], members[3])
        assert await job.ring_of(1) == [members[2]]
        summary = await job.exact()
    assert summary["state_losses"] == 0


async def test_all_killed_at_once_is_said_and_still_exact(a_job: A_Job) -> None:
    async with a_job(workers=2) as job:
        members = await job.ring_of(2)
        await job.until(lambda: job.applied() > 100)
        job.kill(*members)
        await job.until(lambda: job.noticed(Reason.StateLost))
        summary = await job.exact()
    assert summary["state_losses"] == 1


async def test_a_stopped_worker_comes_back_with_its_memory_or_too_late_and_leaves(a_job: A_Job) -> None:
    async with a_job("elastic.gracePeriodSeconds=20", workers=3) as job:
        members = await job.ring_of(3)
        await job.stepping()
        frozen = members[1]
        pid = job.pid(frozen)
        job.kill(frozen, number=signal.SIGSTOP)
        assert frozen not in await job.ring_of(2)
        os.kill(pid, signal.SIGCONT)
        assert sorted(await job.ring_of(3)) == sorted(members), "it was neither replaced nor given up"
        assert job.pid(frozen) == pid
        await job.stepping()

        job.kill(frozen, number=signal.SIGSTOP)
        await job.until(lambda: job.fenced(frozen))
        assert job.fenced(frozen) is ef.FenceReason.HeartbeatTimeout
        os.kill(pid, signal.SIGCONT)
        ended = await job.until(lambda: job.gone(frozen))
        assert ended.code == 3, "the thawed worker should find that it was given up, and leave"
        assert frozen not in await job.ring_of(3)
        summary = await job.exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


async def test_sigterm_leaves_at_a_step_boundary(a_job: A_Job) -> None:
    async with a_job(workers=3) as job:
        members = await job.ring_of(3)
        await job.stepping()
        loop = asyncio.get_running_loop()
        began = loop.time()
        job.kill(members[0], number=signal.SIGTERM)
        ended = await job.until(lambda: job.gone(members[0]))
        assert loop.time() - began < 5
        assert ended.code == 0
        await job.ring_of(3)
        summary = await job.exact()
    assert all(change["planned"] for change in summary["generations"])
    assert sum(change["redone_records"] for change in summary["generations"]) == 0


async def test_workers_that_end_by_themselves_or_by_an_error_are_replaced_and_charged(a_job: A_Job) -> None:
    async with a_job(workers=3) as job:
        members = await job.ring_of(3)
        job.order(members[1], "exit")
        await job.until(lambda: job.gone(members[1]))
        await job.ring_of(3)
        job.order(members[2], "raise")
        await job.until(lambda: job.gone(members[2]))
        summary = await job.exact()
    ended, failure = summary["failures"]
    assert ended["why"] == f"worker {members[1]} exited unexpectedly with exit code 0"
    assert failure["why"].startswith("Ordered: the storm said so (orders.py, line ")
    assert "counting_faulty.py" in failure["traceback"]


async def test_a_call_that_never_returns_is_its_workers_failure(a_job: A_Job) -> None:
    async with a_job("elastic.stepTimeoutSeconds=4", workers=2) as job:
        members = await job.ring_of(2)
        job.order(members[1], "hang")
        await job.until(lambda: job.gone(members[1]))
        summary = await job.exact()
    (failure,) = summary["failures"]
    told = r"counting_faulty.py: feed\(\) of the records \d+, .* has not returned for 4 s"
    assert re.search(told, failure["why"])
    assert "threading.Event().wait()" in failure["traceback"]


async def test_workers_train_on_without_their_fork_server_and_another_makes_the_next(a_job: A_Job) -> None:
    async with a_job(workers=2, own_fork_server=True) as job:
        members = await job.ring_of(2)
        servers = [p for p in psutil.Process().children() if "trainer.forkserver" in " ".join(p.cmdline())]
        server = max(servers, key=psutil.Process.create_time)  # the other one is that of the session
        server.kill()
        (told,) = await job.until(lambda: job.noticed(Reason.Degraded))
        assert told.startswith("fork server: the fork server exited with code -9")
        job.kill(members[1])
        assert await job.ring_of(1) == members[:1]
        await job.ring_of(2)
        assert job.noticed(Reason.Recovered) == ["fork server works again"]
        summary = await job.exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


async def test_an_error_on_every_worker_fails_the_job_with_the_traceback(a_job: A_Job) -> None:
    async with a_job(workers=2, model="raising.py", records=200) as job:
        summary = await job.end()
    assert summary["phase"] == "Failed"
    told = "ZeroDivisionError: integer division or modulo by zero (raising.py, line "
    assert summary["reason"].startswith(told)
    assert summary["traceback"].count("raising.py") >= 1
    assert summary["failures"] == [], "it is no worker's failure"


async def test_a_worker_that_never_becomes_ready_is_given_up(a_job: A_Job) -> None:
    # Long enough for the worker that does not hang, on a busy machine too.
    async with a_job("elastic.startupTimeoutSeconds=15", workers=2, model="hanging.py") as job:
        await job.ring_of(1)
        await job.until(lambda: job.noticed(Reason.WorkerFailed))
        await job.ring_of(2)
        summary = await job.exact()
    (failure,) = summary["failures"]
    assert failure["why"].endswith(
        "hanging.py: model() has not returned for 14.25 s (elastic.startupTimeoutSeconds)"
    )
    assert "threading.Event().wait()" in failure["traceback"]


async def test_a_job_that_is_not_finite_stops_and_names_the_records(a_job: A_Job) -> None:
    async with a_job(workers=2, model="not_finite.py", records=400) as job:
        summary = await job.end()
    assert summary["phase"] == "Failed"
    told = re.search(r"is not finite at step .*, in the records ([^:]*): (.*)", summary["reason"])
    assert told
    assert "123" in told[1].split(", "), "the model's one record that is not"
    assert told[2].startswith("features is inf in record 123, so the loss is not finite")
    assert summary["failures"] == []


async def test_a_step_that_is_not_finite_can_be_skipped_by_all_alike(a_job: A_Job) -> None:
    async with a_job(
        "training.onNonFinite=skip", workers=2, model="not_finite.py", records=400, epochs=2
    ) as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded"
    skipped = summary["records"]["skipped"]
    assert sum(stop - start for start, stop in summary["task"]["skipped"]) == 2, "a step of each epoch"
    assert 2 <= skipped <= 2 * 32
    assert f"except {skipped} skipped records" in summary["reason"]
    assert len(set(summary["digests"].values())) == 1


async def test_bad_records_are_left_out_by_all_alike_and_named(a_job: A_Job) -> None:
    bad = [0, 40, 41, 123]
    async with a_job("data.maxBadRecords=4", workers=2, model="bad_records.py", records=400, epochs=2) as job:
        summary = await job.end()
    assert summary["phase"] == "Succeeded"
    assert summary["reason"].endswith("except 8 bad records that were left out")
    assert len(set(summary["digests"].values())) == 1
    (counts,) = [a for a in saved_weights(job.output / artifacts.MODEL) if a.shape == (400,)]
    assert counts.tolist() == [0 if record in bad else 2 for record in range(400)]
    assert audit(job.output).startswith("exactly once, except 8 bad records: 400 records x 2 epochs")


async def test_scale_up_and_down(a_job: A_Job) -> None:
    async with a_job(workers=2) as job:
        await job.ring_of(2)
        for size in (5, 1, 3):
            job.master.scale(size)
            await job.ring_of(size)
            await job.stepping()
        slow = job.job.ring.generation
        for size in (2, 4, 2, 3):
            job.master.scale(size)
            await asyncio.sleep(0.2)  # the point is the haste: workers join, leave and join within a second
        await job.ring_of(3)
        summary = await job.exact()
    changes = [change for change in summary["generations"] if change["generation"] <= slow]
    assert all(change["planned"] and change["redone_records"] == 0 for change in changes)
    # No member waits for the start of a new worker, which takes seconds.
    assert all(change["stall_seconds"] < 2 for change in changes[1:])
    assert summary["state_losses"] == 0


@pytest.mark.parametrize("records", [0, 17])
async def test_small_datasets(a_job: A_Job, records: int) -> None:
    async with a_job(
        "training.batchSize=16", "data.allowEmpty=true", workers=3, records=records, epochs=2
    ) as job:
        summary = await job.exact()
    assert summary["records"]["applied"] == 2 * records
    assert summary["step"] == summary["task"]["steps_done"] == 2 * -(-records // 16)


async def test_a_global_batch_smaller_than_the_ring(a_job: A_Job) -> None:
    async with a_job("training.batchSize=2", workers=3, records=60, epochs=2) as job:
        await job.exact()
