"""Nodes that seem to be lost, long before Kubernetes says so: it takes most of a minute.

    all workers on a node have fallen silent ──▶ the node is in doubt
    a pod is put there, and no kubelet takes it up ──▶ the node is avoided
    a while later ──▶ it is trusted again: if it is lost, Kubernetes has noticed

Silence alone says little of a node: a worker may be frozen, and the node the only one with room. But the
scheduler prefers an empty node, and none is as empty as the one that has just lost its workers; what it
puts there would stay pending until the pod is evicted, five minutes after the node is NotReady.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Nodes:
    """What we think of the nodes.

    Args:
        lasts: seconds that a doubt lasts, and that a node is avoided.
        trusted: called when a node is not avoided any more.
    """

    def __init__(self, lasts: float, trusted: Callable[[], None]):
        self._lasts, self._trusted = lasts, trusted
        self._doubted: dict[str, asyncio.TimerHandle] = {}
        self._avoided: dict[str, asyncio.TimerHandle] = {}

    @property
    def avoided(self) -> list[str]:
        return sorted(self._avoided)

    def doubt(self, node: str) -> None:
        """No worker there is heard of."""
        self._begin(self._doubted, node, self._believe)

    def doubts(self, node: str) -> bool:
        return node in self._doubted

    def avoid(self, node: str) -> bool:
        """A pod there is not taken up. False: that is known."""
        known = node in self._avoided
        self._begin(self._avoided, node, self._trust)
        return not known

    def close(self) -> None:
        for timer in (*self._doubted.values(), *self._avoided.values()):
            timer.cancel()

    def _begin(self, which: dict[str, asyncio.TimerHandle], node: str, end: Callable[[str], None]) -> None:
        if node in which:
            which[node].cancel()
        which[node] = asyncio.get_running_loop().call_later(self._lasts, end, node)

    def _believe(self, node: str) -> None:
        del self._doubted[node]

    def _trust(self, node: str) -> None:
        del self._avoided[node]
        self._trusted()
