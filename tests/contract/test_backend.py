# SPDX-License-Identifier: Apache-2.0
"""One contract for all backends: processes, external, Kubernetes at the small API server, and a fake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.master.backends.gpus import Gpus
from edl.master.backends.launchers import ForkServer
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.contract.backend_worlds import (
    FORK_SERVER,
    SECONDS,
    WATCHING,
    WORKER,
    InProcesses,
    World,
    a_world,
    create,
    delete,
)


@pytest.fixture(params=WATCHING)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(request.param, tmp_path) as world:
        yield world


@pytest.fixture(params=[*WATCHING, "external"])
async def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(request.param, tmp_path) as world:
        yield world


async def is_quiet(world: World, worker: int) -> None:
    """Check that no further event of this worker is emitted while a different worker starts and ends."""
    before = [e for e in world.log.events if getattr(e, "worker", None) == worker]
    create(world, 99)
    delete(world, 99, 0.0)
    await world.log.gone(99)
    assert [e for e in world.log.events if getattr(e, "worker", None) == worker] == before


# --- starting


async def test_a_worker_that_is_created_is_seen_once_with_a_handle(world: World) -> None:
    create(world, 0, 1)
    handles = {(await world.log.seen(worker)).handle for worker in (0, 1)}
    assert len(handles) == 2 and "" not in handles
    assert world.log.of(ev.Gone, 0) == world.log.of(ev.Gone, 1) == []


async def test_a_worker_that_cannot_be_started_is_told_with_the_reason(world: World) -> None:
    world.break_starts()
    create(world, 0)
    told = await world.log.until(
        lambda: [e for e in world.log.events if isinstance(e, ev.Delayed | ev.Gone) and e.why]
    )
    assert told[0].worker == 0
    assert world.log.of(ev.Seen, 0) == []
    delete(world, 0)
    await world.log.gone(0)
    assert len(world.log.of(ev.Gone, 0)) == 1


# --- ending


@pytest.mark.parametrize("code", [0, 3])
async def test_an_end_is_told_once_with_its_exit_code(world: World, code: int) -> None:
    create(world, 0)
    await world.log.seen(0)
    world.end(0, code)
    gone = await world.log.gone(0)
    assert (gone.code, gone.signal, gone.free) == (code, "", False)
    delete(world, 0, 0.0)  # the core may do so when a stream and a process end at the same time
    await is_quiet(world, 0)


async def test_a_crash_is_told_with_its_signal(world: World) -> None:
    create(world, 0)
    await world.log.seen(0)
    world.end(0, -11)
    assert (await world.log.gone(0)).signal == "SIGSEGV"


async def test_a_worker_that_its_peers_broke_is_free(world: World) -> None:
    create(world, 0)
    await world.log.seen(0)
    world.end(0, WorkerExit.PEER_BROKEN)
    gone = await world.log.gone(0)
    assert gone.free and gone.code == WorkerExit.PEER_BROKEN


async def test_an_exit_code_of_edls_that_only_the_users_code_has_used_is_charged_and_its_daemons_end(
    tmp_path: Path,
) -> None:
    """The parent of the process must end them; for a spawned worker this process is the parent."""
    world = InProcesses(tmp_path, fork=False)
    await world.backend.start()
    create(world, 0, 1)
    world.order(0, f"user{WorkerExit.LOST}")
    world.order(1, "daemon")
    gone = await world.log.gone(0)
    assert (gone.code, gone.free) == (WorkerExit.USER_CODE, False)
    assert (await world.log.gone(1)).code == 1
    left = int((tmp_path / "orders" / "left").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # it has its own session
        psutil.Process(left).wait(SECONDS)
    await world.backend.close()


@pytest.mark.parametrize("grace", [0.0, 1.0])
async def test_a_worker_that_is_deleted_is_gone_once(world: World, grace: float) -> None:
    create(world, 0)
    await world.log.seen(0)
    delete(world, 0, grace)
    delete(world, 0, grace)
    await world.log.gone(0)
    delete(world, 0, 0.0)
    await is_quiet(world, 0)


@pytest.mark.parametrize("fork", [False, True])
async def test_a_stopped_process_is_killed_after_its_grace_period(tmp_path: Path, fork: bool) -> None:
    world = InProcesses(tmp_path, fork)
    await world.backend.start()
    create(world, 0)
    os.kill(int((await world.log.seen(0)).handle), signal.SIGSTOP)
    delete(world, 0, 0.1)  # it does not act on SIGTERM, which may have come before its handler was set
    assert (await world.log.gone(0)).signal in ("SIGKILL", "SIGTERM")
    await world.backend.close()


async def test_a_worker_that_is_deleted_before_it_runs_is_gone_once(any_world: World) -> None:
    create(any_world, 0)
    delete(any_world, 0, 1.0)
    delete(any_world, 0, 0.0)
    await any_world.log.gone(0)
    await is_quiet(any_world, 0)
    assert len(any_world.log.of(ev.Gone, 0)) == 1


async def test_deleting_a_worker_that_was_never_created_changes_nothing(any_world: World) -> None:
    delete(any_world, 7)
    await is_quiet(any_world, 7)


async def test_nothing_is_emitted_after_close(any_world: World) -> None:
    create(any_world, 0, 1)
    await any_world.backend.close()
    told = len(any_world.log.events)
    await asyncio.sleep(0.1)
    assert len(any_world.log.events) == told


# --- GPUs


async def device_of(world: InProcesses, worker: int) -> str:
    """The GPU that a worker's process was given, and its host to NCCL."""
    pid, words = (await world.log.seen(worker)).handle, list[str]()
    async with asyncio.timeout(SECONDS):
        while "--gpu" not in words:  # on a busy machine, exec may be pending
            await asyncio.sleep(0.01)
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return " ".join(words[words.index("--gpu") + 1 :]).strip()


