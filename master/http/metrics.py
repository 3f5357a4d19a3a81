# SPDX-License-Identifier: Apache-2.0
"""The metrics that Prometheus scrapes.

Most are derived at each scrape from the job's status and the backend's numbers. Events between two scrapes
are counted by an observer of the master's loop. Names and labels are an interface: dashboards and alerts of
users rely on them. The values of a label do not grow with the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import edl
from edl.contract.phases import WorkerState
from edl.master.core import effects as ef
from edl.master.core import events as ev

STATES = [state for state in WorkerState if state is not WorkerState.GONE]


class Metrics:
    """Collects and renders the metrics of a master.

    Args:
        status: returns the present status of the job, as by `view.status`; empty while there is no job.
        backend: returns numbers of the backend, as by `Kubernetes.numbers`; empty if it has none.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], backend: Callable[[], dict[str, Any]] = dict):
        self._status, self._backend = status, backend
        disable_created_metrics()  # type: ignore[no-untyped-call]  # unused ..._seconds_created series
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._reshape = Histogram(
            "edl_ring_reshape_seconds",
            "How long a survivor of a change of the ring stood still",
            buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30),
            registry=self._registry,
        )
        self._reshapes = Counter[str]()
        self._seconds: dict[str, float] = {}  # as last reported, by kind
        self._total = 0.0  # the sum of the goodput's seconds at that time

    def page(self) -> tuple[str, bytes]:
        """Render the page of a scrape: content type and body."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Yield all metrics, also those that are counted between scrapes."""
        yield from self._registry.collect()

    def observe(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Observe the master's loop, and count changes of the ring."""
        if isinstance(event, ev.Stepped) and event.stall_seconds:
            self._reshape.observe(event.stall_seconds)
        for effect in effects:
            match effect:
                case ef.Leave():
                    self._reshapes["planned"] += 1
                case ef.Cut():
                    self._reshapes["broken"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics; prometheus_client calls this at each scrape."""
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
        yield from _of_training(status)
        if servers := status.get("servers"):
            yield from _of_servers(servers)
        if staleness := status.get("staleness"):
            yield from _of_staleness(staleness)
        spent = CounterMetricFamily("edl_seconds", "Where the job's time went", labels=["kind"])
        for kind, seconds in self._counted(status["goodput"]).items():
            spent.add_metric([kind], seconds)
        yield spent

    def _counted(self, goodput: dict[str, float]) -> dict[str, float]:
        """Return the seconds as counters, which never fall within a run.

        Useful time shrinks when steps turn out to be redone, but a falling counter would look like a restart.
        So the counter stays constant until the useful time has caught up.
        """
        another_run = sum(goodput.values()) < self._total
        self._total = sum(goodput.values())
        earlier = {} if another_run else self._seconds
        self._seconds = {kind: max(seconds, earlier.get(kind, 0.0)) for kind, seconds in goodput.items()}
        return self._seconds


def _of_training(status: dict[str, Any]) -> Iterator[Metric]:
    """Yield loss, metrics and speeds; without values until they are known."""
    loss = GaugeMetricFamily(
        "edl_loss", "Training loss: the mean of the epoch so far, and of the last step", labels=["of"]
    )
    for of, value in (("epoch", status["epoch_loss"]), ("step", status["loss"])):
        if value is not None:
            loss.add_metric([of], value)
    yield loss
    trained = GaugeMetricFamily(
        "edl_training_metric", "Compiled metrics over the records of the last complete epoch", labels=["name"]
    )
    for name, value in status["epoch_metrics"].items():
        if value is not None:
            trained.add_metric([name], value)
    yield trained
    held_out = GaugeMetricFamily(
        "edl_evaluation", "Loss and metrics of the last evaluation on a split", labels=["split", "name"]
    )
    for split, found in status["evaluations"].items():
        for name, value in found["metrics"].items():
            if value is not None:
                held_out.add_metric([split, name], value)
    yield held_out
    # One value for each worker would be a label that grows with the job.
    speed = GaugeMetricFamily(
        "edl_worker_records_per_second",
        "Speed of the slowest, the median and the fastest worker",
        labels=["of"],
    )
    rates = sorted(w["rate"] for w in status["workers"] if w["rank"] is not None)
    if rates:
        for of, value in (("slowest", rates[0]), ("median", median(rates)), ("fastest", rates[-1])):
            speed.add_metric([of], value)
    yield speed


def _of_servers(servers: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yield metrics with one value for each parameter server, by its index."""
    gauges: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "edl_server_up": ("1 while the parameter server answers", lambda s: s["state"] == "running"),
        "edl_server_rows": ("Rows of embeddings on the parameter server", lambda s: s["rows"]),
        "edl_server_memory_bytes": ("Memory that they take", lambda s: s["memory"]),
        "edl_server_log_bytes": ("Size of its log", lambda s: s["log_bytes"]),
    }
    counters: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "edl_server_rows_pulled": ("Rows that it has sent", lambda s: s["rows_pulled"]),
        "edl_server_rows_staged": ("Rows whose gradients it has got", lambda s: s["rows_staged"]),
        "edl_server_busy_seconds": ("Time that its calls took", lambda s: s["busy_seconds"]),
        "edl_server_restarts": ("How often it was started again", lambda s: s["restarts"]),
    }
    for name, (text, value) in gauges.items():
        yield _by_server(GaugeMetricFamily(name, text, labels=["server"]), servers, value)
    for name, (text, value) in counters.items():
        yield _by_server(CounterMetricFamily(name, text, labels=["server"]), servers, value)


def _of_staleness(staleness: dict[str, Any]) -> Iterator[Metric]:
    """Yield the staleness of the last steps of mode=ps."""
    text = "Updates that the weights of the last steps had missed"
    yield GaugeMetricFamily("edl_staleness_median", f"{text}, median", staleness["median"])
    yield GaugeMetricFamily("edl_staleness_max", f"{text}, at most", staleness["most"])
    yield CounterMetricFamily(
        "edl_steps_repeated", "Steps that came again after they were taken", staleness["repeated"]
    )


def _by_server(
    family: GaugeMetricFamily | CounterMetricFamily,
    servers: list[dict[str, Any]],
    value: Callable[[dict[str, Any]], float],
) -> Metric:
    for server in servers:
        family.add_metric([str(server["index"])], value(server))
    return family


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
