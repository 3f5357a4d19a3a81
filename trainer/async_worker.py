# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: the loop of trainer/worker.py with all weights on parameter servers (mode=ps).

    run_ring     form ─▶ synchronize ─▶ async phase, evaluation, callbacks, async phase ... ─▶ close
    synchronize  the root brings all servers up to date; all members load the ledger that the servers keep
    async phase  steps that a server hands out, in any order, up to the next boundary (trainer/async_loop.py)

**The state is on the servers**, and the ledger with it. So a worker that enters a ring needs no state from a
member, and a worker may leave in the middle of an async phase, at once, without an agreement.

**A boundary** is the end of an epoch, or a step at which the model is evaluated or written. There all steps
before it are in all weights, all ranks have the same ledger, and the ring evaluates and runs callbacks as
in any mode.

**If the number of servers changes**, or a server is back, the async phase ends early, at a boundary where all
servers have the same steps (`moves_at`). There rank 0 has the rows moved (`rearrange`), and all members go on
with the new servers.

**If a server has lost steps**, they are made again for that server alone, before anything else, even if the
ring was further already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from edl.contract.layout import Part as Share
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import check
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.async_loop import AsyncLoop
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.model.data import Batches
from edl.trainer.parts.checkpoints import CheckpointWriting, Due, never
from edl.trainer.parts.part import Part
from edl.trainer.parts.rows import adopt
from edl.trainer.ps_client.async_server_group import NOWHERE
from edl.trainer.ps_client.calls import ServerRefused
from edl.trainer.ps_client.interfaces import TrainedOn
from edl.trainer.restore import Restore
from edl.trainer.ring.base import RingBroken, RingSlot, broadcast_bytes
from edl.trainer.runtime.log import log
from edl.trainer.session.orders import Export, FormRing, WriteCheckpoint
from edl.trainer.session.state import Session
from edl.trainer.state import State
from edl.trainer.worker import Worker


