"""Nodes are lost and drained: what docs/lost-nodes.md shows, with the same commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Namespace, Nodes, Object
from tests.cluster.release import WORKERS, Release, idling, in_ring

pytestmark = pytest.mark.timeout(600)


def on(namespace: Namespace, node: str) -> set[str]:
    """The names of the living workers on a node."""
    pods = namespace.get("pods", "-l", WORKERS, f"--field-selector=spec.nodeName={node},status.phase=Running")
    return {p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]}


@pytest.fixture
def job(release: Callable[..., Release], nodes: Nodes) -> Release:
    """Four workers, two on each node; the master is on the first."""
    home = {"master.nodeSelector.kubernetes\\.io/hostname": nodes.names[0]}
    job = release(**idling(), **home)
    job.install()
    job.ring_of(4)
    assert [len(on(job.namespace, name)) for name in nodes.names] == [2, 2]
    return job


def goes_on_without(job: Release, lost: set[str], node: str) -> None:
    """The ring is re-formed by the master's own reckoning, long before Kubernetes gives the node up."""
    formed = job.told("ring 4 -> 2 in ", "no heartbeat for ", reason=Reason.RingReshaped, seconds=30)
    (seen,) = job.namespace.cluster.get("nodes", "-l", f"kubernetes.io/hostname={node}")
    ready = next(c for c in seen["status"]["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "True" or formed["firstTimestamp"] < ready["lastTransitionTime"]

    def replaced(pods: list[Object]) -> bool:
        names = {p["metadata"]["name"] for p in in_ring(pods)}
        return len(names - lost) == 4

    # Kubernetes would put new ones on the lost node, and leave them there until it evicts them.
    job.namespace.until("pods", replaced, WORKERS, seconds=60)


def test_a_node_that_is_cut_off_is_not_waited_for(job: Release, nodes: Nodes) -> None:
    node = nodes.names[1]
    lost = on(job.namespace, node)
    nodes.cut(node)
    goes_on_without(job, lost, node)
    nodes.join(node)
    # Their place is taken: the workers that were cut off learn it as soon as they can, and end.
    job.namespace.until("pods", lambda pods: not lost & {p["metadata"]["name"] for p in pods}, WORKERS)
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


def test_a_node_that_loses_its_power_is_not_waited_for(job: Release, nodes: Nodes) -> None:
    node = nodes.names[1]
    lost = on(job.namespace, node)
    nodes.off(node)
    goes_on_without(job, lost, node)
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


def test_a_node_is_drained(job: Release, nodes: Nodes, request: pytest.FixtureRequest) -> None:
    namespace, node = job.namespace, nodes.names[1]
    lost = on(namespace, node)
    request.addfinalizer(lambda: namespace.cluster.kubectl("uncordon", node))
    mine = f"--pod-selector={WORKERS},app.kubernetes.io/instance=edl"
    namespace.cluster.kubectl("drain", node, "--force", "--delete-emptydir-data", mine, seconds=90)

    def replaced(pods: list[Object]) -> bool:
        return len({p["metadata"]["name"] for p in in_ring(pods)} - lost) == 4

    namespace.until("pods", replaced, WORKERS)
    assert on(namespace, node) == set()
    job.told("EvictionByEvictionAPI")
    summary = job.is_exact()
    assert summary["failures"] == []
    assert sum(g["redone_records"] for g in summary["generations"]) == 0, "they left at a step boundary"
