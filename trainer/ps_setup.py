"""A ring and the servers that have the rows of its model's tables: what its members do before the first step.

Ring and servers are at the same step: the root of a new ring tells the servers where it is (`join`) before
anything is summed. What became of a step is told to them with the next call, and is a part of the ledger: who
has the state can tell it. Where a server has lost its rows, or has more than the ring, both go back together.
Where another number of servers is wanted, the root has the rows moved when all have the state (`move`).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.trainer.agreement.interfaces import Servers
from edl.trainer.restore import Beginning
from edl.trainer.ring.base import Ring, broadcast_bytes, broadcast_text
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.state import State


def adopt(ring: Ring, root: int, servers: Any, why: str = "") -> str:
    """All members call the servers of the root's assignment, where the root knows them: members whom
    different masters have told of servers know different ones. Returns what the root says beside that."""
    of = servers.assignment
    said = json.dumps([of.servers, of.replicas, of.out, servers.addresses, why]).encode()
    count, replicas, out, addresses, why = json.loads(broadcast_bytes(ring, said, root))
    servers.adopt(ShardAssignment(count, replicas, tuple(out)), addresses)
    return why


class RowServers:
    """
    Args:
        state: of this member.
        beginning: to which ring and servers go back, where they have to.
    """

    def __init__(self, servers: Servers, session: Session, state: State, beginning: Beginning):
        self._servers, self._session = servers, session
        self._state, self._beginning = state, beginning
        self._stay = ""  # why the rows have not moved to where they are to be

    def join(self, ring: Ring, form: FormRing, begun: bool) -> str:
        """Ring and servers are at the same step, as all ranks know when this returns. The root sees to it,
        before anybody else is given its state or sums with it.

        Args:
            begun: the root has just begun with a checkpoint, or with a warm start.

        Returns:
            why both had to go back, to what the root has now; empty: they had not.
        """
        servers, state, beginning = self._servers, self._state, self._beginning
        why = ""
        if form.root == self._session.worker:
            servers.speak_of(servers.claim(self._session.worker))
            # Rows may be another training's at the beginning, too: then that is a state like any other.
            there = state.ledger.step or beginning.warm_start is not None
            if there and not begun and (why := servers.start_generation(state.ledger.step)):
                begun = True
                if not beginning.go_back():
                    self._session.warn(f"{why}: the servers read the rows again, and what was done stands")
                    why = ""
            if begun or not there:
                attempt = beginning.checkpoints.attempt if beginning.checkpoints is not None else ""
                servers.restore(state.ledger.step, attempt if state.ledger.step else "")
        root = form.members.index(form.root)
        generation = np.array([servers.generation], np.int64)
        servers.speak_of(int(ring.broadcast(generation, root)[0]))
        self._stay = ""
        return broadcast_text(ring, why, root)

    def move(self, ring: Ring, form: FormRing) -> None:
        """The rows are where the master wants them, or stay where they are, as all ranks know when this
        returns. All who hold the state have the same one, so that any of them can go on with them."""
        servers, why = self._servers, ""
        if form.root == self._session.worker and servers.moves:
            why = servers.move(self._state.ledger.step)
        self._stay = adopt(ring, form.members.index(form.root), servers, why)

    def tell(self, joined: pb.JoinedRing) -> None:
        """Add where the rows are."""
        of = self._servers.assignment
        joined.servers, joined.out[:], joined.servers_stay = of.servers, of.out, self._stay
