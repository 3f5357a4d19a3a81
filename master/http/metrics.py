"""What a monitoring system asks the master: /metrics, and whether it lives (/healthz) and is ready (/readyz).

Everything is derived from the status and from what the core hears and decides, when somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import edl
from master.core import events as ev

SECONDS = 5.0  # for a question to be asked
STATES = ("pending", "starting", "initializing", "ready", "member", "draining")


class Metrics:
    """A small HTTP server on the master's loop: that it answers says that the loop turns.

    Args:
        status: the job now, as `view.status` tells it; empty when there is none.
        ready: whether the master can do its work.
        backend: numbers of the backend, as `Kubernetes.numbers` tells them.
    """

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        ready: Callable[[], bool],
        backend: Callable[[], dict[str, Any]] = dict,
    ):
        self._status, self._ready, self._backend = status, ready, backend
        disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody asks for ..._seconds_created
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._reshape = Histogram(
            "edl_ring_reshape_seconds", "How long a survivor of a change of the ring stood still",
            buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30), registry=self._registry,
        )  # fmt: skip
        self._reshapes = Counter[str]()
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> int:
        """Listen on `address` (host:port, port 0 for any); returns the port.

        Raises:
            OSError: the address is taken.
        """
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._answer, host, int(port))
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def observe(self, now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Shown every event of a master, with what followed from it."""
        if isinstance(event, ev.Stepped) and event.stall_seconds:
            self._reshape.observe(event.stall_seconds)
        for effect in effects:
            match effect:
                case ev.Leave():
                    self._reshapes["planned"] += 1
                case ev.Cut():
                    self._reshapes["broken"] += 1

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client: the metrics as of now."""
        info = GaugeMetricFamily("edl_build_info", "Which edl this is", labels=["version"])
        info.add_metric([edl.__version__], 1)
        yield info
        reshapes = CounterMetricFamily("edl_ring_reshapes", "Changes of the ring", labels=["reason"])
        for reason in ("planned", "broken"):
            reshapes.add_metric([reason], self._reshapes[reason])
        yield reshapes
        if status := self._status():
            yield from self._of_job(status)
        if numbers := self._backend():
            yield from _of_backend(numbers)

    def _of_job(self, status: dict[str, Any]) -> Iterator[Metric]:
        workers, records = status["workers"], status["records"]
        ring = sum(w["rank"] is not None for w in workers)
        yield GaugeMetricFamily("edl_ring_size", "Workers in the ring", ring)
        yield GaugeMetricFamily("edl_workers_desired", "Workers that the job should have", status["target"])
        states = GaugeMetricFamily("edl_workers", "Workers by state", labels=["state"])
        for state in STATES:
            states.add_metric([state], sum(w["state"] == state for w in workers))
        yield states
        applied = CounterMetricFamily("edl_records", "Records by what became of them", labels=["result"])
        applied.add_metric(["applied"], records["applied"])
        yield applied
        yield GaugeMetricFamily("edl_records_desired", "Records of all epochs", records["total"])
        yield GaugeMetricFamily("edl_failures", "Failures that were charged to the job", status["failures"])
        phase = GaugeMetricFamily("edl_job_phase", "1 for the phase that the job is in", labels=["phase"])
        phase.add_metric([status["phase"]], 1)
        yield phase
        spent = CounterMetricFamily("edl_seconds", "Where the job's time went", labels=["kind"])
        for kind, seconds in status["goodput"].items():
            spent.add_metric([kind], seconds)
        yield spent

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(SECONDS):
                request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1")
                status, kind, body = self._page(request)
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    def _page(self, request: str) -> tuple[str, str, bytes]:
        method, path, *_ = (*request.split(" "), "", "")
        if method != "GET":
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        match path.partition("?")[0]:
            case "/metrics":
                return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case "/healthz":
                return "200 OK", "text/plain", b"ok\n"
            case "/readyz" if self._ready():
                return "200 OK", "text/plain", b"ok\n"
            case "/readyz":
                return "503 Service Unavailable", "text/plain", b"not ready\n"
        return "404 Not Found", "text/plain", b"there are /metrics, /healthz and /readyz\n"


def _of_backend(numbers: dict[str, Any]) -> Iterator[Metric]:
    relists = CounterMetricFamily("edl_watch_relists", "Full lists of the workers' pods", labels=["reason"])
    for reason, count in numbers["relists"].items():
        relists.add_metric([reason], count)
    yield relists
    age = numbers["watch_age_seconds"]
    yield GaugeMetricFamily(
        "edl_watch_last_event_age_seconds", "Since the API's watch last said a thing", age
    )
    yield GaugeMetricFamily("edl_kubernetes_api_up", "1 while the API server answers", numbers["api_up"])
    requests = CounterMetricFamily(
        "edl_kubernetes_requests", "Requests to the API server", labels=["verb", "resource", "code"]
    )
    for (verb, resource, code), count in numbers["requests"].items():
        requests.add_metric([verb, resource, str(code)], count)
    yield requests
