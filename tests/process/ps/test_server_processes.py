# SPDX-License-Identifier: Apache-2.0
"""Parameter servers as processes of this machine: they come back where they were, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.processes import Plan, ServerProcesses
from tests.process.conftest import ROOT, SECONDS

pytestmark = pytest.mark.process

A_MASTER = """
import asyncio, sys
from pathlib import Path
from edl.master.parameter_servers.processes import Plan, ServerProcesses

async def main():
    folder = Path(sys.argv[1])
    plan = Plan(1, "run", folder / "servers", folder, "127.0.0.1")
    servers = ServerProcesses(lambda event: None, plan, "a-token")
    await servers.start()
    await servers.addresses()
    print(servers.status()[0]["handle"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def until(events: asyncio.Queue[ev.Event], kind: type[ev.Event]) -> ev.Event:
    async with asyncio.timeout(SECONDS):
        while not isinstance(event := await events.get(), kind):
            pass
        return event


@contextlib.asynccontextmanager
async def running(
    folder: Path, host: str = "127.0.0.1", ended: bool = True, **options: Any
) -> AsyncIterator[tuple[asyncio.Queue[ev.Event], ServerProcesses]]:
    """One server and its news; at last the job has `ended`, or another master goes on with it."""
    events: asyncio.Queue[ev.Event] = asyncio.Queue()
    plan = Plan(1, "run", folder / "servers", folder, host)
    servers = ServerProcesses(events.put_nowait, plan, "a-token", **options)
    await servers.start()
    try:
        yield events, servers
    finally:
        await servers.close(ended)


async def test_one_that_is_killed_or_hangs_comes_back_at_its_address(tmp_path: Path) -> None:
    async with running(tmp_path, ended=False) as (events, servers):
        addresses = await asyncio.wait_for(servers.addresses(), SECONDS)
        await until(events, ev.ServerListens)
        os.kill(int(servers.status()[0]["handle"]), signal.SIGKILL)
        exited = await until(events, ev.ServerExited)
        assert exited == ev.ServerExited(0, "SIGKILL")
        again = await until(events, ev.ServerListens)
        assert isinstance(again, ev.ServerListens) and again.again
        os.kill(int(servers.status()[0]["handle"]), signal.SIGSTOP)
        assert await until(events, ev.ProbeUnanswered) == ev.ProbeUnanswered(0, 1)
        assert await until(events, ev.ProbeUnanswered) == ev.ProbeUnanswered(0, 2)
        servers.perform(ef.RestartServer(0))
        assert isinstance(await until(events, ev.ServerExited), ev.ServerExited)
        await until(events, ev.ServerListens)
        assert await servers.addresses() == addresses
        [told] = servers.status()
        assert told["restarts"] == 2
        assert psutil.pid_exists(int(told["handle"]))
    assert not psutil.pid_exists(int(told["handle"]))
    assert (tmp_path / "servers" / "log-0").is_dir(), "another master may go on from it"


async def test_one_that_refuses_its_arguments_ends_it_with_its_last_words(tmp_path: Path) -> None:
    async with running(tmp_path, "256.0.0.1") as (events, _):
        exited = await until(events, ev.ServerExited)
    assert isinstance(exited, ev.ServerExited) and exited.fatal
    assert exited.why.startswith("exit code 2: ")
    assert "256.0.0.1" in exited.why
    assert not (tmp_path / "servers").exists()


async def test_servers_end_with_a_master_that_is_killed(tmp_path: Path) -> None:
    master = await asyncio.create_subprocess_exec(
        sys.executable, "-c", A_MASTER, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert master.stdout is not None
    server = psutil.Process(int(await asyncio.wait_for(master.stdout.readline(), SECONDS)))
    master.kill()
    await master.wait()
    await asyncio.to_thread(server.wait, SECONDS)
    assert not server.is_running()


async def test_a_further_one_that_the_ring_has_not_heard_of_when_rows_are_assigned_is_not_ended(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (events, servers):
        await asyncio.wait_for(servers.addresses(), SECONDS)
        servers.resize(2)
        await until(events, ev.ServersReady)
        servers.perform(ef.Assigned(1, wanted=1))  # decided before that had its turn
        assert (servers.wanted, len(servers.status())) == (2, 2)
        surplus = psutil.Process(int(servers.status()[1]["handle"]))
        surplus.suspend()  # it does not end politely
        servers.perform(ef.Assigned(1, wanted=2))  # the rows stay
        assert (servers.wanted, len(servers.status())) == (1, 1)
        await asyncio.to_thread(surplus.wait, SECONDS)
        assert psutil.pid_exists(int(servers.status()[0]["handle"]))


FURTHER = """
import runpy, sys
if sys.argv[sys.argv.index("--index") + 1] == "1":
    {does}
runpy.run_module("ps", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("sys.exit(print('no room', file=sys.stderr) or 2)", "cannot be started: exit code 2: no room"),
        ("sys.stdin.read()", "does not listen after 1 s"),
    ],
)
async def test_a_further_one_that_does_not_come_to_listen_is_given_up(
    tmp_path: Path, does: str, why: str
) -> None:
    async with running(
        tmp_path, command=(sys.executable, "-c", FURTHER.format(does=does)), listen_timeout=1.0
    ) as (events, servers):
        await asyncio.wait_for(servers.addresses(), SECONDS)
        servers.resize(2)
        given_up = await until(events, ev.ServersGivenUp)
        assert given_up == ev.ServersGivenUp(2, 1, f"parameter server 1 {why}")
        servers.perform(ef.Assigned(1, wanted=2))
        assert (servers.wanted, len(servers.status())) == (1, 1)


async def test_one_that_cannot_be_started_does_not_keep_its_place_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (events, servers):
        await asyncio.wait_for(servers.addresses(), SECONDS)
        (tmp_path / "ps-1.log").mkdir()
        servers.resize(2)
        given_up = await until(events, ev.ServersGivenUp)
        assert isinstance(given_up, ev.ServersGivenUp) and "cannot be started" in given_up.why
        servers.perform(ef.Assigned(1, wanted=2))
        (tmp_path / "ps-1.log").rmdir()
        servers.resize(2)
        await until(events, ev.ServersReady)


def test_a_server_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    def run(*args: Any) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "edl.ps", *map(str, args)], capture_output=True, text=True
        )
        return done.returncode, done.stderr

    (tmp_path / "token").write_text("token")
    (tmp_path / "file").write_text("")
    known = ["--run-id", "run", "--token-file", tmp_path / "token"]
    for args, text in (
        ([], "--log-dir is required"),
        ([*known, "--log-dir", tmp_path / "log", "--index", 2, "--servers", 2], "--index 2: expected 0 to 1"),
        ([*known, "--log-dir", tmp_path / "file"], "file"),
        (["--run-id", "run", "--log-dir", tmp_path / "log"], "token is missing"),
        ([*known, "--log-dir", tmp_path / "log", "--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
    ):
        code, said = run(*args)
        assert code == 2 and text in said, said
