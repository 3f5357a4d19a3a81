"""The job's state in one worker: the model, the ledger, and the updates that are not applied yet.

    ledger, model       one state: changed together, copied together
    pending_updates     steps that the ring has made and that are not in the state yet
    step, round, turn   what the ring does next: the ledger's own, when nothing is pending

A step is usually pending only while `add` runs. But a member that joins without the state catches up: it
receives the state of one moment, keeps the steps made since then, and applies them afterwards.

Training changes the state in `_put` only. Otherwise the whole state is replaced: by a different member's
(`sync`, `begin_catch_up`), by the copy of an earlier worker (`restore_from_memory`), or by a checkpoint
(trainer/restore.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.epochs import CallbackUpdate
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.evaluation.rounds import Rounds
from edl.trainer.ps_client.interfaces import Servers
from edl.trainer.ring.base import Ring, StateFuture, broadcast_parts
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.step.interfaces import Learner

PENDING_BYTES = (
    256 << 20
)  # or the size of the state, if that is larger; beyond it the ring waits for this member
UPDATES_PER_STEP = 2  # applied in each step while catching up: more would delay the other members


class State:
    """The state of one worker.

    Args:
        learner: holds the model.
        rounds: adds rounds of evaluations to the ledger.
        memory: keeps a copy of each state in memory that outlives this process; None for no copies.
        servers: hold the rows of the model's tables; None if it has no tables.
    """

    def __init__(
        self,
        learner: Learner,
        steps: Steps,
        rounds: Rounds,
        session: Session,
        memory: MemoryCopy | None = None,
        servers: Servers | None = None,
    ):
        self.learner, self._steps, self._rounds, self._session = learner, steps, rounds, session
        self._memory, self._servers = memory, servers
        self.ledger = Ledger()
        self.step, self.round, self.turn = 0, 0, 0  # which the ring makes next
        self.stop = 0  # number of epochs after which a callback ends the training; 0 if none does
        self.has_state = False  # whether this is a state of the job, and not of a new model
        self.synced_generation = 0  # the last ring in which this worker was in sync
        # For a member that joins without the state:
        self.pending_updates: deque[control.StepResult | CallbackUpdate] = deque()
        self._incoming: StateFuture | None = None  # the state that is being received; None when it is here
        self._incoming_generation = 0  # the ring that sends it

    # --- the whole state

    def set_ledger(self, ledger: Ledger) -> None:
        """Replace the ledger: the model is in this state already. Nothing is pending then."""
        self.ledger, self.step, self.round, self.turn = ledger, ledger.step, ledger.round, ledger.turn
        self.stop = ledger.epochs.stop

    def restore_from_memory(self) -> bool:
        """Restore the copy that an earlier worker left in this pod's memory. Returns False without a copy."""
        if self._memory is None or (found := self._memory.newest()) is None:
            return False
        ledger, parts = found
        self.learner.take_over(self.learner.prepared(parts))
        self.set_ledger(ledger)
        self.has_state = True
        return True

    def sync(self, ring: Ring, root: int, rank: int) -> None:
        """Copy the root's state to all members: ledger and model together, or neither."""
        ledger = self.ledger.pack() if rank == root else np.zeros(0, np.uint8)
        parts = self.learner.parts()  # on all ranks of the same sizes; only the root's values count
        # The sizes come first, so that the other members can allocate memory.
        header = np.array([len(ledger), sum(map(len, parts))], np.int64)
        lengths = ring.broadcast(header, root).tolist()
        if rank != root:
            ledger = np.zeros(lengths[0], np.uint8)
        if lengths[1] != header[1]:
            raise ModelError(f"the ring's state has {lengths[1]} bytes, this worker's model has {header[1]}")
        ledger = ring.broadcast(ledger, root)
        parts = broadcast_parts(ring, parts, root, rank)
        # Nothing changes before all of it has been received: the ring may break meanwhile.
        if rank != root:
            found = Ledger.unpack(ledger)
            self.learner.take_over(self.learner.prepared(parts))
            self.set_ledger(found)

    def mark_synced(self, generation: int) -> None:
        """Record that this is the state of that ring, at the ring's step."""
        self.has_state, self.synced_generation = True, generation

    def forget(self) -> None:
        """Treat this state as invalid, because it may have diverged from the job's.

        A copy in memory is dropped, too, so that it cannot come back whatever becomes of the next ring.
        """
        self.has_state, self.synced_generation = False, 0
        if self._memory is not None:
            self._memory.forget()

    def left_ring(self, broken: str) -> pb.LeftRing:
        """Describe the state for the master, which chooses the next ring's root by it."""
        complete = self.has_state and self._steps.ends_epoch(
            self.ledger.step
        )  # the master compares digests of states that may be final
        digest = self.learner.digest() if complete else ""
        return self.ledger.left_ring(self.has_state, broken, digest)

    # --- joining a ring without the state

    @property
    def catching_up(self) -> bool:
        """Whether the ring has made steps that are not in this state yet."""
        return self._incoming is not None or bool(self.pending_updates)

    def packed(self) -> list[np.ndarray]:
        """The state as it is now, for a member that catches up: uint8 [bytes] each."""
        return [self.ledger.pack(), *self.learner.parts()]

    def prepared(self, parts: list[np.ndarray]) -> tuple[Ledger, Any]:
        """Unpack what `packed` has made. Runs on the thread that receives the state, and changes nothing."""
        return Ledger.unpack(parts.pop(0)), self.learner.prepared(parts)

    def begin_catch_up(self, ring: Ring, form: FormRing, source: int, forward: bool) -> None:
        """Receive the state of the ring's first step, and keep the steps made since then.

        Args:
            source: the rank that sends it.
            forward: whether this member forwards the state to one more.
        """
        self.step, self.round, self.turn = form.step, form.round, form.turn
        self._incoming, self._incoming_generation = (
            ring.receive_state(source, self.prepared, forward),
            form.generation,
        )
        if not self.learner.can_catch_up:
            self._take_over(
                self._incoming
            )  # this learner cannot apply results later, so the ring waits for it

    def drop_pending(self) -> None:
        """Drop the pending updates after a ring: without the other members they cannot be completed."""
        self._incoming = None
        self.pending_updates.clear()
        self.set_ledger(self.ledger)

    def _take_over(self, incoming: StateFuture) -> None:
        """Replace ledger and model by the received state."""
        ledger, values = incoming.result()
        self.learner.take_over(values)
        self.ledger, self._incoming = ledger, None
        self.mark_synced(self._incoming_generation)
        self.stop = self.stop or ledger.epochs.stop

    # --- one more step, round or callback update

    def add(self, update: control.StepResult | CallbackUpdate) -> dict[str, Value] | None:
        """Add an update that the ring has made. It stays pending until the state has been received.

        Returns:
            the metrics of an epoch that ends with it; None if no epoch ends.
        """
        self.pending_updates.append(update)
        if isinstance(update, CallbackUpdate):
            self.turn, self.stop = 1, update.after.stop
        elif update.round:
            self.round = update.round
        else:
            self.step, self.round, self.turn = self.step + 1, 0, 0
        return self._catch_up()

    def _catch_up(self) -> dict[str, Value] | None:
        """Apply pending updates, if the state has been received. Returns as `add` does."""
        if self._incoming is not None:
            # Beyond this limit the ring waits until the state has been received.
            full = sum(u.nbytes for u in self.pending_updates) > max(PENDING_BYTES, self.learner.nbytes)
            if not self._incoming.done and not full:
                return None
            self._take_over(self._incoming)
        for _ in range(min(len(self.pending_updates), UPDATES_PER_STEP)):
            metrics = self._put(self.pending_updates.popleft())
        self._copy()
        return None if self.pending_updates else metrics

    def _put(self, update: control.StepResult | CallbackUpdate) -> dict[str, Value] | None:
        """Apply one update to model and ledger; nothing that can fail comes between the two."""
        if isinstance(update, CallbackUpdate):
            self.change(update)
            self.ledger = replace(self.ledger, turn=1)
            return None
        if update.round:
            ends_epoch = self._steps.ends_epoch(self.ledger.step)
            self.ledger = self._rounds.put(self.ledger, update, ends_epoch)
            return None
        agreed = update.agreed
        commit: Commit | None = None
        if self._servers is not None:
            made = self.learner.commit(self.ledger.step, update)
            commit = replace(made, generation=self._servers.generation)
        if not agreed.nonfinite and agreed.records:
            self.learner.apply(update)
        self.ledger = self.ledger.after(agreed, self._steps.epoch(self.ledger.step), commit)
        metrics: dict[str, Value] | None = None
        if self._steps.ends_epoch(self.ledger.step):
            metrics = self.learner.take_metrics()
            epochs = self.ledger.epochs.whole(metrics, self.learner.has_loss)
            self.ledger = replace(self.ledger, epochs=epochs)
        return metrics

    def change(self, update: CallbackUpdate) -> None:
        """Apply what callbacks have changed."""
        self.learner.change(update.changed)
        self.ledger = replace(self.ledger, epochs=update.after)

    def _copy(self) -> None:
        """Copy the state to memory that outlives this process.

        It is done before the next step, whose all-reduce then proves that all members have both copies of
        this step.
        The rounds of an unfinished evaluation are not worth a copy of all weights.
        """
        if self._memory is not None and not self.ledger.totals:
            self._memory.put(self.ledger, self.learner.parts())
            if self._memory.full:
                self._session.warn(f"no second copy of the state is kept in memory: {self._memory.full}")
                self._memory = None
