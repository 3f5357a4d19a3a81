# SPDX-License-Identifier: Apache-2.0
"""A node is cut off: what docs/lost-workers.md shows, with the same commands.

That one loses its power, with the master that acts, is in test_masters.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Nodes, Object
from tests.cluster.release import WORKERS, Release, idling, in_ring, on

pytestmark = pytest.mark.timeout(600)


def spread(job: Release, nodes: Nodes, workers: int) -> Release:
    """The job, installed: half of its workers run on each node, the master on the first."""
    home = {"master__nodeSelector__kubernetes\\.io/hostname": nodes.names[0]}
    job.install(workers=workers, **home)
    job.ring_of(workers)
    assert [len(on(job.namespace, name)) for name in nodes.names] == [workers // 2] * 2
    return job


def goes_on_without(job: Release, lost: set[str], node: str, workers: int) -> None:
    """The ring is re-formed by the master's own reckoning, long before Kubernetes gives the node up."""
    formed = job.told(
        f"ring {workers} -> {workers // 2} in ", "no heartbeat for ", reason=Reason.RingReshaped, seconds=30
    )
    (seen,) = job.namespace.cluster.get("nodes", "-l", f"kubernetes.io/hostname={node}")
    ready = next(c for c in seen["status"]["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "True" or formed["firstTimestamp"] < ready["lastTransitionTime"]

    def replaced(pods: list[Object]) -> bool:
        names = {p["metadata"]["name"] for p in in_ring(pods)}
        return len(names - lost) == workers

    # Kubernetes would put new ones on the lost node, and leave them there until it evicts them. The master
    # waits for as long as the lost ones took to start, because they may come back.
    job.namespace.until("pods", replaced, WORKERS, seconds=90)


def test_a_node_that_is_cut_off_is_not_waited_for(release: Callable[..., Release], nodes: Nodes) -> None:
    job, node = spread(release(**idling()), nodes, 4), nodes.names[1]
    lost = on(job.namespace, node)
    nodes.cut(node)
    goes_on_without(job, lost, node, 4)
    nodes.join(node)
    # Their place is taken: the workers that were cut off learn it as soon as they can, and end.
    job.namespace.until("pods", lambda pods: not lost & {p["metadata"]["name"] for p in pods}, WORKERS)
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0