@pytest.mark.parametrize("fork", [False, True])
async def test_a_worker_waits_for_a_gpu_and_takes_over_that_of_one_that_ends(
    tmp_path: Path, fork: bool
) -> None:
    world = InProcesses(tmp_path, fork, gpus=Gpus(["GPU-a", "GPU-b"], each=1))
    await world.backend.start()
    create(world, 0, 1, 2, 3)
    assert await device_of(world, 0) == "GPU-a --nccl-host edl-0"
    assert await device_of(world, 1) == "GPU-b --nccl-host edl-0"
    for waiting in (2, 3):
        (delayed,) = await world.log.until(partial(world.log.of, ev.Delayed, waiting))
        assert delayed.why == "all GPUs are in use (local.gpusPerWorker)"
    delete(world, 2)  # it never had a GPU, and the next one that waits is not held up
    assert (await world.log.gone(2)).free
    os.kill(int((await world.log.seen(1)).handle), signal.SIGKILL)
    assert await device_of(world, 3) == "GPU-b --nccl-host edl-0"
    assert len(world.log.of(ev.Delayed, 3)) == 1
    create(world, 4)
    await world.log.until(lambda: world.log.of(ev.Delayed, 4))
    await asyncio.wait_for(world.backend.close(), SECONDS)
    assert (await world.log.gone(4)).free, "one that waits does not keep the backend from closing"


# --- the ways in which a start fails


@pytest.mark.parametrize("fork", [False, True])
async def test_a_log_that_cannot_be_written_is_the_workers_end(tmp_path: Path, fork: bool) -> None:
    world = InProcesses(tmp_path, fork)
    (world.logs / ("forkserver.log" if fork else "worker-0.log")).mkdir(parents=True)
    await world.backend.start()
    create(world, 0)
    gone = await world.log.gone(0)
    assert not gone.free, "the job is to blame: it must end, rather than try for ever"
    assert "its process cannot be started: IsADirectoryError" in gone.why and str(world.logs) in gone.why
    await world.backend.close()


@pytest.mark.parametrize(
    ("program", "code", "number"),
    [("import sys; sys.exit(3)", 3, ""), ("import os; os.kill(os.getpid(), 9)", -9, "SIGKILL")],
)
async def test_a_fork_server_that_exits_is_the_end_of_who_waits_for_it(
    tmp_path: Path, program: str, code: int, number: str
) -> None:
    world = InProcesses(tmp_path, fork=True)
    world.launcher._command = [sys.executable, "-c", program]
    await world.backend.start()
    create(world, 0)
    gone = await world.log.gone(0)
    assert f"the fork server exited with code {code}" in gone.why and "forkserver.log" in gone.why
    assert gone.signal == number, "a kill of the fork server from outside is no failure of the job"
    world.launcher._command = [sys.executable, "-c", FORK_SERVER, WORKER]
    create(world, 1)
    await world.log.seen(1)  # the next worker starts a new fork server
    await world.backend.close()


async def test_workers_outlive_their_fork_server_and_the_next_ones_have_another(tmp_path: Path) -> None:
    world = InProcesses(tmp_path, fork=True)
    await world.backend.start()
    create(world, 0, 1)
    pid = int((await world.log.seen(0)).handle)
    await world.log.seen(1)
    assert isinstance(world.launcher, ForkServer) and world.launcher._process is not None
    world.launcher._process.kill()
    (told,) = await world.log.until(lambda: [e for e in world.log.events if isinstance(e, ev.Degraded)])
    assert told.part == "fork server" and "exited with code -9" in told.why
    create(world, 2)
    await world.log.seen(2)
    assert world.log.events[-2] == ev.Degraded("fork server", "")
    os.kill(pid, 0)  # it lives
    world.end(0, 7)
    gone = await world.log.gone(0)
    assert gone.free and gone.code is None and "its fork server has ended" in gone.why
    world.end(2, 7)
    assert (await world.log.gone(2)).code == 7
    world.backend.perform(ef.Delete(WorkerId(1), 5.0))
    await world.log.gone(1)
    await world.backend.close()


@pytest.mark.parametrize("fork", [False, True])
async def test_nothing_is_kept_of_processes_that_have_ended(tmp_path: Path, fork: bool) -> None:
    """A job that trains for a month has thousands of them."""
    world = InProcesses(tmp_path, fork)
    backend = world.backend
    await backend.start()
    for worker in range(3):
        backend.perform(ef.Create(WorkerId(worker)))
    for worker in range(2):
        await world.log.seen(worker)
        world.end(worker, 0)
        await world.log.gone(worker)
    backend.perform(ef.Delete(WorkerId(0), 0))  # a late Delete changes nothing
    await world.log.seen(2)
    assert list(backend._workers) == [2]
    if isinstance(world.launcher, ForkServer):
        assert list(world.launcher._pids) == [2]
    await backend.close()
    assert not backend._workers
