# SPDX-License-Identifier: Apache-2.0
"""Jobs whose rows are on parameter servers: real ones, that are killed with and without what they remember.

The model counts each record in a row of its own (tests/models/counting_rows.py): the last word is the rows'.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.contract.tokens import for_reading
from edl.journal import audit
from edl.master.journal import replay
from edl.report import reading
from edl.rows.client import Client
from tests.process.conftest import Running
from tests.process.jobs.test_saved import A_Job
from tests.support.jobs.evidence import saved_weights
from tests.support.ps.rows import ids_of, saved_rows

pytestmark = pytest.mark.process
RECORDS, EPOCHS = 2000, 3
BAD_RECORDS = (0, 40, 41, 123)  # of bad_rows.py
HYBRID = ("mode=hybrid", "ps.servers=2", "evaluation.epochs=0")


def started(job: Running, index: int) -> int:
    """The process id of a server that listens; 0: none does."""
    server = job.status["servers"][index]
    return int(server["handle"]) if server["state"] == "running" else 0


async def kill_server(job: Running, index: int) -> None:
    """Kill it, and wait for the one that takes its place."""
    before = await job.until(lambda: started(job, index))
    os.kill(before, signal.SIGKILL)
    await job.until(lambda: started(job, index) not in (0, before))


async def lose_log(job: Running, index: int) -> int:
    """Stop a server, so that it writes nothing, and lose its log. Return its process; the caller kills it."""
    pid = int(await job.until(lambda: started(job, index)))
    os.kill(pid, signal.SIGSTOP)
    await job.until(lambda: stands_still(pid))
    shutil.rmtree(job.output / artifacts.SERVERS / f"log-{index}")
    return pid


def stands_still(pid: int) -> bool:
    """Whether all of its threads have taken notice of a SIGSTOP: one ends its call of the kernel before."""
    states = [
        task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state == "T" for state in states)


async def counted(job: Running) -> dict[str, Any]:
    """The job succeeds, and each record is counted in its row in each epoch; its summary."""
    summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert "exactly once" in audit.audit(job.output)
    ids, rows = saved_rows(job.output / artifacts.MODEL)
    [dense] = [w for w in saved_weights(job.output / artifacts.MODEL) if w.shape == (1,)]
    assert len(np.unique(ids)) == len(rows) == job.records
    assert rows.min() == rows.max() == job.epochs, f"rows count {rows.min():g} to {rows.max():g}"
    assert dense[0] == job.records * job.epochs, "the ring has counted others than the servers"
    return summary


async def test_workers_and_servers_are_killed_and_every_record_counts_once(a_job: A_Job) -> None:
    async with a_job(*HYBRID, workers=2, records=RECORDS, epochs=EPOCHS, model="counting_rows.py") as job:
        first = await job.ring_of(2)
        await job.stepping()
        await kill_server(job, 0)
        await job.stepping()
        hangs = await job.until(lambda: started(job, 1))
        os.kill(hangs, signal.SIGSTOP)
        await job.until(lambda: "the ring waits for parameter server 1 (not answering" in job.status["waits"])
        before = job.status["goodput"]["useful"]
        await job.until(lambda: job.status["goodput"]["waiting for servers"] > 3.0)
        assert job.status["goodput"]["useful"] <= before, "no step is made meanwhile"
        os.kill(hangs, signal.SIGCONT)
        await job.until(lambda: not job.status["waits"])
        await job.stepping()
        job.kill(first[0])  # which starts a generation, and writes to the servers for all
        second = await job.ring_of(2, without=first[:1])
        await job.stepping()
        os.kill(started(job, 1), signal.SIGKILL)  # both at once
        job.kill(second[1])
        await job.ring_of(2, without=second[1:])
        await job.stepping()
        processes = [started(job, index) for index in range(2)]
        folder = job.output / artifacts.SERVERS
        assert folder.is_dir()
        summary = await counted(job)
    assert summary["state_losses"] == 0
    assert summary["longest_wait"]["kind"] == "waiting for servers"
    assert max(end - start for start, end, _ in reading.read(job.output).waits) == pytest.approx(
        summary["longest_wait"]["seconds"], abs=0.1
    )
    assert any("server 1 (not answering" in text for text in job.noticed(Reason.ServerUnavailable))
    assert any("server 1 can be called again" in text for text in job.noticed(Reason.ServerRecovered))
    exits = job.noticed(Reason.ServerExited)
    assert len(exits) == 2, exits
    assert "parameter server 0 exited: SIGKILL" in exits[0]
    assert not any(psutil.pid_exists(pid) for pid in processes), "a server was left"
    assert not folder.exists(), "the logs of a job that has ended were left"


async def test_rows_of_bad_records_do_not_exist_and_all_others_count_once(a_job: A_Job) -> None:
    """A step with bad records is summed twice, and its rows are pulled twice and staged once."""
    sets = (*HYBRID, "data.maxBadRecords=4")
    async with a_job(*sets, workers=2, records=400, epochs=2, model="bad_rows.py") as job:
        first = await job.ring_of(2)
        await job.stepping()
        job.kill(first[0])
        summary = await job.end()
    assert summary["reason"].endswith("except 8 bad records that were left out"), summary
    assert audit.audit(job.output).startswith("exactly once, except 8 bad records: 400 records x 2 epochs")
    ids, rows = saved_rows(job.output / artifacts.MODEL)
    [dense] = [w for w in saved_weights(job.output / artifacts.MODEL) if w.shape == (1,)]
    good = np.setdiff1d(np.arange(400), BAD_RECORDS)
    assert sorted(ids) == sorted(ids_of(good))
    assert rows.min() == rows.max() == 2
    assert dense[0] == 2 * len(good), "the ring has counted others than the servers"


async def test_a_job_that_does_not_say_its_mode_has_servers_if_its_model_needs_them(a_job: A_Job) -> None:
    sets = ("ps.servers=1", "evaluation.epochs=0")  # mode=auto
    async with a_job(*sets, workers=2, records=RECORDS, epochs=1, model="counting_rows.py") as job:
        first = await job.ring_of(2)
        await job.stepping()
        job.kill(first[0])
        await job.ring_of(2, without=first[:1])  # the new one receives the decision
        await job.stepping()
        assert "-> 2" in job.master.scale(None, 2)
        await job.until(lambda: job.job.servers.have == 2 and job.ring)
        summary = await counted(job)
    assert summary["task"]["mode"] == "hybrid"
    [said] = job.noticed(Reason.ModeDecided)
    assert "1 edl.layers.Embedding: its rows are on 1 parameter server (mode=hybrid" in said
    assert not job.noticed(Reason.RolledBack) and summary["failures"] == []
    assert replay.main(str(job.output)) == 0


async def test_a_server_that_lost_its_log_takes_the_ring_back_to_a_checkpoint(
    a_job: A_Job, tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    sets = (*HYBRID, f"checkpoint.dir={where}", "checkpoint.steps=5", "checkpoint.seconds=0")
    async with a_job(*sets, workers=2, records=RECORDS, epochs=EPOCHS, model="counting_rows.py") as job:
        await job.ring_of(2)
        await job.until(lambda: job.status["checkpoint"]["step"] >= 5)
        before = job.job.ring.generation
        await lose_log(job, 1)
        await kill_server(job, 1)
        await job.until(lambda: job.job.ring.generation > before and job.ring)
        await job.stepping()
        await counted(job)
    back = job.noticed(Reason.RolledBack)
    assert back and all("step 0:" not in text for text in back), back


async def test_where_there_is_no_checkpoint_it_begins_anew(a_job: A_Job) -> None:
    async with a_job(*HYBRID, workers=2, records=RECORDS, epochs=1, model="counting_rows.py") as job:
        await job.ring_of(2)
        await job.stepping()
        before = job.job.ring.generation
        await lose_log(job, 0)
        await kill_server(job, 0)
        await job.until(lambda: job.job.ring.generation > before and job.ring)
        await counted(job)


async def test_the_status_tells_of_rows_which_are_read_while_the_job_trains_and_a_server_is_killed(
    a_job: A_Job,
) -> None:
    async with a_job(*HYBRID, workers=1, records=RECORDS, epochs=EPOCHS, model="counting_rows.py") as job:
        await job.ring_of(1)
        await job.until(
            lambda: all(s["rows"] and s["memory"] and s["share"] is not None for s in job.status["servers"])
        )
        told = job.status["servers"]
        assert [(s["index"], s["restarts"], [*s["tables"]]) for s in told] == [
            (0, 0, ["counts"]),
            (1, 0, ["counts"]),
        ]
        assert sum(s["share"] for s in told) == pytest.approx(1)
        addresses = [server["address"] for server in told]
        with Client(addresses, for_reading("a-token"), timeout=60) as client:
            ids = np.arange(RECORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            first = await asyncio.to_thread(client.rows, "counts", ids)
            copy = await asyncio.to_thread(client.changed, "counts")
            step = await asyncio.to_thread(lambda: client.step)
            await kill_server(job, 0)
            await job.until(lambda: job.status["step"] > step + 2)
            second = await asyncio.to_thread(client.rows, "counts", ids)
            news = await asyncio.to_thread(client.changed, "counts", copy.mark)
            assert copy.whole and not news.whole and news.step > copy.step
            learned = dict(zip(copy.ids.tolist(), copy.rows, strict=True))
            learned |= dict(zip(news.ids.tolist(), news.rows, strict=True))
            reread = await asyncio.to_thread(client.rows, "counts", ids)
        await counted(job)
    assert (first[:, 0] == first[:, 1]).all() and (second[:, 0] == second[:, 1]).all(), "half a row"
    assert (second >= first).all() and second.sum() > first.sum() > 0
    kept = np.array([learned.get(id, np.zeros(2)) for id in ids.astype(np.int64).tolist()])
    assert (second <= kept).all() and (kept <= reread).all(), "what has changed was not told"


async def test_a_model_without_rows_is_told_to_do_without_servers(a_job: A_Job) -> None:
    async with a_job("mode=hybrid", "ps.servers=1", workers=1, records=200, epochs=1) as job:
        summary = await job.end()
    assert summary["phase"] == "Failed"
    assert "mode is hybrid, and the model has no edl.layers.Embedding" in summary["reason"]
