"""Asynchronous training, from one worker's side: the loop of trainer/worker.py where all weights are on
parameter servers (mode=ps).

    ride    form ─▶ meet ─▶ async phase, round, turn, async phase ... ─▶ close
    meet    the root sees to it that all servers have what there is; all take over what they have kept
    async   steps that a server leases, in any order, up to the next boundary (trainer/async_loop.py)

**The state is on the servers**, and the ledger with them. So whoever enters a ring has it, nobody is sent
anything, and a worker leaves in the middle of an async phase, at once, without anybody's agreement.

**A boundary** is the end of an epoch, or where the model is evaluated or written. There all steps before are
in all weights, all ranks have the same ledger, and the ring makes rounds and turns as ever.

**Other servers**, or one that is back: the async phase ends early, at a boundary of its own, where all
servers have the same steps (`moves_at`). There rank 0 has the rows moved (`rearrange`), and all go on with
those.

**A server that has lost steps** has them made again, for it alone: before anything else, also where the ring
was further already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edl.contract.layout import Part
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import check
from edl.trainer.agreement.epochs import Epochs, Turn
from edl.trainer.agreement.interfaces import Callbacks, TrainedOn
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import as_numbers
from edl.trainer.async_loop import AsyncLoop
from edl.trainer.checkpoint.checkpointing import Place
from edl.trainer.ps_client.async_client import NOWHERE
from edl.trainer.ps_client.link import ServerRefused
from edl.trainer.ps_setup import adopt
from edl.trainer.ring.base import RingBroken, broadcast_bytes
from edl.trainer.runtime.log import log
from edl.trainer.session.orders import FormRing
from edl.trainer.worker import Worker


class ServedWorker(Worker):
    """
    Args:
        async_loop: computes the leased steps.
        others: as of Worker.
    """

    def __init__(self, async_loop: AsyncLoop, *others: Any, **more: Any):
        super().__init__(*others, **more)
        self.async_loop = async_loop
        self.beginning.first = self.learner.parts()
        self.moves_at = NOWHERE  # the step at which rows move to other servers
        self.joined = pb.JoinedRing()  # as it was said of this ring

    @property
    def epochs(self) -> int:
        """With the one that has begun: the servers are further than the ledger, which is of the last
        boundary, and fewer may be wanted since. Steps come in any order: an epoch has begun with any of its
        own."""
        return max(super().epochs, self.steps.begun(max(self.async_loop.reached, self.async_loop.furthest)))

    # --- rings

    def read_ahead(self, form: FormRing, rank: int) -> None:
        """Nothing: the coordinator says which steps are this worker's."""

    def enter(self, form: FormRing) -> None:
        self.async_loop.servers.enter(form.addresses, form.servers)

    def leave(self) -> None:
        self.async_loop.servers.leave()

    def why_broken(self, generation: int, error: RingBroken) -> str:
        # In an async phase each leaves by itself, and whoever sums something then finds the ring gone.
        return "" if self.session.must_leave(generation) else str(error)

    def left(self, broken: str) -> pb.LeftRing:
        found = super().left(broken)  # as far as the servers are, but not over the next boundary
        limit = self.async_loop.boundary(self.state.step, self.end)
        found.step = max(found.step, min(self.async_loop.reached, limit - 1))
        if not self.async_loop.at_boundary:
            found.digest = ""
        if (
            self.async_loop.reached < self.state.ledger.step
        ):  # what a server has lost is still to be made again
            found.step, found.round, found.turn, found.digest = self.async_loop.reached, 0, 0, ""
        return found

    def meet(self, form: FormRing, rank: int) -> None:
        """All members have the state that the servers have. The root sees to it that these are all there."""
        async_loop, root, why, kept = self.async_loop, form.members.index(form.root), "", b""
        servers, told = async_loop.servers, np.zeros(3, np.int64)
        if rank == root:
            why = self.settle_servers(form, async_loop.take_charge(form.step))
            async_loop.servers.introduce()
            if not (kept := async_loop.servers.kept()):  # it has it, as was seen to
                first = servers.coordinator
                raise RingBroken(
                    f"parameter server {first} has lost what it had since the ring began to form"
                )
            if async_loop.find_progress() < form.step and not why:  # whoever has seen to that has died of it
                why = "a parameter server went back to a checkpoint"
            told[:] = async_loop.reached, servers.furthest, servers.moves_at()
        else:
            self.batches.take(form.layout, Part.even(0, 1))
        step, furthest, self.moves_at = self.ring.broadcast(told, root).tolist()
        if why := adopt(self.ring, root, servers, why):
            self.report.went_back()
            async_loop.forget()
        kept = broadcast_bytes(self.ring, kept, root)
        if rank != root:
            async_loop.look()
        async_loop.reached, async_loop.furthest = step, furthest
        self.state.begin_with(async_loop.take_over(kept))
        self.batches.take(form.layout, Part.even(0, 1))  # each makes whole steps
        self.rounds.take(Part(rank, form.shares))
        self.caller = 0
        state = self.state
        state.is_held = self.is_up = True
        of = servers.assignment
        self.joined = pb.JoinedRing(
            step=step, round=state.round, turn=state.turn, went_back=why, servers=of.servers, out=of.out
        )
        self.session.say(form.generation, joined_ring=self.joined)

    def settle_servers(self, form: FormRing, all_go_back: bool) -> str:
        """Of the root: servers that have nothing begin with what there is.

        Args:
            all_go_back: also those that have rows.

        Returns:
            why all had to go back, or some steps have to be made again; empty: neither.
        """
        async_loop = self.async_loop
        lost = async_loop.look()
        if not lost:
            if not async_loop.servers.kept():  # who had them begin has died before that
                self.state.begin_with(Ledger())
                async_loop.forget()
                async_loop.keep(self.state.ledger)
            return ""
        names = " and ".join(f"parameter server {index}" for index in lost)
        why = f"{names} has lost its log and rows" if len(lost) == 1 else f"{names} have lost logs and rows"
        all_go_back = all_go_back or len(lost) == async_loop.servers.count
        if not all_go_back:
            if not self.bring_back(lost):  # with the first weights, and then all steps again
                self.beginning.take_first()
                if self.beginning.warm_start is not None:
                    self.beginning.warm_start()
                async_loop.begin(lost)
            again = async_loop.has_steps  # else the job was about to begin when somebody died
        else:
            again = async_loop.has_steps or async_loop.reached > 0 or form.step > 0
            self.beginning.take_first()
            self.state.begin_with(Ledger())
            whole = self.beginning.restore_checkpoint(self.beginning.known)
            if whole and self.checkpoints is not None and self.checkpoints.restored_step:
                attempt = self.checkpoints.attempt
                async_loop.servers.restart_as(self.checkpoints.restored_servers)
                async_loop.servers.go_back(self.checkpoints.restored_step, attempt)
            else:
                if len(lost) < async_loop.servers.count:
                    async_loop.servers.go_back(0, "")
                if self.beginning.warm_start is not None:
                    self.beginning.warm_start()
                async_loop.begin()
        if again:
            async_loop.forget()
        if not async_loop.servers.kept():
            if not all_go_back:
                self.state.begin_with(Ledger())
            async_loop.keep(self.state.ledger)
        return why if again else ""

    def bring_back(self, lost: list[int]) -> bool:
        """Servers that have lost all begin with their rows of the newest checkpoint that they can begin with:
        one of another number of servers may be of different steps. False: there is none."""
        there = self.checkpoints.whole if self.checkpoints is not None else ()
        for step, attempt in there:
            if not step:  # nothing is in it that a server could begin with
                continue
            try:
                self.async_loop.servers.bring_back(lost, step, attempt)
            except ServerRefused as error:
                log.warning(str(error))
            else:
                return True
        return False

    # --- steps

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        if self.async_loop.reached < self.state.step:  # a server has lost steps: they come first
            if self.session.was_cut(generation):
                raise RingBroken("the ring was cut")
            self.report.step_begins()
            return self.train_on(generation, rank, size)
        return super().take_step(generation, rank, size)

    def train_on(self, generation: int, rank: int, size: int) -> bool:
        """Steps in any order, up to the next boundary. False: this worker leaves the ring after it."""
        async_loop, end = self.async_loop, self.end
        if rank == 0:
            async_loop.keep(self.state.ledger)  # with what was evaluated, and what callbacks have said
            self.history(self.state.ledger.epochs.history)
        again = async_loop.reached < self.state.step  # a server has lost steps
        if self.state.step >= end and not again:
            return self.agree(generation, rank, size)
        if 0 <= self.moves_at <= self.state.step and not again:
            self.rearrange(generation, rank)
        limit = self.state.step if again else async_loop.boundary(self.state.step, end)
        if self.moves_at > self.state.step:
            limit = min(limit, self.moves_at)

        def now_and_then() -> None:
            if rank == 0:
                self.report.to_go(end - async_loop.reached)
                self.write_inside(generation, limit)

        # Nobody takes a step before the ledger is kept: what was lost of the async phase counts from there.
        self.ring.broadcast(np.zeros(1, np.int64), 0)
        if not async_loop.run(generation, rank, limit, now_and_then):
            return False
        self.end_async_phase(generation, rank, limit)
        async_loop.tell()
        return self.agree(generation, rank, size)

    def end_async_phase(self, generation: int, rank: int, limit: int) -> None:
        """All steps below `limit` are taken: all have the same weights and the same ledger then."""
        async_loop = self.async_loop
        kept = b""
        ended = 0
        if rank == 0:
            async_loop.servers.drain(limit)
            ledger = self.state.ledger
            if limit > ledger.step:
                found, epoch = async_loop.servers.progress, self.steps.epoch(ledger.step)
                left_out = self.steps.records_of([(ledger.step, limit)]) - found.records
                ledger = ledger.after_async_phase(limit, found.loss, found.records, left_out, epoch)
                if self.steps.ends_epoch(limit):
                    ledger = replace(ledger, epochs=ledger.epochs.whole({}))
            async_loop.keep(ledger)
            kept = async_loop.packed(ledger)
        before = self.state.step
        self.state.begin_with(async_loop.take_over(broadcast_bytes(self.ring, kept, 0)))
        if before < limit and self.steps.ends_epoch(limit):
            ended = self.steps.epoch(limit)
            if self.checkpoints is not None:
                self.checkpoints.epoch_ended(
                    self.state.step, as_numbers(self.state.ledger.epochs.history[-1])
                )
        self.report.boundary(generation, rank, self.state.step, self.state.ledger.epochs, ended)

    def rearrange(self, generation: int, rank: int) -> None:
        """Nobody makes a step, and all know the same ledger: the rows move to where the master wants them, or
        stay where they are, or can move at a later step, as all ranks know when this returns."""
        async_loop, why, told = self.async_loop, "", np.zeros(1, np.int64)
        if rank == 0:
            told[0], why = async_loop.servers.move_rows(self.session.worker)
        self.moves_at = int(self.ring.broadcast(told, 0)[0])
        why = adopt(self.ring, 0, async_loop.servers, why)
        async_loop.forget()  # steps that were held, and weights: they are of the servers before
        async_loop.look()
        if self.moves_at == NOWHERE:
            of = async_loop.servers.assignment
            self.joined.servers, self.joined.out[:], self.joined.servers_stay = of.servers, of.out, why
            self.session.say(generation, joined_ring=self.joined)

    def agree(self, generation: int, rank: int, size: int) -> bool:
        """What all ranks have to know at a boundary. False: nothing is left to be done."""
        ended = self.steps.ended(self.state.step, self.epochs)
        told = control.write(
            self.state.step,
            change=self.session.task is not None,
            checkpoint=not ended and self.can_write(self.state.step),
            round=self.state.round,
        )
        agreed = control.read(np.asarray(self.ring.reduce(told)))
        check(agreed, self.state.step, self.state.round, size, 0)
        if agreed.writers == size:
            self.write()
        self.start_generation(agreed, size)
        return not ended or self.rounds.due(self.state.step, self.state.round, self.epochs) is not None

    # --- checkpoints

    def write_inside(self, generation: int, limit: int) -> None:
        """A checkpoint that is due in the middle of an async phase, of the weights as they are: each server's
        of its own moment, with the steps that are in it. By one worker."""
        step = self.async_loop.reached
        if self.checkpoints is None or not self.session.checkpoint_is_due(generation):
            return
        alone = Place(generation, self.session.worker, 0, 1)
        if self.async_loop.servers.assignment.out:  # of other steps than the rows that they had would be
            return
        if self.state.step < step < limit and self.checkpoints.ready(alone, step, self.steps, self.epochs):
            self.async_loop.pull_all(step)
            self.checkpoints.begin(alone, self.state.ledger, self.steps, self.batches.layout, step)

    def save_checkpoint(self) -> None:
        if self.checkpoints is None:
            return
        step = self.state.ledger.step
        try:
            step = max(step, self.async_loop.find_progress())
            self.async_loop.pull_all(step)
        except RingBroken as error:  # of a server: that it has no part then, the checkpoint says
            log.warning(str(error))
        self.checkpoints.save(self.state.ledger, self.steps, self.batches.layout, step)

    def export_model(self) -> None:
        async_loop, step = self.async_loop, self.state.ledger.step
        async_loop.saves(step)
        async_loop.look(patient=True)  # there is no ring any more that could be formed without one
        if async_loop.servers.furthest > step:  # the ring broke, and then fewer epochs were wanted
            raise TrainedOn(f"steps of epoch {self.steps.epoch(step) + 1} are in the weights already")
        super().export_model()

    # --- callbacks

    def take_turn(self, callbacks: Callbacks, generation: int, rank: int) -> bool:
        return super().take_turn(_Checked(callbacks, self.async_loop), generation, rank)


class _Checked:
    """Callbacks whose changes are looked at: weights are the servers'."""

    def __init__(self, callbacks: Callbacks, async_loop: AsyncLoop):
        self._callbacks, self._async_loop = callbacks, async_loop

    def turn(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> Turn:
        made = self._callbacks.turn(epochs, whole, task, facts)
        self._async_loop.refuse_changed(made.changed)
        return made
