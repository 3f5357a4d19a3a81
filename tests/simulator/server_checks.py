# SPDX-License-Identifier: Apache-2.0
"""Checks of the rows on parameter servers.

Each position of the state must count once on each server that should have it, and on no other server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edl.contract.rows.placement import ShardAssignment
from edl.ps.server import ParameterServer
from tests.support.models.counting_served import DIM

if TYPE_CHECKING:
    from tests.simulator.servers import Servers
    from tests.simulator.worker import Sim


def of_ring(servers: Servers, w: Sim) -> bool:
    """Check that the servers are at a worker's step, with the counts of its model.

    Returns False if some servers are unavailable now.
    """
    assert w.servers is not None
    of = w.servers.assignment
    for index in of.members:
        server = servers.place(index).server
        if server is None or server.position().step != w.step or server.position().empty:
            return False
        assert server.assignment == of, f"server {index} is one of {server.assignment}, not of {of}"
        _rows(index, server, of, w.weights)
    return True


def of_members(servers: Servers, members: Sequence[Sim]) -> None:
    """Check that all members of a ring use the same servers, and that these have the rows.

    Servers that were lost since, or obey a newer ring, are excepted.
    """
    spoken = {w.servers.assignment for w in members if w.servers is not None}
    assert len(spoken) == 1, f"members of one ring speak to {spoken}"
    (of,) = spoken
    assert of.is_whole, f"rows of {of} are nowhere"
    (generation,) = {w.servers.generation for w in members if w.servers is not None}
    for index in of.members:
        server = servers.place(index).server
        if server is not None and server.position().generation == generation:
            assert server.assignment == of, f"server {index} is one of {server.assignment}, the ring of {of}"


def of_steps(servers: Servers, w: Sim) -> bool:
    """Check that the servers have applied all steps of a worker's state, each once.

    Returns False if some servers are unavailable now.
    """
    assert w.servers is not None
    together, of = servers.config.grads_to_wait, w.servers.assignment
    for index in of.members:
        server = servers.place(index).server
        if server is None or server.position().empty:
            return False
        applied = server.async_server.state
        if applied.step < w.step:
            return False
        assert not applied.waiting and not applied.rescheduled, f"server {index} at the end: {applied}"
        _rows(index, server, of, w.weights, together)
        dense = server.tables[1].copy(server.version)
        counts = dense.rows.reshape(-1)
        places = (dense.ids[:, None] * DIM + np.arange(DIM)).reshape(-1)
        there = places < len(w.weights)
        trained = w.weights[places[there]] > 0
        assert ((counts[there] > 0) == trained).all() and not counts[~there].any(), (
            f"server {index}: the dense weights at {places} count {counts}"
        )
        if together == 1 and not servers.config.scale_rate_by_staleness:
            assert set(counts.tolist()) <= {0.0, 1.0}, f"server {index}: {counts}"
    return True


def _rows(
    index: int, server: ParameterServer, of: ShardAssignment, weights: np.ndarray, together: int = 1
) -> None:
    """Check the rows of the positions on one server.

    Args:
        together: the largest number of steps applied as one, in which each step counts as a fraction.
    """
    found = server.tables[0].copy(server.mode.clock)
    foreign = found.ids[~of.has(index, found.ids)]
    assert not len(foreign), f"server {index} has the rows of {foreign}, which are others'"
    positions = np.arange(len(weights))
    mine = positions[of.has(index, positions)]
    counts = np.zeros(len(weights), np.float32)
    counts[found.ids] = found.rows[:, 0]
    right = [np.float32(1.0 / n) for n in range(1, together + 1)]
    wrong = mine[np.where(weights[mine] > 0, ~np.isin(counts[mine], right), counts[mine] != 0)]
    assert not len(wrong), (
        f"the rows of {wrong} on server {index} count {counts[wrong]}, the model {weights[wrong]}"
    )
