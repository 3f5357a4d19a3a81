"""Masters follow each other: what docs/lost-nodes.md and docs/ring.md say of it, on a real Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Nodes, Object
from tests.cluster.release import MASTER, WORKERS, Release, idling, on

pytestmark = pytest.mark.timeout(600)

# That survivors stand still when the node of the master and of a worker is lost, by the number of masters.
# With one, Kubernetes has to find it out: 40 s by its default times, and then 10 by the chart's.
MOST_SECONDS = {1: 90.0, 2: 10.0}


def acting(job: Release) -> str:
    holder = job.namespace.get("lease", "edl-master")["spec"]["holderIdentity"]
    return str(holder).rpartition("_")[0]


def are_ready(pods: list[Object], number: int) -> bool:
    alive = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
    conditions = [c for p in alive for c in p["status"].get("conditions") or []]
    ready = sum(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return len(alive) == ready == number


def changes(job: Release, known: int = 0) -> list[str]:
    return job.reshaped()[known:]


def stalls(told: list[str]) -> list[float]:
    """The seconds that the survivors of each change of the ring stood still."""
    return [float(found[1]) for text in told if (found := re.search(r" in ([\d.]+) s,", text))]


def installed(job: Release, replicas: int, workers: int = 2) -> Release:
    job.install(workers=workers, master__replicas=replicas)
    job.namespace.until("pods", lambda pods: are_ready(pods, replicas), MASTER)
    job.ring_of(workers)
    begun = int(job.status["progress"].strip("%"))  # a worker without a step does not know how long it stands
    job.until(lambda d: int(d["progress"].strip("%")) > begun + 1)
    return job


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_node_of_the_acting_master_and_of_a_worker_loses_its_power(
    release: Callable[..., Release], nodes: Nodes, replicas: int
) -> None:
    job = installed(release(**idling()), replicas)
    masters = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.namespace.get("pods", "-l", MASTER)}
    assert len(set(masters.values())) == replicas, "each on a node of its own"
    first = acting(job)
    node = masters[first]
    lost = on(job.namespace, node)
    assert len(lost) == 1
    known = len(job.reshaped())
    nodes.off(node)
    job.told("ring 2 -> 1 in ", reason=Reason.RingReshaped, seconds=120)
    told = changes(job, known)
    print("stood still:", told)
    assert stalls(told)[0] < MOST_SECONDS[replicas]
    assert acting(job) != first
    assert replicas == 1 or acting(job) in masters

    def replaced(pods: list[Object]) -> bool:
        return (
            len({p["metadata"]["name"] for p in pods if "edl.dev/rank" in p["metadata"]["labels"]} - lost)
            == 2
        )

    job.namespace.until("pods", replaced, WORKERS, seconds=90)
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rolling_update_of_the_master_stops_nothing(release: Callable[..., Release], replicas: int) -> None:
    job = installed(release(**idling()), replicas)
    workers = {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)}
    first, known = acting(job), len(job.reshaped())
    job.upgrade("--wait", master__replicas=replicas, workers=2, master__podAnnotations__update="another")
    before = {p["metadata"]["name"] for p in job.namespace.get("pods", "-l", MASTER)} - {first}
    assert len(before) >= replicas

    def settled(pods: list[Object]) -> bool:
        names = {p["metadata"]["name"] for p in pods}
        return first not in names and are_ready(pods, replicas) and len(names) == replicas

    job.namespace.until("pods", settled, MASTER, seconds=120)
    job.told("a new master took over")
    told = changes(job, known)
    print("stood still:", told)
    assert all("0 records redone" in text for text in told), told
    assert {p["metadata"]["uid"] for p in job.namespace.get("pods", "-l", WORKERS)} == workers
    summary = job.is_exact()
    assert summary["state_losses"] == 0


def test_a_second_master_stands_by_and_the_service_leads_to_the_first(
    release: Callable[..., Release],
) -> None:
    job = installed(release(**idling()), 1)
    first = acting(job)
    job.namespace.kubectl("scale", "deployment/edl-master", "--replicas=2")
    masters = job.namespace.until("pods", lambda pods: are_ready(pods, 2), MASTER)
    (second,) = {p["metadata"]["name"] for p in masters} - {first}
    assert "stands by" in job.namespace.kubectl("logs", second)
    assert acting(job) == first

    def leads_to(name: str) -> Callable[[list[Object]], bool]:
        def so(pods: list[Object]) -> bool:
            return [p["metadata"]["name"] for p in pods if "edl.dev/acting" in p["metadata"]["labels"]] == [
                name
            ]

        return so

    job.namespace.until("pods", leads_to(first), MASTER)
    known = len(job.reshaped())
    job.namespace.kubectl("delete", "pod", first, "--wait=false")
    job.namespace.until("pods", leads_to(second), MASTER)
    job.told("a new master took over")
    print("stood still:", changes(job, known))
    summary = job.is_exact()
    assert summary["state_losses"] == 0
