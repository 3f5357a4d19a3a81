# SPDX-License-Identifier: Apache-2.0
"""Steps that a server leases to workers (mode=ps): all weights are on servers, training is asynchronous.

    before_sync  the root brings all servers up to date; all members load the ledger that the servers keep
    make         an async phase: leased steps, in any order, up to the next boundary (async_loop)
                 ─▶ all ranks pull the same weights and the same ledger ─▶ vote

**The state is on the servers**, and the ledger with it. So a worker that enters a ring needs no state from a
member, and a worker may leave in the middle of an async phase, at once, without an agreement.

**A boundary** is the end of an epoch, or a step at which the model is evaluated or written. There all steps
before it are in all weights, all ranks have the same ledger, and the ring evaluates and runs callbacks as
in any mode.

**If the number of servers changes**, or a server is back, the async phase ends early, at a boundary where all
servers have the same steps (`moves_at`). There rank 0 has the rows moved (`_move_rows`), and all members go
on with the new servers.

**If a server has lost steps**, they are made again for that server alone (`ring_up`), before anything else,
even if the ring was further already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import check
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.parts.checkpoints import CheckpointWriting
from edl.trainer.parts.part import StepSource
from edl.trainer.parts.restore import Restore
from edl.trainer.parts.rows import adopt
from edl.trainer.ps_client.calls import ServerRefused
from edl.trainer.ps_client.root import NOWHERE
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import Ring, RingBroken, RingSlot, broadcast_bytes
from edl.trainer.runtime.log import log
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State


class LeasedSteps(StepSource):
    """Makes the steps up to the next boundary, together with the other members, in any order.

    Args:
        loop: makes this worker's steps of an async phase.
        restore: restores initial states of the servers.
        checkpoints: writes the job's checkpoints; None if the job writes none.
    """

    def __init__(
        self,
        loop: AsyncLoop,
        session: Session,
        ring: Ring,
        state: State,
        batches: Batches,
        report: Telemetry,
        restore: Restore,
        checkpoints: CheckpointWriting | None,
    ):
        super().__init__(batches)
        self._loop, self._session, self._ring, self._state = loop, session, ring, state
        self._report, self._restore, self._checkpoints = report, restore, checkpoints
        # The ledger is that of the last boundary, the servers are further, and the task may have become
        # smaller since. Steps come in any order: an epoch has begun with any of its steps.
        state.begun = lambda: state.steps.begun(max(loop.reached, loop.furthest))
        # In the present ring:
        self._generation = 0
        self._moves_at = NOWHERE  # the step at which rows move to other servers
        self._rolled_back = ""  # why the servers have rolled back
        self._joined = pb.JoinedRing()  # as reported

    # --- a ring begins

    def entering(self, form: FormRing) -> None:
        """Allow calls to the servers, which from now on end when this ring is cut."""
        self._generation = form.generation
        self._loop.servers.enter(form.addresses, form.servers, form.released_from)

    def before_sync(self, form: FormRing, restored: bool) -> str:
        """Load the servers' state on all members, after the root has brought the servers up to date.

        Raises:
            RingBroken: a server has lost its state since the ring began to form, or the ring was cut.
        """
        loop, root, why, kept = self._loop, form.members.index(form.root), "", b""
        is_root, servers, told = form.root == self._session.worker, loop.servers, np.zeros(3, np.int64)
        if is_root:
            why = self._restore_servers(form.step, servers.take_charge(self._session.worker, form.step))
            servers.introduce()
            if not (kept := servers.kept()):  # it has it, as was seen to
                first = servers.coordinator
                raise RingBroken(
                    f"parameter server {first} has lost what it had since the ring began to form"
                )
            # An earlier root has rolled a server back, and died.
            if loop.find_progress() < form.step and not why:
                why = "a parameter server rolled back to a checkpoint"
            # When all steps below `furthest` are done, all servers have the same steps.
            told[:] = loop.reached, servers.furthest, servers.furthest if servers.moves else NOWHERE
        self._batches.take(form.layout, StepSlice.even(0, 1))  # each worker makes whole steps
        step, furthest, self._moves_at = self._ring.broadcast(told, root).tolist()
        self._rolled_back = adopt(self._ring, root, servers, why)
        if self._rolled_back:
            self._report.rolled_back()
            loop.forget()
        kept = broadcast_bytes(self._ring, kept, root)
        if not is_root:
            loop.look()
        loop.reached, loop.furthest = step, furthest
        self._state.set_ledger(loop.take_over(kept))
        return ""  # no member needs another's state

    def joined(self, here: RingSlot, message: pb.JoinedRing) -> None:
        """Add to the message how far the servers are, and which of them have the rows."""
        of, self._joined = self._loop.servers.assignment, message
        message.step, message.rolled_back = self._loop.reached, self._rolled_back
        message.servers, message.out[:] = of.servers, of.out

    def ring_up(self, here: RingSlot) -> None:
        """Make the steps that a server has lost again, before anything else.

        Raises:
            RingBroken: this worker has to leave before, or the ring was cut.
        """
        state = self._state
        if self._loop.reached >= state.step:
            return
        if here.rank == 0:
            self._loop.keep(state.ledger)
        if not self._async_phase(here, state.step):
            raise RingBroken("this worker has to leave before the lost steps are made")
        # No member makes a further step before all have the weights of this boundary.
        self._agree(here, control.write(state.step, round=state.round))

    # --- steps

    def compute(
        self, here: RingSlot, begin: Callable[[Batch | None], np.ndarray]
    ) -> control.StepResult | None:
        state, checkpoints, before, end = self._state, self._checkpoints, self._state.step, self._state.end
        if here.rank == 0:
            self._loop.keep(state.ledger)  # with the results of evaluations and callbacks
            self._report.to_go(end - before)
        if before < end:
            if 0 <= self._moves_at <= before:
                self._move_rows(here)
            limit = self._loop.boundary(before, end)
            if self._moves_at > before:
                limit = min(limit, self._moves_at)
            if not self._async_phase(here, limit):
                return None
        contribution = begin(None)
        can_write = checkpoints is not None and checkpoints.can_write(here, state.step)
        contribution[control.CHECKPOINT] = can_write  # of this boundary, not of a next step
        return control.StepResult(self._agree(here, contribution), False, 0.0, 0, None)

    def apply(self, result: control.StepResult) -> Mapping[str, Value] | None:
        """Nothing is left to apply: the servers have the steps."""
        return {} if self._state.steps.ends_epoch(self._state.step) else None

    def _async_phase(self, here: RingSlot, limit: int) -> bool:
        """Make steps in any order until all below `limit` are made. False: this worker leaves before."""
        loop = self._loop

        def now_and_then() -> None:
            if here.rank == 0:
                self._report.to_go(self._state.end - loop.reached)
                self._write_inside(here.generation, limit)

        # No member makes a step before the servers keep the ledger: lost steps are counted from there.
        self._ring.broadcast(np.zeros(1, np.int64), 0)
        if not loop.run(here.generation, here.rank, limit, now_and_then):
            return False
        self._end_async_phase(here, limit)
        loop.tell()
        return True

    def _write_inside(self, generation: int, limit: int) -> None:
        """Begin a checkpoint that is due in the middle of an async phase, on one worker.

        Each server writes its weights of its own moment, with the list of steps in them.
        """
        loop, state, writing, step = self._loop, self._state, self._checkpoints, self._loop.reached
        if writing is None or not self._session.checkpoint_is_due(generation):
            return
        alone = RingSlot(generation, self._session.worker, 0, 1)
        if loop.servers.assignment.out:  # their rows would be of different steps than the others'
            return
        if state.step < step < limit and writing.checkpoints.ready(alone, step, state.steps, state.epochs):
            loop.pull_all(step)
            writing.checkpoints.begin(alone, state.ledger, state.steps, self._batches.layout, step)

    def _end_async_phase(self, here: RingSlot, limit: int) -> None:
        """All steps below `limit` are applied: give all members the same weights and the same ledger."""
        loop, steps, before, kept, ended = self._loop, self._state.steps, self._state.step, b"", 0
        if here.rank == 0:
            loop.servers.drain(limit)
            ledger = self._state.ledger
            if limit > ledger.step:
                found, epoch = loop.servers.progress, steps.epoch(ledger.step)
                left_out = steps.records_of([(ledger.step, limit)]) - found.records
                ledger = ledger.after_async_phase(limit, found.loss, found.records, left_out, epoch)
                if steps.ends_epoch(limit):
                    ledger = replace(ledger, epochs=ledger.epochs.whole({}))
            loop.keep(ledger)
            kept = loop.packed(ledger)
        self._state.set_ledger(loop.take_over(broadcast_bytes(self._ring, kept, 0)))
        if before < limit and steps.ends_epoch(limit):
            ended = steps.epoch(limit)
        self._report.boundary(here.generation, here.rank, limit, self._state.ledger.epochs, ended)

    def _move_rows(self, here: RingSlot) -> None:
        """Have rank 0 move the rows to the servers that the master wants. No member is in a step now.

        The rows move, stay where they are, or can move at a later step; all ranks know which when this
        returns.
        """
        loop, why, told = self._loop, "", np.zeros(1, np.int64)
        if here.rank == 0:
            told[0], why = loop.servers.move_quiesced(self._session.worker)
        self._moves_at = int(self._ring.broadcast(told, 0)[0])
        why = adopt(self._ring, 0, loop.servers, why)
        loop.forget()  # leased steps and weights are those of the former servers
        loop.look()
        if self._moves_at == NOWHERE:
            of = loop.servers.assignment
            self._joined.servers, self._joined.out[:], self._joined.stay = of.servers, of.out, why
            self._session.say(here.generation, joined_ring=self._joined)

    def _agree(self, here: RingSlot, contribution: np.ndarray) -> control.Agreed:
        """All-reduce what all ranks must know at a boundary."""
        agreed = control.read(np.asarray(self._ring.reduce(contribution)))
        check(agreed, self._state.step, self._state.round, here.size, 0)
        return agreed

    # --- the ring ends

    def leaving(self) -> None:
        """Allow calls to the servers outside of rings, however this ring has ended."""
        self._loop.servers.leave()

    def left(self, message: pb.LeftRing) -> None:
        loop, state = self._loop, self._state
        if self._session.must_leave(self._generation):
            # Within an async phase each worker leaves by itself, so that a later all-reduce finds the ring
            # broken.
            message.broken = ""
        # As far as the servers are, but not over the next boundary.
        message.step = max(message.step, min(loop.reached, loop.boundary(state.step, state.end) - 1))
        if not loop.at_boundary:
            message.digest = ""
        if loop.reached < state.ledger.step:  # a server lost steps, which must be repeated
            message.step, message.round, message.callbacks_done, message.digest = loop.reached, 0, 0, ""

    # --- the servers' state

    def _restore_servers(self, step: int, all_go_back: bool) -> str:
        """On the root: give servers that have lost their rows a state.

        Args:
            step: at which the ring begins.
            all_go_back: roll back the servers that have rows, too.

        Returns:
            why all servers rolled back, or why some steps have to be made again; "" if neither.
        """
        loop = self._loop
        lost = loop.look()
        if not lost:
            # An earlier root has initialized the servers, and died before this.
            if not loop.servers.kept():
                self._state.set_ledger(Ledger())
                loop.forget()
                loop.keep(self._state.ledger)
            return ""
        names = " and ".join(f"parameter server {index}" for index in lost)
        why = f"{names} has lost its log and rows" if len(lost) == 1 else f"{names} have lost logs and rows"
        all_go_back = all_go_back or len(lost) == loop.servers.count
        if not all_go_back:
            if not self._bring_back(lost):  # with the first weights, and then all steps again
                self._restore.reset_weights()
                if self._restore.warm_start is not None:
                    self._restore.warm_start()
                loop.begin(lost)
            again = loop.has_steps  # else no step was made when the servers were lost
        else:
            again = loop.has_steps or loop.reached > 0 or step > 0
            self._restore.reset_weights()
            self._state.set_ledger(Ledger())
            whole = self._restore.load_checkpoint(self._restore.newest_step)
            if whole and (checkpoints := self._restore.checkpoints) is not None and checkpoints.restored_step:
                attempt = checkpoints.attempt
                loop.servers.restart_as(checkpoints.restored_servers)
                loop.servers.restore(checkpoints.restored_step, attempt)
            else:
                if len(lost) < loop.servers.count:
                    loop.servers.restore(0, "")
                if self._restore.warm_start is not None:
                    self._restore.warm_start()
                loop.begin()
        if again:
            loop.forget()
        if not loop.servers.kept():
            if not all_go_back:
                self._state.set_ledger(Ledger())
            loop.keep(self._state.ledger)
        return why if again else ""

    def _bring_back(self, lost: list[int]) -> bool:
        """Have the lost servers load their rows from the newest checkpoint that they can use.

        A checkpoint of a different number of servers may be unusable, because its parts are of different
        steps. False if there is no usable one.
        """
        checkpoints = self._restore.checkpoints
        there = checkpoints.whole if checkpoints is not None else ()
        for step, attempt in there:
            if not step:  # it has no part that a server could load
                continue
            try:
                self._loop.servers.restore(step, attempt, lost)
            except ServerRefused as error:
                log.warning(str(error))
            else:
                return True
        return False