class AsyncWorker(Worker):
    """One worker of asynchronous training.

    Args:
        async_loop: makes the steps.
        initial: restores initial states of the servers.
        checkpoints: one of the parts; None if the job writes none.
        due: returns the evaluation that is due.
        others: as for Worker.
    """

    def __init__(
        self,
        async_loop: AsyncLoop,
        initial: Restore,
        checkpoints: AsyncCheckpoints | None,
        due: Due,
        *others: Any,
        **more: Any,
    ):
        super().__init__(*others, **more)
        self.async_loop, self.initial, self.checkpoints, self.due = async_loop, initial, checkpoints, due
        self.parts.append(_Entering(async_loop))
        # The ledger is that of the last boundary, the servers are further, and the task may have become
        # smaller since. Steps come in any order: an epoch has begun with any of its steps.
        self.state.begun = lambda: self.state.steps.begun(max(async_loop.reached, async_loop.furthest))
        self.moves_at = NOWHERE  # the step at which rows move to other servers
        self.joined = pb.JoinedRing()  # as reported for this ring

    # --- rings

    def read_ahead(self, form: FormRing, here: RingSlot) -> None:
        """Nothing: the coordinator assigns this worker's steps."""

    def why_broken(self, here: RingSlot, error: RingBroken) -> str:
        # Within an async phase each worker leaves by itself, so that a later all-reduce finds the ring
        # broken.
        return "" if self.session.must_leave(here.generation) else str(error)

    def left_ring(self, broken: str) -> pb.LeftRing:
        found = super().left_ring(broken)  # as far as the servers are, but not over the next boundary
        limit = self.async_loop.boundary(self.state.step, self.state.end)
        found.step = max(found.step, min(self.async_loop.reached, limit - 1))
        if not self.async_loop.at_boundary:
            found.digest = ""
        if self.async_loop.reached < self.state.ledger.step:  # a server lost steps, which must be repeated
            found.step, found.round, found.callbacks_done, found.digest = self.async_loop.reached, 0, 0, ""
        return found

    def synchronize(self, form: FormRing, here: RingSlot) -> RingSlot:
        """Load the servers' state on all members, after the root has brought the servers up to date.

        Raises:
            RingBroken: a server has lost its state since the ring began to form, or the ring was cut.
        """
        async_loop, root, rank, why, kept = self.async_loop, form.members.index(form.root), here.rank, "", b""
        servers, told = async_loop.servers, np.zeros(3, np.int64)
        if rank == root:
            why = self.restore_servers(form, async_loop.take_charge(form.step))
            async_loop.servers.introduce()
            if not (kept := async_loop.servers.kept()):  # it has it, as was seen to
                first = servers.coordinator
                raise RingBroken(
                    f"parameter server {first} has lost what it had since the ring began to form"
                )
            # An earlier root has rolled a server back, and died.
            if async_loop.find_progress() < form.step and not why:
                why = "a parameter server rolled back to a checkpoint"
            told[:] = async_loop.reached, servers.furthest, servers.moves_at()
        else:
            self.batches.take(form.layout, Share.even(0, 1))
        step, furthest, self.moves_at = self.ring.broadcast(told, root).tolist()
        if why := adopt(self.ring, root, servers, why):
            self.report.rolled_back()
            async_loop.forget()
        kept = broadcast_bytes(self.ring, kept, root)
        if rank != root:
            async_loop.look()
        async_loop.reached, async_loop.furthest = step, furthest
        self.state.set_ledger(async_loop.take_over(kept))
        self.batches.take(form.layout, Share.even(0, 1))  # each worker makes whole steps
        for part in self.parts:
            part.take(Share(rank, form.shares))
        state = self.state
        state.has_state = self.has_joined = True
        of = servers.assignment
        self.joined = pb.JoinedRing(
            step=step,
            round=state.round,
            callbacks_done=state.callbacks_done,
            rolled_back=why,
            servers=of.servers,
            out=of.out,
        )
        self.session.say(form.generation, joined_ring=self.joined)
        return here

    def restore_servers(self, form: FormRing, all_go_back: bool) -> str:
        """On the root: give servers that have lost their rows a state.

        Args:
            all_go_back: roll back the servers that have rows, too.

        Returns:
            why all servers rolled back, or why some steps have to be made again; "" if neither.
        """
        async_loop = self.async_loop
        lost = async_loop.look()
        if not lost:
            # An earlier root has initialized the servers, and died before this.
            if not async_loop.servers.kept():
                self.state.set_ledger(Ledger())
                async_loop.forget()
                async_loop.keep(self.state.ledger)
            return ""
        names = " and ".join(f"parameter server {index}" for index in lost)
        why = f"{names} has lost its log and rows" if len(lost) == 1 else f"{names} have lost logs and rows"
        all_go_back = all_go_back or len(lost) == async_loop.servers.count
        if not all_go_back:
            if not self.bring_back(lost):  # with the first weights, and then all steps again
                self.initial.reset_weights()
                if self.initial.warm_start is not None:
                    self.initial.warm_start()
                async_loop.begin(lost)
            again = async_loop.has_steps  # else no step was made when the servers were lost
        else:
            again = async_loop.has_steps or async_loop.reached > 0 or form.step > 0
            self.initial.reset_weights()
            self.state.set_ledger(Ledger())
            whole = self.initial.load_checkpoint(self.initial.newest_step)
            if whole and (checkpoints := self.initial.checkpoints) is not None and checkpoints.restored_step:
                attempt = checkpoints.attempt
                async_loop.servers.restart_as(checkpoints.restored_servers)
                async_loop.servers.go_back(checkpoints.restored_step, attempt)
            else:
                if len(lost) < async_loop.servers.count:
                    async_loop.servers.go_back(0, "")
                if self.initial.warm_start is not None:
                    self.initial.warm_start()
                async_loop.begin()
        if again:
            async_loop.forget()
        if not async_loop.servers.kept():
            if not all_go_back:
                self.state.set_ledger(Ledger())
            async_loop.keep(self.state.ledger)
        return why if again else ""

    def bring_back(self, lost: list[int]) -> bool:
        """Have the lost servers load their rows from the newest checkpoint that they can use.

        A checkpoint of a different number of servers may be unusable, because its parts are of different
        steps. False if there is no usable one.
        """
        checkpoints = self.initial.checkpoints
        there = checkpoints.whole if checkpoints is not None else ()
        for step, attempt in there:
            if not step:  # it has no part that a server could load
                continue
            try:
                self.async_loop.servers.bring_back(lost, step, attempt)
            except ServerRefused as error:
                log.warning(str(error))
            else:
                return True
        return False

    # --- steps

    def advance(self, here: RingSlot) -> bool:
        if self.async_loop.reached < self.state.step:  # a server has lost steps, which come first
            if self.session.was_cut(here.generation):
                raise RingBroken("the ring was cut")
            self.report.step_begins()
            return self.train_step(here)
        return super().advance(here)

    def train_step(self, here: RingSlot) -> bool:
        """Make steps in any order, up to the next boundary. False: this worker leaves the ring after it."""
        async_loop, end = self.async_loop, self.state.end
        if here.rank == 0:
            async_loop.keep(self.state.ledger)  # with the results of evaluations and callbacks
        for part in self.parts:
            part.before_step(here, None)
        again = async_loop.reached < self.state.step  # a server has lost steps
        if here.rank == 0 and not again:
            self.report.to_go(end - self.state.step)
        if self.state.step >= end and not again:
            return self.agree(here)
        if 0 <= self.moves_at <= self.state.step and not again:
            self.rearrange(here)
        limit = self.state.step if again else async_loop.boundary(self.state.step, end)
        if self.moves_at > self.state.step:
            limit = min(limit, self.moves_at)

        def now_and_then() -> None:
            if here.rank == 0:
                self.report.to_go(end - async_loop.reached)
                if self.checkpoints is not None:
                    self.checkpoints.write_inside(here.generation, limit)

        # No member makes a step before the servers keep the ledger: lost steps are counted from there.
        self.ring.broadcast(np.zeros(1, np.int64), 0)
        if not async_loop.run(here.generation, here.rank, limit, now_and_then):
            return False
        self.end_async_phase(here, limit)
        async_loop.tell()
        return self.agree(here)

    def end_async_phase(self, here: RingSlot, limit: int) -> None:
        """All steps below `limit` are applied: give all members the same weights and the same ledger."""
        async_loop = self.async_loop
        steps, kept, ended = self.state.steps, b"", 0
        if here.rank == 0:
            async_loop.servers.drain(limit)
            ledger = self.state.ledger
            if limit > ledger.step:
                found, epoch = async_loop.servers.progress, steps.epoch(ledger.step)
                left_out = steps.records_of([(ledger.step, limit)]) - found.records
                ledger = ledger.after_async_phase(limit, found.loss, found.records, left_out, epoch)
                if steps.ends_epoch(limit):
                    ledger = replace(ledger, epochs=ledger.epochs.whole({}))
            async_loop.keep(ledger)
            kept = async_loop.packed(ledger)
        before = self.state.step
        self.state.set_ledger(async_loop.take_over(broadcast_bytes(self.ring, kept, 0)))
        if before < limit and steps.ends_epoch(limit):
            ended = steps.epoch(limit)
            if self.checkpoints is not None:
                self.checkpoints.epoch_ended()
        self.report.boundary(here.generation, here.rank, self.state.step, self.state.ledger.epochs, ended)

    def rearrange(self, here: RingSlot) -> None:
        """Have rank 0 move the rows to the servers that the master wants. No member is in a step now.

        The rows move, stay where they are, or can move at a later step; all ranks know which when this
        returns.
        """
        async_loop, why, told = self.async_loop, "", np.zeros(1, np.int64)
        if here.rank == 0:
            told[0], why = async_loop.servers.move_rows(self.session.worker)
        self.moves_at = int(self.ring.broadcast(told, 0)[0])
        why = adopt(self.ring, 0, async_loop.servers, why)
        async_loop.forget()  # leased steps and weights are those of the former servers
        async_loop.look()
        if self.moves_at == NOWHERE:
            of = async_loop.servers.assignment
            self.joined.servers, self.joined.out[:], self.joined.servers_stay = of.servers, of.out, why
            self.session.say(here.generation, joined_ring=self.joined)

    def agree(self, here: RingSlot) -> bool:
        """All-reduce what all ranks must know at a boundary. False: nothing is left to be done."""
        state, checkpoints = self.state, self.checkpoints
        ended = state.steps.ended(state.step, state.epochs)
        contribution = control.write(
            state.step,
            change=self.session.task is not None,
            checkpoint=not ended and checkpoints is not None and checkpoints.can_write(here, state.step),
            round=state.round,
        )
        agreed = control.read(np.asarray(self.ring.reduce(contribution)))
        check(agreed, state.step, state.round, here.size, 0)
        if checkpoints is not None and agreed.writers == here.size:
            checkpoints.begin(here)
        self.act_on(agreed, here)
        return not ended or self.due(state.step, state.round, state.epochs) is not None


