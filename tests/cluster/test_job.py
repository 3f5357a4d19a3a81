"""The job on a real cluster: what docs/kubernetes.md shows, with the same commands."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Images, Namespace, Object
from tests.cluster.release import MASTER, WORKERS, Release, idling, in_ring

pytestmark = pytest.mark.timeout(600)


def test_four_workers_train_to_the_end_and_nothing_is_left(namespace: Namespace, images: Images) -> None:
    namespace.restrict()
    job = Release(namespace, images.values)
    job.install("--wait", workers=4)
    namespace.kubectl(
        "wait", "--for=jsonpath={.data.phase}=Succeeded", "configmap/edl-status", "--timeout=240s",
        seconds=270,
    )  # fmt: skip
    summary = job.summary()
    assert summary["metrics"]["accuracy"] >= 0.97
    assert summary["records"]["per_epoch"] == [{"epochs": 20, "records": 1438}]
    assert "Evaluation" in namespace.kubectl("logs", "deployment/edl-master")
    job.told(reason=Reason.Succeeded)
    namespace.helm("uninstall", "edl", "--wait")
    namespace.until("pods", lambda pods: not pods, seconds=60)
    for kind in ("configmaps", "secrets", "services", "deployments", "leases"):
        left = namespace.get(kind, "-l", "app.kubernetes.io/instance=edl")
        assert left == [], f"{kind} are left"


def test_a_release_that_is_installed_again_at_once_is_another_job(release: Callable[..., Release]) -> None:
    job = release(**idling())
    job.install()
    job.ring_of(4)
    old = {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)}
    job.namespace.helm("uninstall", "edl")  # its pods are there for a while
    job.install()
    job.ring_of(4)

    def are_new(pods: list[Object]) -> bool:
        return len({p["metadata"]["uid"] for p in in_ring(pods)} - old) == 4

    job.namespace.until("pods", are_new, WORKERS)
    assert not any(event.startswith(Reason.FailedOver) for event in job.events())
    assert job.is_exact()["state_losses"] == 0


def test_a_start_asks_the_api_server_for_little_and_training_for_nothing(
    release: Callable[..., Release],
) -> None:
    job = release(**idling())
    job.install(workers=4)
    job.ring_of(4)

    def asked(of: str = "") -> Counter[tuple[str, str]]:
        found = (kind_of(request) for request in job.namespace.requests("edl-master"))
        return Counter((verb, kind) for verb, kind in found if of in ("", kind))

    about_pods = asked("pods")
    about_pods.pop(("patch", "pods"), None)  # the labels, for people
    assert about_pods == {("create", "pods"): 4, ("list", "pods"): 1, ("watch", "pods"): 1}
    maps = asked("configmaps")
    assert (maps["list", "configmaps"], maps["watch", "configmaps"], maps["get", "configmaps"]) == (1, 1, 1)
    rank = f"{WORKERS},edl.dev/rank"
    job.namespace.until("pods", lambda pods: len(pods) == 4, rank)  # the last of the labels is written
    before, progress = asked(), job.status["progress"]
    job.until(lambda d: int(d["progress"].strip("%")) >= int(progress.strip("%")) + 10)
    news = asked() - before
    assert news.keys() <= {("patch", "configmaps"), ("create", "events"), ("patch", "events")}, "no polling"


def kind_of(request: Object) -> tuple[str, str]:
    """Of an audit event: the verb, and of what."""
    kind = re.search(r"/namespaces/[^/]+/(\w+)", request["requestURI"])
    return request["verb"], kind[1] if kind else request["requestURI"]


def test_a_deleted_worker_is_replaced_by_the_next_one(job: Release) -> None:
    first, *others = job.workers()
    unused, before = 1 + max(map(number, job.workers())), len(job.reshaped())
    job.namespace.kubectl("delete", "pod", first, "--wait=false")
    wanted = {*others, f"edl-worker-{unused}"}
    job.namespace.until(
        "pods", lambda pods: {p["metadata"]["name"] for p in in_ring(pods)} == wanted, WORKERS
    )
    left = re.compile(r"ring 4 -> 3 in \d+\.\d+ s, \d+ records redone")
    job.namespace.until("events", lambda _: any(map(left.search, job.reshaped()[before:])))
    assert re.search(r"Loss -?\d", job.namespace.kubectl("logs", others[0]))


def number(worker: str) -> int:
    return int(worker.removeprefix("edl-worker-"))


def test_an_upgrade_changes_the_ring_and_restarts_nothing(job: Release) -> None:
    master, before = job.master(), job.reshaped()
    revision = json.loads(job.namespace.helm("status", "edl", "-o", "json"))["version"]
    job.upgrade(workers=2)
    job.ring_of(2)
    job.namespace.helm("test", "edl", seconds=120)
    job.upgrade(workers=6)
    job.ring_of(6)
    job.namespace.helm("rollback", "edl", revision + 1)
    job.ring_of(2)
    job.upgrade(workers=2, suspend="true")
    job.phase("Suspended")
    job.upgrade(workers=2, training__batchSize=64)
    job.told("training.batchSize", reason=Reason.SpecRefused)
    assert job.status["phase"] == "Suspended", "what is refused is refused as a whole"
    job.upgrade(workers=4)
    job.ring_of(4)
    assert job.master()["metadata"]["uid"] == master["metadata"]["uid"]
    assert restarts(job.master()) == restarts(master)
    changes = job.reshaped()[len(before) :]
    assert changes
    assert all("0 records redone" in change for change in changes), changes


def test_the_master_is_killed_and_the_next_one_takes_over(job: Release) -> None:
    namespace = job.namespace
    workers = {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)}
    before = taken_over(namespace.get("events"))
    delete = ("delete", "pod", "--wait=false")
    kills: list[Callable[[Object], object]] = [
        lambda master: namespace.kubectl(*delete, master["metadata"]["name"]),
        lambda master: namespace.kubectl(*delete, master["metadata"]["name"], "--grace-period=0", "--force"),
        lambda master: os.kill(process(master, "master"), signal.SIGKILL),
    ]
    for times, kill in enumerate(kills, before + 1):
        kill(job.master())
        namespace.until("events", lambda events, n=times: taken_over(events) >= n)  # type: ignore[misc]
    assert {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)} == workers


def test_of_two_masters_the_newest_acts(job: Release) -> None:
    namespace = job.namespace
    workers = {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)}
    first, before = job.master()["metadata"]["name"], taken_over(namespace.get("events"))
    namespace.kubectl("scale", "deployment/edl-master", "--replicas=2")
    namespace.until("events", lambda events: taken_over(events) > before)

    def ready(pods: list[Object]) -> list[str]:
        return [p["metadata"]["name"] for p in pods if is_ready(p)]

    # The kubelet asks each of them now and then: for a moment it still says of the first what was so.
    masters = namespace.until(
        "pods", lambda pods: len(pods) == 2 and len(ready(pods)) == 1 and first not in ready(pods), MASTER
    )
    (acting,) = ready(masters)
    assert namespace.get("lease", "edl-master")["spec"]["holderIdentity"].startswith(acting)
    assert "stands down" in namespace.kubectl("logs", first)
    namespace.kubectl("scale", "deployment/edl-master", "--replicas=1")
    namespace.until("pods", lambda pods: [p["metadata"]["name"] for p in pods] == [acting], MASTER)
    assert {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)} == workers


def restarts(pod: Object) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def process(pod: Object, module: str) -> int:
    """The process of this machine that runs a Python module in a pod."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            if command[1:3] == ["-m", module] and pod["metadata"]["uid"] in (folder / "cgroup").read_text():
                return int(folder.name)
        except OSError:
            continue  # it has just ended
    raise AssertionError(f"no process of {pod['metadata']['name']} runs {module}")


def taken_over(events: list[Object]) -> int:
    """How often the ring was re-formed because a new master took over."""
    reshaped = [e for e in events if e["reason"] == Reason.RingReshaped]
    return sum(e.get("count", 1) for e in reshaped if "a new master took over" in e["message"])
