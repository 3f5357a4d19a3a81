# SPDX-License-Identifier: Apache-2.0
"""For tests: the command line as a process, and a server with Kubernetes' protocol that has a release.

The commands are real processes with a real kubeconfig. What a chart and a master would have made is put there
by hand; what they make of what the commands ask is the business of test_kubernetes_job_object and of
tests/cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE, Object
from tests.support.jobs import forked_commands
from tests.support.kubernetes.driver import job_values

EDL = str(Path(sys.executable).with_name("edl"))
SECONDS = 60.0
RUN = "run-1"


def labels(release: str, component: str) -> dict[str, str]:
    keys = {"name": "edl", "part-of": "edl", "instance": release, "component": component}
    return {f"app.kubernetes.io/{key}": value for key, value in keys.items()}


def install(server: KubernetesApi, release: str = "edl", *sets: str, full: str = "") -> None:
    """What `helm install` leaves, as far as the commands read it."""
    full = full or release
    volume = {"name": "output", "persistentVolumeClaim": {"claimName": "models"}}
    data = {
        "values.json": json.dumps(job_values("workers=4", *sets)),
        "worker.yaml": yaml.safe_dump({"spec": {"volumes": [volume]}}),
    }
    for name, more in ((f"{full}-job", {"data": data}), (f"{full}-status", {})):
        server.put("configmaps", {"metadata": {"name": name, "labels": labels(release, "job")}, **more})


def says(server: KubernetesApi, phase: str, **more: str) -> None:
    """The master writes its status."""
    status = server.objects["configmaps"]["edl-status"]
    state = json.dumps({"runId": RUN, "nextId": 4})
    told = {"phase": phase, "reason": "because", "workers": "4", "state": state, **more}
    server.put("configmaps", {**status, "data": {**(status.get("data") or {}), **told}})


def data(server: KubernetesApi) -> dict[str, str]:
    """Return the data of the job's ConfigMap."""
    return dict(server.objects["configmaps"]["edl-job"]["data"])


def pod(
    server: KubernetesApi, component: str, number: int | None = None, runs: bool = True, **more: str
) -> str:
    """A pod, which runs."""
    name = f"edl-{component}" + ("" if number is None else f"-{number}")
    mine = labels("edl", component) | {f"edl.dev/{key}": value for key, value in more.items()}
    if number is not None:
        mine |= {"edl.dev/worker-id": str(number), "edl.dev/run-id": RUN}
    server.put(
        "pods",
        {
            "metadata": {"name": name, "labels": mine},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Pending"},
        },
    )
    if runs:
        server.run_pod(name)
    return name


@dataclass
class Done:
    code: int
    out: str
    err: str


class Running:
    """A command that has started."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def line(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), SECONDS)).decode()

    async def complains(self, words: str) -> None:
        """Until it says so, as an error."""
        assert self._process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while words not in (line := (await self._process.stderr.readline()).decode()):
                assert line, "it has ended"

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Read no more of it."""
        assert self._process.stdout is not None
        self._process.stdout._transport.close()  # type: ignore[attr-defined]

    async def end(self) -> Done:
        out, err = await asyncio.wait_for(self._process.communicate(), SECONDS)
        assert "Traceback" not in err.decode()
        return Done(self._process.returncode or 0, out.decode(), err.decode())


class Cluster(KubernetesApi):
    """The server, and the command line with a kubeconfig for it."""

    folder: Path

    async def start(self, *words: object) -> Running:
        environment = {**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}
        return Running(
            await asyncio.create_subprocess_exec(
                *forked_commands.edl(),
                *map(str, words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd=self.folder,
            )
        )

    async def edl(self, *words: object) -> Done:
        return await (await self.start(*words)).end()

    async def asked(self, verb: str, resource: str, times: int = 1) -> None:
        """Until so many of these requests have come."""
        async with asyncio.timeout(SECONDS):
            while self.count()[verb, resource] < times:
                await asyncio.sleep(0.01)


def kubeconfig(url: str, **more: Any) -> Object:
    return {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "here",
        **more,
    }


@asynccontextmanager
async def commanded(folder: Path) -> AsyncIterator[Cluster]:
    """A server that is up, with a release whose master runs."""
    server = Cluster(0.2)
    server.folder = folder
    await server.up()
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(server.url)))
    install(server)
    pod(server, "master")
    try:
        yield server
    finally:
        await server.close()
