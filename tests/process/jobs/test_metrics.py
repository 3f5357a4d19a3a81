# SPDX-License-Identifier: Apache-2.0
"""What a monitoring system reads from the master, by real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import edl
from edl.master.http.metrics import Metrics
from edl.master.http.server import HttpServer, Page
from tests.support.kubernetes.master import MasterProcess, Pages
from tests.support.kubernetes.small_release import Release, until

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
# What dashboards and alerts of users rely on: these names stay.
NAMES = {
    "edl_build_info",
    "edl_ring_size",
    "edl_workers",
    "edl_workers_desired",
    "edl_records",
    "edl_records_desired",
    "edl_ring_reshapes",
    "edl_ring_reshape_seconds",
    "edl_failures",
    "edl_loss",
    "edl_training_metric",
    "edl_evaluation",
    "edl_worker_records_per_second",
    "edl_job_phase",
    "edl_seconds",
    "edl_watch_relists",
    "edl_watch_last_event_age_seconds",
    "edl_kubernetes_api_up",
    "edl_kubernetes_requests",
}


async def get(process: MasterProcess, path: str) -> tuple[int, str, str]:
    return await asyncio.to_thread(process.pages.get, path)


async def test_what_prometheus_reads_is_sound_and_has_the_names_that_others_rely_on(
    small_release: Release,
) -> None:
    small_release.install("workers=2")
    async with small_release.master() as process:
        await until(lambda: len(small_release.pods) == 2)
        await process.address()
        status, kind, _ = await get(process, "/metrics?from=a+scraper")
        assert status == 200
        assert kind.startswith("text/plain; version=")
        metrics = await asyncio.to_thread(process.pages.metrics)
        assert metrics.keys() == NAMES
        for name, metric in metrics.items():
            assert metric.documentation, name
            assert metric.type in ("counter", "gauge", "histogram"), name
            labels = {label for sample in metric.samples for label in sample.labels}
            assert labels <= {
                "version",
                "state",
                "result",
                "reason",
                "kind",
                "phase",
                "le",
                "verb",
                "resource",
                "code",
            }, "none that grows with the job"
        value = process.pages.value
        assert await asyncio.to_thread(value, "edl_build_info", version=edl.__version__) == 1
        assert await asyncio.to_thread(value, "edl_workers_desired") == 2
        assert await asyncio.to_thread(value, "edl_job_phase", phase="Starting") == 1
        assert await asyncio.to_thread(value, "edl_watch_relists_total", reason="start") == 1
        created = {"verb": "post", "resource": "pods", "code": "201"}
        assert await asyncio.to_thread(value, "edl_kubernetes_requests_total", **created) == 2
        used = {sample for metric in metrics.values() for sample in {s.name for s in metric.samples}}
        used |= {name for name, metric in metrics.items() if not metric.samples}  # loss and speeds come later
        for file in ("chart/files/dashboard.json", "chart/templates/monitoring.yaml"):
            asked = set(re.findall(r"\bedl_\w+", (ROOT / file).read_text()))
            assert asked, file
            assert asked <= used, f"{file} asks for what there is not"


def test_the_seconds_never_fall_while_a_run_goes_on_and_begin_anew_with_another_one() -> None:
    now: dict[str, float] = {}
    job: dict[str, Any] = {
        "workers": [],
        "records": {"applied": 0, "total": 0},
        "target": 0,
        "failures": 0,
        "phase": "Training",
        "loss": None,
        "epoch_loss": None,
        "epoch_metrics": {},
        "evaluations": {},
        "goodput": now,
    }
    metrics = Metrics(lambda: job)

    def told(**seconds: float) -> tuple[float, float]:
        now.update(seconds)
        lines = dict(re.findall(r'edl_seconds_total{kind="(\w+)"} (\S+)', metrics.page()[1].decode()))
        return float(lines["useful"]), float(lines["redone"])

    assert told(useful=10.0, redone=0.0) == (10.0, 0.0)
    assert told(useful=8.0, redone=2.5) == (10.0, 2.5), "what was redone is not useful any more"
    assert told(useful=12.0, redone=2.5) == (12.0, 2.5)
    assert told(useful=1.0, redone=0.0) == (1.0, 0.0), "another run"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_every_address_is_ipv4_and_ipv6(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = HttpServer(lambda: True, {})
    await server.start(f"[::]:{port}")
    try:
        assert (await asyncio.to_thread(Pages(f"{host}:{port}").get, "/healthz"))[0] == 200
    finally:
        await server.close()


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[Callable[[str], Any]]:
    """A Prometheus that scrapes the target; asked for a path of its API, it gives the data, or None."""
    where = subprocess.check_output([ROOT / "scripts" / "dev" / "prometheus"], text=True).strip()
    scrape = {"job_name": "edl", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    said = folder / "prometheus.log"

    def listens() -> re.Match[str] | None:
        return re.search(r'"Listening on" address=(\S+)', said.read_text())

    def ask(path: str) -> Any:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=10) as answer,
        ):
            return json.load(answer)["data"]

    with open(said, "wb") as log:
        process = await asyncio.create_subprocess_exec(
            f"{where}/prometheus",
            "--config.file",
            folder / "prometheus.yaml",
            "--storage.tsdb.path",
            folder / "data",
            "--web.listen-address",
            "127.0.0.1:0",
            stderr=log,
        )
        try:
            address = (await until(listens))[1]
            yield ask
        finally:
            process.kill()
            await process.wait()


async def test_prometheus_itself_reads_all_of_it(small_release: Release, tmp_path: Path) -> None:
    small_release.install("workers=2")
    async with small_release.master() as process:
        await until(lambda: len(small_release.pods) == 2)
        async with prometheus(tmp_path, process.pages.address) as ask:

            def value(query: str) -> str:
                found = (ask(f"query?query={query}") or {"result": []})["result"]
                return str(found[0]["value"][1]) if found else ""

            await until(lambda: value("edl_workers_desired") == "2")
            (target,) = ask("targets")["activeTargets"]
            assert target["lastError"] == ""
            assert value("up") == "1"
            known = {name.removesuffix("_total") for name in ask("metadata")}
            assert known >= NAMES


@asynccontextmanager
async def serving_pages(pages: dict[str, Page], timeout_seconds: float = 10.0) -> AsyncIterator[int]:
    server = HttpServer(lambda: True, pages, timeout_seconds)
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.close()


async def asked(port: int, request: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_only_reading_is_allowed() -> None:
    async with serving_pages({"/metrics": lambda: ("text/plain", b"a page\n")}) as port:
        end = b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        assert (await asked(port, b"GET /metrics" + end)).endswith(b"\r\n\r\na page\n")
        head = await asked(port, b"HEAD /metrics" + end)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        refused = await asked(port, b"POST /metrics" + end)
        assert refused.startswith(b"HTTP/1.1 405 ")
        assert b"POST is not allowed: use GET or HEAD" in refused
        missing = await asked(port, b"GET /" + end)
        assert missing.startswith(b"HTTP/1.1 404 ")
        assert b"there are /healthz, /metrics, /readyz" in missing
        assert b" 400 Bad Request" in await asked(port, b"\x16\x03\x01 not http\r\n\r\n")


async def test_a_client_that_does_not_finish_its_request_is_disconnected() -> None:
    async with serving_pages({}, timeout_seconds=0.2) as port:
        assert await asked(port, b"") == b""
        assert await asked(port, b"GET /healthz HTTP/1.1\r\nHost") == b""


async def test_a_client_that_does_not_take_the_answer_is_disconnected() -> None:
    large = 2**26
    async with serving_pages({"/large": lambda: ("text/plain", bytes(large))}, timeout_seconds=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.sleep(0.6)  # far beyond its time: what matters is that the client does nothing
        taken = 0
        with suppress(ConnectionResetError):
            async with asyncio.timeout(10):
                while part := await reader.read(2**20):
                    taken += len(part)
        assert taken < large
        writer.close()


async def test_a_page_that_cannot_be_rendered_is_an_error_and_harms_no_other() -> None:
    def broken() -> tuple[str, bytes]:
        raise ZeroDivisionError

    async with serving_pages({"/broken": broken}) as port:
        request = b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        assert (await asked(port, request % b"/broken")).startswith(b"HTTP/1.1 500 ")
        assert (await asked(port, request % b"/healthz")).startswith(b"HTTP/1.1 200 ")


async def test_it_is_ready_once_it_has_read_what_there_is_and_an_outage_does_not_change_that(
    small_release: Release,
) -> None:
    small_release.install("workers=1")
    await small_release.server.down()
    async with small_release.master() as process:
        await until(lambda: process.pages.get("/healthz")[0])
        assert (await get(process, "/healthz"))[0] == 200, (
            "the kubelet must not restart it for the API's sake"
        )
        assert (await get(process, "/readyz"))[0] == 503
        await small_release.server.up()
        await process.address()
        assert (await get(process, "/readyz"))[0] == 200
        await until(lambda: small_release.pods)
        await small_release.server.down()
        await until(lambda: process.log.count("the Kubernetes API is unavailable") == 2)
        assert await asyncio.to_thread(process.pages.value, "edl_kubernetes_api_up") == 0
        assert (await get(process, "/readyz"))[0] == 200
        await small_release.server.up()


async def test_the_numbers_are_the_rings(a_job: Callable[..., Any]) -> None:
    async with a_job(workers=2) as job:
        loop = asyncio.get_running_loop()
        metrics = Metrics(lambda: job.master.status(loop.time()))
        job.master.observers.append(metrics.observe)
        http = HttpServer(lambda: True, {"/metrics": metrics.page})
        port = await http.start("127.0.0.1:0")
        pages = Pages(f"127.0.0.1:{port}")

        async def value(name: str, **labels: str) -> float:
            return await asyncio.to_thread(pages.value, name, **labels)

        await job.ring_of(2)
        assert await value("edl_ring_size") == 2
        assert await value("edl_workers", state="member") == 2
        await job.stepping()
        dead = job.ring[0]
        job.kill(dead)
        await job.ring_of(2, without=[dead])
        await job.stepping()
        assert await value("edl_ring_reshapes_total", reason="broken") >= 1
        await job.exact()
        wanted = job.records * job.epochs
        assert await value("edl_records_total", result="applied") == wanted
        assert await value("edl_records_desired") == wanted
        assert await value("edl_ring_reshape_seconds_count") >= 1
        assert await value("edl_seconds_total", kind="useful") > 0
        assert await value("edl_job_phase", phase="Succeeded") == 1
        await http.close()
