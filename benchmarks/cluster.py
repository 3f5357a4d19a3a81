# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench cluster`: a job on a real Kubernetes (tools/test_cluster/README.md). A measurement, no test.

Each round installs the chart and does to the job, one after the other, what clusters do to jobs;
four workers fill the two nodes. No time comes from polling: a moment is when the API server told
a watch of it, or what the master has in its journal (all on one machine, and so on one clock), or
when the command was given.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import psutil

from benchmarks import pods, report, two_jobs
from benchmarks.journal import Journal, Ring
from benchmarks.lines import Lines
from benchmarks.report import Row
from edl.contract import artifacts
from tests.cluster.cluster import (
    Cluster,
    Images,
    Namespace,
    Nodes,
    Object,
    new_namespace,
    push_images,
    running,
)
from tests.cluster.release import Release, counting, has_ended, is_worker

SECONDS = 120.0  # for anything to happen
STEADY_SECONDS = 30.0
QUOTA_SECONDS = 40.0  # of refusals, so that the pauses between them are as long as they get
# Two workers fill a node, and so one that is to come waits for one that is to go.
VALUES = {
    **counting(records=20_000, sleep=0.02),
    "training.epochs": "10000",
    "workers": "4",
    "worker.resources.requests.cpu": "900m",
    "elastic.heartbeatTimeoutSeconds": "3",
}


class Job:
    """A release that trains, watched as it goes."""

    def __init__(self, namespace: Namespace, images: Images):
        self.namespace = namespace
        self.release = Release(namespace, {**images.values, **VALUES})
        _, watch = namespace.cluster.watching("pods", namespace.name, seconds=3600)
        self.installed_at = time.monotonic()
        self.release.install()
        with ExitStack() as opened:
            self.pods = opened.enter_context(Lines(watch, namespace.cluster.env))
            self.release.ring_of(4)
            tail = ["tail", "--lines=+1", "--follow=name", f"/var/lib/edl/{artifacts.JOURNAL}"]
            pod = self.release.master()["metadata"]["name"]
            words = ["kubectl", "--namespace", namespace.name, "exec", pod, "--", *tail]
            self.journal = opened.enter_context(Journal(words, namespace.cluster.env))
            self.ring = self.journal.ring(4)
            self._opened = opened.pop_all()

    def next_ring(self, size: int) -> Ring:
        """The next one of that size, when all of it has made a step."""
        self.ring = self.journal.ring(size, self.ring.generation, SECONDS)
        return self.ring

    def told(self, so: Callable[[str, Object], object]) -> float:
        """When the API server first reported a pod that fulfills a condition.

        Args:
            so: takes the kind of the change (ADDED, MODIFIED, DELETED) and the pod.
        """
        return self.pods.when(lambda change: so(change["type"], change["object"]), SECONDS)

    def process(self, worker: int) -> psutil.Process:
        """The process of a worker, as the machine sees it that plays both nodes; not its supervisor."""
        master = f"{self.release.full}-master.{self.namespace.name}."
        for process in sorted(psutil.process_iter(), key=psutil.Process.create_time, reverse=True):
            try:
                words = process.cmdline()[1:4]
                if words[:2] != ["-P", "-m"] or not words[2].startswith("edl.trainer"):
                    continue
                its = process.environ()
            except psutil.Error:
                continue  # it has ended
            if its.get("EDL_WORKER_ID") == str(worker) and its["EDL_MASTER"].startswith(master):
                return process
        raise AssertionError(f"no process of worker {worker} was found")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self.release.namespace.helm("uninstall", self.release.name)


# --- what is done to a job; each gives (row, value)


Found = Iterator[tuple[str, float]]


def install(job: Job) -> Found:
    yield "install to first step", job.journal.first_step() - job.installed_at
    yield "install to a ring of 4", job.ring.up_at - job.installed_at


def requests(job: Job) -> Found:
    def asked() -> list[Object]:
        return job.namespace.requests(f"{job.release.full}-master")

    before = asked()
    of_pods = [r for r in before if r["objectRef"]["resource"] == "pods" and r["verb"] != "patch"]
    yield "requests for pods, install to a ring of 4", len(of_pods)
    yield "all requests, install to a ring of 4", len(before)
    time.sleep(STEADY_SECONDS)
    more = len(asked()) - len(before)
    yield "requests a minute while it trains", more * 60 / STEADY_SECONDS


def kill(job: Job) -> Found:
    process, killed_at = job.process(job.ring.members[1]), time.monotonic()
    process.send_signal(signal.SIGKILL)
    ring = job.next_ring(3)
    yield "SIGKILL of a worker to ring re-formed", ring.up_at - killed_at
    yield "SIGKILL of a worker: stall of survivors", ring.stall
    again = job.next_ring(4)
    (follower,) = set(again.members) - set(ring.members)
    spoke, ready = (job.journal.first(kind, follower) for kind in ("Hello", "Ready"))
    yield "SIGKILL of a worker to ring of 4 again", again.up_at - killed_at
    yield "of these, until the next process speaks", spoke - killed_at
    yield "of these, until it is ready", ready - spoke
    yield "of these, until the ring is formed with it", again.up_at - ready


