# SPDX-License-Identifier: Apache-2.0
"""The servers of embedding rows, as a part of the loop.

Ring and servers must be at the same step: the root of a new ring tells the servers its step (`before_sync`)
before anything is summed. Each rank pulls the rows of its share of a step, and stages its gradients before
the all-reduce. So once the all-reduce has come back anywhere, the servers can apply the step, too. Each call
to a server also carries the outcome of the last step, which is part of the ledger, so that every member with
the state can report it. If a server has lost its rows, or is ahead of the ring, ring and servers roll back
together. If the number of servers is to change, the root has the rows moved once all members have the state
(`after_sync`).
"""

from __future__ import annotations

import json

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.trainer.agreement.control import StepResult
from edl.trainer.parts.part import LoopPart
from edl.trainer.parts.restore import Restore
from edl.trainer.ps_client.client import PsClient
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import Ring, RingSlot, broadcast_bytes, broadcast_text
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.state import State
from edl.trainer.step.interfaces import PullsAhead


def adopt(ring: Ring, root: int, servers: PsClient, why: str = "") -> str:
    """Use the root's shard assignment and server addresses on all members.

    Members whose information comes from different masters may know different servers.

    Returns:
        the root's `why`.
    """
    of = servers.assignment
    said = json.dumps([of.servers, of.replicas, of.out, servers.addresses, why]).encode()
    count, replicas, out, addresses, why = json.loads(broadcast_bytes(ring, said, root))
    servers.adopt(ShardAssignment(count, replicas, tuple(out)), addresses)
    return why


class RowServers(LoopPart):
    """The servers of the rows of this worker's model.

    Args:
        state: the state of this member.
        restore: rolls the state back, if ring and servers must roll back.
    """

    def __init__(self, servers: PsClient, session: Session, ring: Ring, state: State, restore: Restore):
        self._servers, self._session, self._ring = servers, session, ring
        self._state, self._restore = state, restore
        servers.declare(state.learner.tables, lambda: state.ledger.commit)
        self._ahead = state.learner if isinstance(state.learner, PullsAhead) else None
        self._reshard_failure = ""  # why the rows were not moved to the servers that the master wants

    def entering(self, form: FormRing) -> None:
        """Allow calls to the servers, which from now on end when this ring is cut."""
        self._servers.enter(form.addresses, form.servers, form.released_from)

    def leaving(self) -> None:
        """Allow calls to the servers outside of rings, however this ring has ended."""
        self._servers.leave()

    def before_step(self, here: RingSlot, batch: Batch | None) -> None:
        if batch is None and not self._state.catching_up:
            # Servers learn with each call that the last step was made, also before a step without records.
            self._servers.pull(self._state.step, ())

    def summed(self, here: RingSlot, result: StepResult) -> None:
        """Request the rows of the next step: the servers work while this worker applies this one.

        The request carries the commit of this step to them.
        """
        state = self._state
        if self._ahead is None or state.catching_up:
            return
        if (commit := state.commit(state.step, result)) is not None:
            self._ahead.begin_pull(state.step + 1, commit)

    def before_sync(self, form: FormRing, restored: bool) -> str:
        """Bring ring and servers to the same step; all ranks know the result when this returns.

        The root does it before any member receives its state or sums with it.

        Args:
            restored: whether the root has just restored a checkpoint or done a warm start.

        Returns:
            why ring and servers rolled back to what the root has now; "" if they did not.
        """
        ring, servers, state, restore = self._ring, self._servers, self._state, self._restore
        why = ""
        if form.root == self._session.worker:
            servers.claim(self._session.worker)
            # After a warm start step 0 is a state to compare, too: the rows are another training's.
            there = state.ledger.step or restore.warm_start is not None
            if there and not restored and (why := servers.start_generation(state.ledger.step)):
                restored = True
                if not restore.roll_back():
                    self._session.warn(
                        f"{why}: the servers read the rows again; the work done so far stays valid"
                    )
                    why = ""
            if restored or not there:
                attempt = restore.checkpoints.attempt if restore.checkpoints is not None else ""
                servers.restore(state.ledger.step, attempt if state.ledger.step else "")
        root = form.members.index(form.root)
        generation = np.array([servers.generation], np.int64)
        servers.generation = state.servers_generation = int(ring.broadcast(generation, root)[0])
        self._reshard_failure = ""
        return broadcast_text(ring, why, root)

    def after_sync(self, form: FormRing) -> None:
        """Have the rows moved to the servers that the master wants; all ranks know the result on return.

        It comes after `State.sync`: all members in sync hold the same state, so that any of them can
        continue.
        """
        servers, why = self._servers, ""
        if form.root == self._session.worker and servers.moves:
            why = servers.move(self._state.ledger.step)
        self._reshard_failure = adopt(self._ring, form.members.index(form.root), servers, why)

    def joined(self, here: RingSlot, message: pb.JoinedRing) -> None:
        """Add to the message which servers have the rows."""
        of = self._servers.assignment
        message.servers, message.out[:], message.stay = of.servers, of.out, self._reshard_failure
