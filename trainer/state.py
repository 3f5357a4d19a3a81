# SPDX-License-Identifier: Apache-2.0
"""The job's state in one worker: the model, the ledger, and the updates that are not applied yet.

    ledger, model       one state: changed together, copied together
    pending_updates     steps that the ring has made and that are not in the state yet
    step, round, callbacks_done   what the ring does next: the ledger's own, when nothing is pending

A step is usually pending only while `apply` runs. But a member that joins without the state catches up: it
receives the state of one moment, keeps the steps made since then, and applies them afterwards.

Training changes the state in `_put` only: model and ledger, with nothing that can fail between the two.
Otherwise the whole state is replaced: by a different member's (`sync`, `pass_on`) or by a checkpoint
(trainer/parts/restore.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.epochs import CallbackUpdate
from edl.trainer.agreement.ledger import Ledger, RoundResult, Update
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.ring.base import Ring, StateFuture, broadcast_parts
from edl.trainer.runtime.watchdog import Computing, uncounted
from edl.trainer.session.orders import FormRing
from edl.trainer.step.interfaces import Learner

# Or the size of the state, if that is larger; beyond it the ring waits for this member.
PENDING_BYTES = 256 << 20
UPDATES_PER_STEP = 2  # applied in each step while catching up: more would delay the other members


class State:
    """The state of one worker, and the only user of its learner while a ring trains.

    Args:
        learner: holds the model.
        steps: the steps of the job.
        computing: limits the time of the model's code in a step.
    """

    def __init__(self, learner: Learner, steps: Steps, computing: Computing = uncounted):
        self.learner, self.steps, self._computing = learner, steps, computing
        self.ledger = Ledger()
        self.step, self.round, self.callbacks_done = 0, 0, 0  # which the ring makes next
        self.task = 0  # epochs to train, as the ring has agreed
        self.ring_id = 0  # of the last ring that this worker was ordered into (edl/contract/ids.py)
        self.stop = 0  # number of epochs after which a callback ends the training; 0 if none does
        self.begun: Callable[[], int] = lambda: 0  # epochs that have begun elsewhere, and must be ended
        # Called with the metrics of each epoch whose last step is in this state, also while catching up.
        self.epoch_ended: Callable[[dict[str, Value]], None] = lambda metrics: None
        self.servers_generation: int | None = None  # of the servers of rows; None without servers
        self.has_state = False  # whether this is a state of the job, and not of a new model
        self.synced_generation = 0  # the last ring in which this worker was in sync
        # For a member that joins without the state:
        self.pending_updates: deque[Update] = deque()
        self._incoming: StateFuture | None = None  # the state that is being received; None when it is here
        self._incoming_generation = 0  # the ring that sends it

    # --- the whole state

    def set_ledger(self, ledger: Ledger) -> None:
        """Replace the ledger: the model is in this state already. Nothing is pending then."""
        self.ledger, self.step, self.round, self.callbacks_done = (
            ledger,
            ledger.step,
            ledger.round,
            ledger.callbacks_done,
        )
        self.stop = ledger.epochs.stop

    def sync(self, ring: Ring, root: int, rank: int) -> None:
        """Copy the root's state to all members: ledger and model together, or neither.

        Raises:
            ModelError: the root's state has a different size than this worker's model.
            RingBroken: the ring broke; nothing has changed.
        """
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

    def begin_history(self) -> None:
        """Record that the present ring begins with this state, which is a checkpoint's or a new model's."""
        self.ledger = replace(self.ledger, made_in=self.ring_id)

    def mark_synced(self, generation: int) -> None:
        """Record that this is the state of that ring, at the ring's step."""
        self.has_state, self.synced_generation = True, generation

    def forget(self) -> None:
        """Treat this state as invalid, because it may have diverged from the job's."""
        self.has_state, self.synced_generation = False, 0

    def left_ring(self, broken: str) -> pb.LeftRing:
        """Describe the state for the master, which chooses the next ring's root by it."""
        # The master compares digests of states that may be final.
        complete = self.has_state and self.steps.ends_epoch(self.ledger.step)
        digest = self.learner.digest() if complete else ""
        return self.ledger.left_ring(self.has_state, broken, digest)

    # --- joining a ring without the state

    @property
    def receiving(self) -> bool:
        """Whether the ring's state has not arrived: this state is an older one, or a new model's."""
        return self._incoming is not None

    @property
    def catching_up(self) -> bool:
        """Whether the ring has made steps that are not in this state yet."""
        return self.receiving or bool(self.pending_updates)

    def pass_on(self, ring: Ring, form: FormRing, rank: int) -> None:
        """Begin to send the state to the members that join without it, or to receive it.

        Each member sends to one other. Receivers forward the state, so that many joining members cost a
        member in sync no more than one does.
        """
        joining = [form.members.index(worker) for worker in form.joining]
        synced = [r for r in range(len(form.members)) if r not in joining]
        sources = dict(zip(joining, [*synced, *joining], strict=False))
        if rank in sources:
            self._begin_catch_up(ring, form, sources[rank], forward=rank in sources.values())
        elif rank in sources.values():
            ring.send_state(self.packed())

    def packed(self) -> list[np.ndarray]:
        """The state as it is now, for a member that catches up: uint8 [bytes] each."""
        return [self.ledger.pack(), *self.learner.parts()]

    def prepared(self, parts: list[np.ndarray]) -> tuple[Ledger, Any]:
        """Unpack what `packed` has made. Runs on the thread that receives the state, and changes nothing."""
        return Ledger.unpack(parts.pop(0)), self.learner.prepared(parts)

    def _begin_catch_up(self, ring: Ring, form: FormRing, source: int, forward: bool) -> None:
        """Receive the state of the ring's first step, and keep the steps made since then.

        Args:
            source: the rank that sends it.
            forward: whether this member forwards the state to one more.
        """
        self.step, self.round, self.callbacks_done = form.step, form.round, form.callbacks_done
        self._incoming, self._incoming_generation = (
            ring.receive_state(source, self.prepared, forward),
            form.generation,
        )
        if not self.learner.can_catch_up:
            # This learner cannot apply results later, so the ring waits for it.
            self._take_over(self._incoming)

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

    # --- one more step, evaluation batch or callback update

    @property
    def epochs(self) -> int:
        """The number of epochs to train."""
        return max(min(self.task, self.stop) if self.stop else self.task, self.begun())

    @property
    def end(self) -> int:
        """The step at which nothing is left to train."""
        return self.steps.end(self.step, self.epochs)

    @property
    def records(self) -> int:
        """The number of records of the next step, on all ranks; 0 if nothing is left to train."""
        start, stop = self.steps.positions(self.step) if self.step < self.end else (0, 0)
        return stop - start

    def compute(
        self, batch: Batch | None, vote: np.ndarray, rank: int, following: Following = nothing_follows
    ) -> control.StepResult:
        """Compute this rank's gradients of the next step, and all-reduce them. Changes nothing.

        Args:
            batch: this rank's part of the step; None if it has none: it takes part with weight zero.
            vote: the control vector of this rank, float32 [n].
            following: returns this rank's part of the step after it, if it has been read.

        Raises:
            RingBroken: one of the sums did not come back here.
        """
        with self._limited(batch):
            return self.learner.allreduce_step(batch, vote, self.step, rank, self.records, following)

    def apply(self, update: Update, batch: Batch | None = None) -> dict[str, Value] | None:
        """Apply an update that the ring has made. It stays pending until the state has been received.

        Args:
            batch: this rank's part of the step, for messages.

        Returns:
            the metrics of an epoch that ends with it; None if no epoch ends.
        """
        self.pending_updates.append(update)
        with self._limited(batch, "the update of "):
            if isinstance(update, CallbackUpdate):
                self.callbacks_done, self.stop = 1, update.after.stop
            elif isinstance(update, RoundResult):
                self.round = update.round
            else:
                self.step, self.round, self.callbacks_done = self.step + 1, 0, 0
            return self._catch_up()

    def _limited(self, batch: Batch | None, what: str = "") -> AbstractContextManager[object]:
        """Limit the time of the model's code in a step; without a batch, none of it runs."""
        if batch is None:
            return nullcontext()
        number = self.step + 1
        return self._computing(what or "step", lambda: f"{what}step {number}, with the {batch},", len(batch))

    def _catch_up(self) -> dict[str, Value] | None:
        """Apply pending updates, if the state has been received. Returns as `apply` does."""
        if self._incoming is not None:
            # Beyond this limit the ring waits until the state has been received.
            full = sum(u.nbytes for u in self.pending_updates) > max(PENDING_BYTES, self.learner.nbytes)
            if not self._incoming.done and not full:
                return None
            self._take_over(self._incoming)
        metrics: dict[str, Value] | None = None
        for _ in range(min(len(self.pending_updates), UPDATES_PER_STEP)):
            metrics = self._put(self.pending_updates.popleft())
        return None if self.pending_updates else metrics

    def commit(self, step: int, result: control.StepResult) -> Commit | None:
        """What servers of rows must know of the step made at `step`; None without servers."""
        if self.servers_generation is None:
            return None
        return replace(self.learner.commit(step, result), generation=self.servers_generation)

    def _put(self, update: Update) -> dict[str, Value] | None:
        """Apply one update to model and ledger; nothing that can fail comes between the two."""
        if isinstance(update, CallbackUpdate):
            self.change(update)
            self.ledger = replace(self.ledger, callbacks_done=1, made_in=self.ring_id)
            return None
        if isinstance(update, RoundResult):
            self.ledger = replace(update.put(self.ledger), made_in=self.ring_id)
            return None
        agreed, commit = update.agreed, self.commit(self.ledger.step, update)
        if not agreed.nonfinite and agreed.records:
            self.learner.apply(update)
        self.ledger = self.ledger.after(agreed, self.steps.epoch(self.ledger.step), commit, self.ring_id)
        if not self.steps.ends_epoch(self.ledger.step):
            return None
        metrics = self.learner.take_metrics()
        epochs = self.ledger.epochs.whole(metrics, self.learner.has_loss)
        self.ledger = replace(self.ledger, epochs=epochs)
        self.epoch_ended(metrics)
        return metrics

    def change(self, update: CallbackUpdate) -> None:
        """Apply what callbacks have changed."""
        self.learner.change(update.changed)
        self.ledger = replace(self.ledger, epochs=update.after)