def preempt(job: Job) -> Found:
    container = {
        "name": "main",
        "image": job.namespace.cluster.busybox,
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"],
        "resources": {"requests": {"cpu": VALUES["worker.resources.requests.cpu"]}},
    }
    other = {"metadata": {"name": "other"}, "spec": {"containers": [container]}}
    job.namespace.apply({"apiVersion": "v1", "kind": "Pod", **other})
    preempted_at = job.told(lambda kind, pod: is_worker(pod) and condition(pod, "DisruptionTarget"))
    ring = job.next_ring(3)
    yield "pod preempted to ring re-formed", ring.up_at - preempted_at
    yield "pod preempted: stall of survivors", ring.stall
    yield "pod preempted: records redone", ring.redone
    job.told(lambda _, pod: name(pod) == "other" and pod["status"]["phase"] == "Running")
    job.namespace.kubectl("delete", "pod", "other", "--wait=false")
    free_at = job.told(lambda kind, pod: name(pod) == "other" and (kind == "DELETED" or has_ended(pod)))
    ring = job.next_ring(4)
    yield "capacity free to ring grown", ring.up_at - free_at
    yield "capacity free: stall of running workers", ring.stall


def quota(job: Job) -> Found:
    few = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    job.namespace.apply({**few, "spec": {"hard": {"pods": "4"}}})  # the master and three workers
    job.process(job.ring.members[1]).kill()
    job.next_ring(3)
    time.sleep(QUOTA_SECONDS)
    free_at = time.monotonic()
    job.namespace.apply({**few, "spec": {"hard": {"pods": "9"}}})
    yield "quota free to ring grown", job.next_ring(4).up_at - free_at


def upgrade(job: Job) -> Found:
    for size, row in ((2, "upgrade 4 -> 2 to ring of 2"), (4, "upgrade 2 -> 4 to ring of 4")):
        upgraded_at = time.monotonic()
        job.release.upgrade(workers=size)
        yield row, job.next_ring(size).up_at - upgraded_at


def off(job: Job) -> Found:
    lost = next(name for name in Nodes.names if name != job.release.master()["spec"]["nodeName"])
    nodes = Nodes()
    try:
        nodes.off(lost)
        yield "node powered off: stall of survivors", job.next_ring(2).stall
    finally:
        nodes.mend(job.namespace.cluster)


def name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def condition(pod: Object, kind: str) -> bool:
    return any(c["type"] == kind for c in pod["status"].get("conditions", []))


PARTS: dict[str, Callable[[Job], Found]] = {
    "install": install,
    "requests": requests,
    "kill": kill,
    "preempt": preempt,
    "quota": quota,
    "upgrade": upgrade,
    "off": off,
}


@dataclass(frozen=True)
class Goal:
    """What a row is to reach; `most` of the median."""

    unit: str
    text: str = ""
    most: float | None = None


GOALS = defaultdict(
    lambda: Goal("s"),
    {
        "capacity free to ring grown": Goal("s", "ElasticDL: 24 s", 24.0),
        "quota free to ring grown": Goal("s", "ElasticDL: 24 s", 24.0),
        "pod preempted: records redone": Goal("records", "0", 0),
        "requests for pods, install to a ring of 4": Goal("requests", "4 creates, a list, a watch", 6),
        "all requests, install to a ring of 4": Goal("requests"),
        "requests a minute while it trains": Goal("requests"),
    },
)


def rounds_of(cluster: Cluster, images: Images, parts: list[str], rounds: int) -> list[Row]:
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        with new_namespace(cluster, "bench") as namespace, Job(namespace, images) as job:
            for part in parts:
                for name, value in PARTS[part](job):
                    found.setdefault(name, []).append(value)
                    report.say(f"round {number + 1}: {name}: {value:.3g} {GOALS[name].unit}")
    rows = []
    for name, values in found.items():
        goal = GOALS[name]
        met = None if goal.most is None else statistics.median(values) <= goal.most
        rows.append(Row(name, values, [], goal.unit, goal.text, met))
    return rows


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    with running() as cluster:
        if "thousand" in only:
            yield pods.measure(cluster, rounds)
        if only == ["thousand"]:
            return
        images = push_images(cluster)
        if parts := [part for part in only if part in PARTS]:
            yield rounds_of(cluster, images, parts, rounds)
        if "jobs" in only:
            yield two_jobs.measure(cluster, images, rounds)


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench cluster", __doc__, (*PARTS, "jobs", "thousand"), measure))
