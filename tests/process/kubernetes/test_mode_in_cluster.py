# SPDX-License-Identifier: Apache-2.0
"""mode=auto in a release: the master as the chart starts it, a worker that says what its model has, and the
StatefulSet that the chart has made without pods. The API is the small one, the parameter server is real."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import edl
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from tests.support.kubernetes.master import TOKEN, MasterProcess
from tests.support.kubernetes.small_release import Release, until

pytestmark = pytest.mark.waits
JOB = ("workers=1", "ps.servers=1", "elastic.heartbeatTimeoutSeconds=60", "elastic.joinDelaySeconds=0")


class Worker:
    """One without a model, on its stream to a master."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.run_id = ""

    async def hears(self, what: str) -> Any:
        """The next message of this kind."""
        async with asyncio.timeout(60):
            while (message := await self._stream.read()).WhichOneof("body") != what:
                pass
        self.run_id = message.run_id
        return getattr(message, what)

    async def says(self, **what: Any) -> None:
        await self._stream.write(pb.FromWorker(run_id=self.run_id, **what))


@asynccontextmanager
async def a_worker(of: MasterProcess, number: int = 0) -> AsyncIterator[tuple[Worker, dict[str, Any]]]:
    """A worker that is welcome, and the values that it was given."""
    async with grpc.aio.insecure_channel(await of.address()) as channel:
        stream = rpc.MasterStub(channel).Work(metadata=[("authorization", f"Bearer {TOKEN}")])
        await stream.initial_metadata()
        worker = Worker(stream)
        await worker.says(hello=pb.Hello(worker=number, version=edl.__version__))
        welcome = await worker.hears("welcome")
        yield worker, json.loads(welcome.config)
        stream.cancel()


@asynccontextmanager
async def parameter_server(folder: Path, listen: str) -> AsyncIterator[None]:
    folder.mkdir()
    (folder / "token").write_text(TOKEN)
    words = ["--index", "0", "--token-file", str(folder / "token"), "--log-dir", str(folder / "log")]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "edl.ps", *words, "--listen", listen)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def replicas(of: Release) -> int:
    return int(of.server.objects["statefulsets"]["edl-ps"]["spec"]["replicas"])


def with_servers(release: Release, port: int) -> None:
    """As the chart installs it."""
    release.install(*JOB)
    release.server.put("statefulsets", {"metadata": {"name": "edl-ps"}, "spec": {"replicas": 0}})
    release.environment["EDL_SERVER_ADDRESS"] = f"127.0.0.1:{port}"


async def test_servers_are_created_once_the_model_needs_them_also_by_the_next_master(
    small_release: Release, tmp_path: Path, unused_tcp_port: int
) -> None:
    with_servers(small_release, unused_tcp_port)
    async with small_release.master("a") as first:
        await until(lambda: small_release.pods)
        async with a_worker(first) as (worker, values):
            assert values["mode"] == "auto"
            assert replicas(small_release) == 0
            await worker.says(built=pb.Built(tables=1))
            await until(lambda: replicas(small_release) == 1)
            assert json.loads((await worker.hears("welcome")).config)["mode"] == "hybrid"
            await worker.says(ready=pb.Ready(layout=pb.Layout(records=100), model="m", tables=1))
            await until(lambda: "parameter servers are starting" in small_release.status.get("reason", ""))
            async with parameter_server(tmp_path / "ps", f"127.0.0.1:{unused_tcp_port}"):
                form = await worker.hears("form")
            assert (form.servers, list(form.addresses)) == (1, [f"127.0.0.1:{unused_tcp_port}"])
        await until(lambda: json.loads(small_release.status["values"])["mode"] == "hybrid")
    # The first one could have died before it had them created.
    scaled = small_release.server.objects["statefulsets"]["edl-ps"]
    small_release.server.put("statefulsets", {**scaled, "spec": {"replicas": 0}})
    for pod in small_release.pods:
        small_release.server.drop("pods", pod)
    async with small_release.master("b") as second:
        await until(lambda: replicas(small_release) == 1)
        [pod] = await until(lambda: small_release.pods)
        async with a_worker(second, int(pod.rpartition("-")[2])) as (_, values):
            assert values["mode"] == "hybrid", "it was decided"
        small_release.install(*JOB, "ps.servers=2")
        await until(lambda: replicas(small_release) == 2)
        # Helm applies the StatefulSet after the values, and as it was when the chart was rendered.
        small_release.server.put("statefulsets", {**scaled, "spec": {"replicas": 1}})
        await until(lambda: replicas(small_release) == 2)


async def test_a_model_that_needs_servers_in_a_release_without_any_fails_and_says_what_to_set(
    small_release: Release,
) -> None:
    small_release.install(*JOB)
    async with small_release.master("a") as master:
        await until(lambda: small_release.pods)
        async with a_worker(master) as (worker, _):
            await worker.says(built=pb.Built(tables=1))
            await until(lambda: small_release.status.get("phase") == "Failed")
    assert "start another run, with mode=hybrid" in small_release.status["reason"]
    assert not [r for r in small_release.server.requests if r.resource == "statefulsets"]


async def test_a_model_that_needs_none_has_none_and_nothing_is_asked_of_the_api(
    small_release: Release, unused_tcp_port: int
) -> None:
    with_servers(small_release, unused_tcp_port)
    async with small_release.master("a") as master:
        await until(lambda: small_release.pods)
        async with a_worker(master) as (worker, _):
            await worker.says(built=pb.Built())
            await worker.says(ready=pb.Ready(layout=pb.Layout(records=100), model="m"))
            form = await worker.hears("form")
            assert form.servers == 0
        await until(lambda: json.loads(small_release.status.get("values", "{}")).get("mode") == "train")
    assert not [r for r in small_release.server.requests if r.resource == "statefulsets"]