class _Entering(Part):
    """Allows and ends calls to the servers with each ring."""

    def __init__(self, async_loop: AsyncLoop):
        self._servers = async_loop.servers

    def entering(self, form: FormRing) -> None:
        self._servers.enter(form.addresses, form.servers, form.released_from)

    def leaving(self) -> None:
        self._servers.leave()


class AsyncCheckpoints(CheckpointWriting):
    """Has checkpoints of the weights on servers written, also in the middle of an async phase."""

    def __init__(
        self,
        async_loop: AsyncLoop,
        session: Session,
        checkpoints: Checkpointing,
        state: State,
        batches: Batches,
        split: str,
        due: Due = never,
    ):
        super().__init__(checkpoints, state, batches, split, due)
        self._async_loop, self._session = async_loop, session

    def write_inside(self, generation: int, limit: int) -> None:
        """Begin a checkpoint that is due in the middle of an async phase, on one worker.

        Each server writes its weights of its own moment, with the list of steps in them.
        """
        state, step = self._state, self._async_loop.reached
        if not self._session.checkpoint_is_due(generation):
            return
        alone = RingSlot(generation, self._session.worker, 0, 1)
        if self._async_loop.servers.assignment.out:  # their rows would be of different steps than the others'
            return
        if state.step < step < limit and self.checkpoints.ready(alone, step, state.steps, state.epochs):
            self._async_loop.pull_all(step)
            self.checkpoints.begin(alone, state.ledger, state.steps, self._batches.layout, step)

    def carry_out(self, order: Export | WriteCheckpoint) -> None:
        state, step = self._state, self._state.ledger.step
        try:
            step = max(step, self._async_loop.find_progress())
            self._async_loop.pull_all(step)
        except RingBroken as error:  # of a server: the checkpoint itself fails then, with the reason
            log.warning(str(error))
        self.checkpoints.save(state.ledger, state.steps, self._batches.layout, step)


def export_from_servers(async_loop: AsyncLoop, state: State, export: Callable[[], None]) -> None:
    """Save the final model, if the servers have exactly the steps of this state.

    Raises:
        RingBroken: a server has lost steps of it.
        TrainedOn: a server has applied later steps.
    """
    step = state.ledger.step
    async_loop.saves(step)
    async_loop.look(wait_forever=True)  # no further ring would be formed without a lost server
    if async_loop.servers.furthest > step:  # the number of epochs was reduced after the ring broke
        raise TrainedOn(f"steps of epoch {state.steps.epoch(step) + 1} are in the weights already")
    export()
