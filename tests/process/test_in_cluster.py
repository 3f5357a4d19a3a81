"""The master's process as the chart starts it, over all its runs; pods and API are the small server's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from edl.proto import edl_pb2 as pb
from edl.proto import edl_pb2_grpc as rpc
from tests.kubernetes_api import NAMESPACE, KubernetesApi, serving
from tests.kubernetes_driver import job_values
from tests.kubernetes_master import TOKEN, MasterProcess, master

POD = {"spec": {"restartPolicy": "Never", "containers": [{"name": "worker", "image": "edl-worker"}]}}


class Release:
    """What the chart would have installed, and the masters of it."""

    def __init__(self, server: KubernetesApi, folder: Path):
        self.server, self._folder = server, folder
        self._kubeconfig = folder / "kubeconfig"
        config = {
            "clusters": [{"name": "here", "cluster": {"server": server.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "it", "context": {"cluster": "here", "user": "me"}}],
            "current-context": "it",
        }
        self._kubeconfig.write_text(yaml.safe_dump(config))
        self.server.put("configmaps", {"metadata": {"name": "edl-status"}})

    def install(self, *sets: str) -> None:
        data = {"values.json": json.dumps(job_values(*sets)), "worker.yaml": yaml.safe_dump(POD)}
        known = self.server.objects["configmaps"].get("edl-job", {"metadata": {"name": "edl-job"}})
        self.server.put("configmaps", {"metadata": dict(known["metadata"]), "data": data})

    @asynccontextmanager
    async def master(self, name: str = "edl-master-a") -> AsyncIterator[MasterProcess]:
        with master(self._folder / name, NAMESPACE, {"KUBECONFIG": str(self._kubeconfig)}, name) as process:
            yield process
            process.process.terminate()
            await until(lambda: not process.running)

    @property
    def status(self) -> dict[str, str]:
        return dict(self.server.objects["configmaps"]["edl-status"].get("data") or {})

    @property
    def pods(self) -> list[str]:
        return sorted(self.server.objects["pods"])

    async def stop(self, process: MasterProcess) -> None:
        """End the job, as `edl stop` does."""
        async with grpc.aio.insecure_channel(await process.address()) as channel:
            call = rpc.MasterStub(channel).Stop(
                pb.StopRequest(why="enough"), metadata=[("authorization", f"Bearer {TOKEN}")]
            )
            await call
        await until(lambda: self.status.get("phase") == "Stopped")


async def until(so: Callable[[], Any], seconds: float = 30.0) -> Any:
    async with asyncio.timeout(seconds):
        while not (value := so()):
            await asyncio.sleep(0.01)
        return value


@pytest.fixture
async def release(tmp_path: Path) -> AsyncIterator[Release]:
    async with serving(0.05) as server:
        yield Release(server, tmp_path)


# --- after the end


async def test_ended_pods_are_deleted_when_their_time_to_live_is_over(release: Release) -> None:
    release.install("workers=2", "ttlSecondsAfterFinished=-1")
    async with release.master() as first:
        await until(lambda: len(release.pods) == 2)
        release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-2" in release.pods)
        await release.stop(first)
        await until(lambda: release.pods == ["edl-worker-0"])
        ended_at = time.time()
    release.install("workers=2", "ttlSecondsAfterFinished=3")
    async with release.master("edl-master-b"):
        await until(lambda: not release.pods)
        assert 2 <= time.time() - ended_at <= 8, "the time is counted from the end, not from a master's start"
        assert release.status["phase"] == "Stopped"


async def test_a_time_to_live_that_is_given_after_the_end_counts_too(release: Release) -> None:
    release.install("workers=1", "ttlSecondsAfterFinished=-1")
    async with release.master() as process:
        await until(lambda: release.pods)
        release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-1" in release.pods)
        await release.stop(process)
        await until(lambda: "waiting for other values" in process.log)
        assert release.pods == ["edl-worker-0"], "its log may be read"
        release.install("workers=1", "ttlSecondsAfterFinished=0")
        await until(lambda: not release.pods)
        before = len(release.server.requests)
        await asyncio.sleep(1)
        assert release.server.count(before)["create", "pods"] == 0
