# SPDX-License-Identifier: Apache-2.0
"""Jobs whose parameter servers become more and fewer while they train, and are killed meanwhile.

The model counts each record in a row of its own (tests/models/counting_rows.py): the last word is the rows'.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from edl.contract.exit_codes import WorkerExit
from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.master.core import ps as of_core
from tests.process.conftest import Running
from tests.process.jobs.test_saved import A_Job
from tests.process.ps.test_rows_on_servers import EPOCHS, RECORDS, counted, lose_log, started
from tests.support.jobs.by_commit import of_this_commit

pytestmark = pytest.mark.process
HYBRID = ("mode=hybrid", "ps.servers=1", "evaluation.epochs=0")


async def on(job: Running, servers: int) -> None:
    """Until the ring trains with the rows on so many servers, and no others are left."""
    await job.until(lambda: job.job.servers.have == servers and job.ring)
    await job.until(lambda: len(job.status["servers"]) == servers)
    await job.stepping()


async def evict_while_it_waits(job: Running, worker: int) -> None:
    """Ask a worker to end that waits for a server: it leaves, and does not wait until the server is back."""
    server = psutil.Process(await process(job, 0))
    server.suspend()
    try:
        await job.until(lambda: "parameter server 0" in (job.status.get("waits") or ""))
        job.kill(worker, number=signal.SIGTERM)
        gone = await job.until(lambda: job.gone(worker))
        assert (gone.code, gone.signal) == (WorkerExit.STOPPED, "")
        assert server.status() == psutil.STATUS_STOPPED
    finally:
        server.resume()


async def test_servers_become_more_and_fewer_and_are_killed_while_workers_come_and_go(a_job: A_Job) -> None:
    async with a_job(*HYBRID, workers=2, records=RECORDS, epochs=2 * EPOCHS, model="counting_rows.py") as job:
        members = await job.ring_of(2)
        await job.stepping()
        await evict_while_it_waits(job, members[0])
        members = await job.ring_of(2, without=members[:1])
        await job.stepping()
        for servers in (2, 1):
            assert f"-> {servers}" in job.master.scale(None, servers)
            await on(job, servers)
        assert not job.noticed(Reason.StateLost)
        assert not job.noticed(Reason.RolledBack), "no process was killed so far"
        moved = [text.split(",")[0] for text in job.noticed(Reason.Resharded)]
        assert moved == ["the rows are on 2 parameter servers", "the rows are on 1 parameter server"]
        job.master.scale(None, 3)
        await job.until(lambda: len(job.status["servers"]) == 3 and all(started(job, i) for i in range(3)))
        for index in (0, 2):
            os.kill(started(job, index), signal.SIGKILL)
        job.kill(members[0])
        await on(job, 3)
        job.master.scale(None, 1)
        os.kill(started(job, 1), signal.SIGKILL)
        await on(job, 1)
        await counted(job)


async def test_all_weights_move_while_steps_are_made_in_any_order_and_servers_are_killed(
    a_job: A_Job,
) -> None:
    ps = ("mode=ps", "ps.servers=1", "evaluation.epochs=0", "training.batchSize=20")
    async with a_job(*ps, workers=2, records=RECORDS, epochs=6, model="counting_rows.py") as job:
        members = await job.ring_of(2)
        await job.stepping()
        job.master.scale(None, 2)
        await on(job, 2)
        assert not job.noticed(Reason.RolledBack), "no process was killed so far"
        job.master.scale(None, 3)
        await job.until(lambda: len(job.status["servers"]) == 3 and all(started(job, i) for i in range(3)))
        for index in (0, 2):
            os.kill(started(job, index), signal.SIGKILL)
        job.kill(members[0])
        await on(job, 3)
        job.master.scale(None, 2)
        os.kill(started(job, 1), signal.SIGKILL)
        await on(job, 2)
        await counted(job)
    assert not job.noticed(Reason.RolledBack), "what is in a log is not lost"
    said = [f"the rows are on {n} parameter servers" for n in (2, 3, 2)]
    assert [text.split(",")[0] for text in job.noticed(Reason.Resharded)] == said


async def process(job: Running, index: int) -> int:
    """Return the process id of a server, once it listens."""
    return int(await job.until(lambda: started(job, index)))


@pytest.mark.parametrize("mode", of_this_commit(["hybrid", "ps"]))
async def test_with_a_second_copy_a_server_that_is_killed_or_hangs_is_done_without_until_both_copies_are_gone(
    a_job: A_Job, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_core, "HANG_SECONDS", 6.0)
    monkeypatch.setattr(of_core, "HANG_PROBES", 2)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    faults = [("killed", 0), ("killed", 1), ("hangs", seed % 2)]
    random.Random(seed).shuffle(faults)
    where = tmp_path / "checkpoints"
    twice = (
        f"mode={mode}",
        "ps.servers=2",
        "ps.replicas=2",
        "evaluation.epochs=0",
        f"checkpoint.dir={where}",
        "checkpoint.steps=5",
        "checkpoint.seconds=0",
    )
    async with a_job(*twice, workers=2, records=RECORDS, epochs=10, model="counting_rows.py") as job:
        members = await job.ring_of(2)
        await job.until(lambda: job.status["checkpoint"]["step"] >= 5)
        for what, index in faults:
            if what == "killed":
                os.kill(await lose_log(job, index), signal.SIGKILL)
            else:
                pid = await process(job, index)
                os.kill(pid, signal.SIGSTOP)
            await job.until(lambda index=index: job.job.servers.out == (index,) and job.ring)
            if what == "hangs":
                await job.stepping()  # without it
                assert job.status["servers"][index]["state"] == "out" and not job.status["waits"]
                await job.until(lambda: job.noticed(Reason.ServerRestarted))
            await job.until(lambda: job.job.servers.out == () and job.ring)  # and it has its rows again
            await job.stepping()
        job.kill(members[0])
        await job.ring_of(2, without=members[:1])
        assert not job.noticed(Reason.RolledBack), "one copy is enough"
        assert len(job.noticed(Reason.ServerRemoved)) == 3
        for pid in [await lose_log(job, index) for index in (0, 1)]:
            os.kill(pid, signal.SIGKILL)
        await job.until(lambda: job.noticed(Reason.RolledBack))
        await counted(job)
    assert all("step 0:" not in text for text in job.noticed(Reason.RolledBack))


async def test_servers_become_more_and_fewer_with_a_second_copy(a_job: A_Job) -> None:
    twice = ("mode=hybrid", "ps.servers=2", "ps.replicas=2", "evaluation.epochs=0")
    async with a_job(*twice, workers=1, records=RECORDS, epochs=EPOCHS, model="counting_rows.py") as job:
        await job.ring_of(1)
        with pytest.raises(ConfigError, match="each row is to be on more servers than there are"):
            job.master.scale(None, 1)
        for servers in (3, 2):
            job.master.scale(None, servers)
            await on(job, servers)
        await counted(job)
