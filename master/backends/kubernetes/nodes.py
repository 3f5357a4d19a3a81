# SPDX-License-Identifier: Apache-2.0
"""Nodes that seem to be lost, detected earlier than by Kubernetes, which takes most of a minute.

    no worker on a node sends heartbeats ──▶ the node is doubted
    a pod is scheduled there, and no kubelet starts it ──▶ the node is avoided
    a while later ──▶ the node is trusted again: if it is lost, Kubernetes has noticed

Missing heartbeats alone prove little: a worker may be frozen, and its node may be the only one with room. But
the scheduler prefers empty nodes, and a node that has just lost its workers is the emptiest. A new pod there
would stay pending until its eviction, five minutes after the node is NotReady.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Nodes:
    """The doubted and the avoided nodes.

    Args:
        lasts: seconds for which a node is doubted, and for which it is avoided.
        trusted: called when a node is trusted again.
    """

    def __init__(self, lasts: float, trusted: Callable[[], None]):
        self._lasts, self._trusted = lasts, trusted
        self._doubted: dict[str, asyncio.TimerHandle] = {}
        self._avoided: dict[str, asyncio.TimerHandle] = {}

    @property
    def avoided(self) -> list[str]:
        return sorted(self._avoided)

    def doubt(self, node: str) -> None:
        """Doubt a node where no worker sends heartbeats."""
        self._begin(self._doubted, node, self._believe)

    def doubts(self, node: str) -> bool:
        return node in self._doubted

    def avoid(self, node: str) -> bool:
        """Avoid a node whose kubelet does not start a pod. False if it is avoided already."""
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
