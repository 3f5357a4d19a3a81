# SPDX-License-Identifier: Apache-2.0
"""A release of the chart at the small API server, and real masters of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import yaml

from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.kubernetes import pods
from edl.kubernetes.names import MASTER_PORT
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.kubernetes.driver import job_values
from tests.support.kubernetes.master import TOKEN, MasterProcess, master

POD = {"spec": {"restartPolicy": "Never", "containers": [{"name": "worker", "image": "edl-worker"}]}}


class Release:
    """What the chart would have installed, and the masters of it."""

    def __init__(self, server: KubernetesApi, folder: Path):
        self.server, self._folder = server, folder
        self.environment: dict[str, str] = {}  # of its masters, beyond what each has
        self._kubeconfig = folder / "kubeconfig"
        config = {
            "clusters": [{"name": "here", "cluster": {"server": server.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "it", "context": {"cluster": "here", "user": "me"}}],
            "current-context": "it",
        }
        self._kubeconfig.write_text(yaml.safe_dump(config))
        self.server.put("configmaps", {"metadata": {"name": "edl-status"}})
        self.server.put("leases", {"metadata": {"name": "edl-master"}})

    def install(self, *sets: str) -> None:
        data = {"values.json": json.dumps(job_values(*sets)), "worker.yaml": yaml.safe_dump(POD)}
        known = self.server.objects["configmaps"].get("edl-job", {"metadata": {"name": "edl-job"}})
        self.server.put("configmaps", {"metadata": dict(known["metadata"]), "data": data})

    @asynccontextmanager
    async def master(self, name: str = "edl-master-a", host: str = "") -> AsyncIterator[MasterProcess]:
        """A master in a pod of that name, which is deleted at the end.

        Args:
            host: its pod's address; empty: it need not be reachable.
        """
        self.put_master(name, host)
        listen = f"{host}:{MASTER_PORT}" if host else "127.0.0.1:0"
        environment = {"KUBECONFIG": str(self._kubeconfig), **self.environment}
        with master(self._folder / name, NAMESPACE, environment, name, listen) as process:
            try:
                yield process
                process.process.terminate()
                await until(lambda: not process.running)
            finally:
                self.server.drop("pods", name)

    def put_master(self, name: str, host: str) -> None:
        """A master's pod that is ready."""
        labels = {pods.INSTANCE: "edl", pods.COMPONENT: "master", pods.JOB: "edl"}
        status = {"phase": "Running", "podIP": host, "conditions": [{"type": "Ready", "status": "True"}]}
        self.server.put("pods", {"metadata": {"name": name, "labels": labels}, "status": status})

    @property
    def holder(self) -> str:
        """The pod of the master that acts."""
        spec = self.server.objects["leases"]["edl-master"].get("spec") or {}
        return str(spec.get("holderIdentity", "")).partition("_")[0]

    @property
    def status(self) -> dict[str, str]:
        return dict(self.server.objects["configmaps"]["edl-status"].get("data") or {})

    def ended(self, at: float) -> None:
        """Have the status say that the run ended then."""
        status = self.server.objects["configmaps"]["edl-status"]
        told = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.server.put("configmaps", {**status, "data": {**status["data"], "endedAt": told}})

    @property
    def pods(self) -> list[str]:
        """The workers'."""
        return sorted(n for n, p in self.server.objects["pods"].items() if pods.component(p) != "master")

    @property
    def acting(self) -> list[str]:
        """The masters that the Service selects."""
        return sorted(
            n
            for n, p in self.server.objects["pods"].items()
            if pods.ACTING in p["metadata"].get("labels", {})
        )

    async def stop(self, process: MasterProcess) -> None:
        """End the job, as `edl stop` does."""
        async with grpc.aio.insecure_channel(await process.address()) as channel:
            call = rpc.MasterStub(channel).Stop(
                pb.StopRequest(why="enough"), metadata=[("authorization", f"Bearer {TOKEN}")]
            )
            await call
        await until(lambda: self.status.get("phase") == "Stopped")


# Not Callable[[], ...]: a lambda in a loop binds its variables by default arguments.
async def until(so: Callable[..., Any], seconds: float = 30.0) -> Any:
    async with asyncio.timeout(seconds):
        while not (value := so()):
            await asyncio.sleep(0.01)
        return value
