# SPDX-License-Identifier: Apache-2.0
"""Workers whose processes crash in a pod with its supervisor: real are the master, the supervisors and the
workers; pods and their API are the small server's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from tests.support.kubernetes.master import TOKEN, MasterProcess
from tests.support.kubernetes.small_release import Release, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

VALUES = (
    "model.module=counting",
    "training.epochs=100000",
    "training.batchSize=8",
    "local.threads=1",
    "elastic.prefork=true",
)


class Pod:
    """A pod's container, on this machine."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path):
        self.process, self.log = process, log

    @property
    def worker(self) -> psutil.Process:
        """The worker's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child


@asynccontextmanager
async def pods(release: Release, address: str, folder: Path) -> AsyncIterator[dict[str, Pod]]:
    """Runs what the pods of a release say; the small server's kubelet says only that they run."""
    there: dict[str, Pod] = {}
    ends: set[asyncio.Task[None]] = set()

    async def run(name: str) -> None:
        env = {e["name"]: e["value"] for e in release.server.pod(name)["spec"]["containers"][0]["env"]}
        with open(folder / f"{name}.log", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "edl.trainer.supervisor",
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **env,
                    "EDL_MASTER": address,
                    "EDL_TOKEN": TOKEN,
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    "PYTHONUNBUFFERED": "1",
                },
            )
        there[name] = Pod(process, folder / f"{name}.log")
        release.server.run_pod(name)
        code = await process.wait()
        if name in release.pods:
            release.server.end_pod(name, code if code >= 0 else 128 - code)

    async def watch() -> None:
        known: set[str] = set()
        while True:
            for name in set(release.pods) - known:
                known.add(name)
                ends.add(asyncio.create_task(run(name)))
            await asyncio.sleep(0.02)

    release.server.autorun = False
    watching = asyncio.create_task(watch())
    try:
        yield there
    finally:
        watching.cancel()
        for pod in there.values():
            with contextlib.suppress(ProcessLookupError):
                pod.process.kill()
        await asyncio.gather(*ends, return_exceptions=True)


async def status(master: MasterProcess) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(await master.address()) as channel:
        stream = rpc.MasterStub(channel).Watch(
            pb.WatchRequest(), metadata=[("authorization", f"Bearer {TOKEN}")]
        )
        return dict(json.loads((await anext(aiter(stream))).json))


async def ring(master: MasterProcess, *members: int, seconds: float = 60.0) -> dict[str, Any]:
    """The status, once these are in a ring that trains."""
    async with asyncio.timeout(seconds):
        while True:
            now = await status(master)
            states = {w["id"]: w["state"] for w in now["workers"]}
            if states == dict.fromkeys(members, "member") and now["step"]:
                return now
            await asyncio.sleep(0.02)


async def test_a_worker_that_crashes_is_followed_by_another_one_in_its_pod(
    small_release: Release, tmp_path: Path
) -> None:
    small_release.install("workers=2", *VALUES)
    async with (
        small_release.master() as master,
        pods(small_release, await master.address(), tmp_path) as there,
    ):
        await ring(master, 0, 1)
        for worker, number in ((1, signal.SIGSEGV), (2, signal.SIGKILL)):
            killed_at = time.monotonic()
            there["edl-worker-1"].worker.send_signal(number)
            before = await ring(master, 0, worker + 1)
            print(f"{number.name}: {time.monotonic() - killed_at:.2f} s")
            assert f"worker {worker} exited: {number.name}" in master.log
        assert small_release.server.names == ["edl-worker-0", "edl-worker-1"], "no other pod was made"
        labels = small_release.server.pod("edl-worker-1")["metadata"]["labels"]
        assert (labels["edl.dev/worker-id"], labels["edl.dev/place"]) == ("3", "1")
        assert before["failures"] == 1, "a segmentation fault is charged, a kill is not"
        await small_release.stop(master)
        await until(lambda: all(p.process.returncode == 0 for p in there.values()))
