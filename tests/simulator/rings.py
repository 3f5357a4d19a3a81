# SPDX-License-Identifier: Apache-2.0
"""The network between the members of a ring: when a collective returns, and at which members.

The ring itself is the trainer's own (trainer/ring/local.py). If a death interrupts a collective, any subset
of the members may have its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from edl.contract.ids import Generation, WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.local import InProcessGroup, Slot, StateTransfer
from tests.simulator.servers import SimServers
from tests.simulator.worker import Sim

if TYPE_CHECKING:
    from tests.simulator.world import World


class Rings:
    """All rings of a run, past and present."""

    def __init__(self, world: World) -> None:
        self.world, self.delivery = world, Delivery
        self.forms: list[ef.Form] = []
        self._groups: dict[
            tuple[int, Generation], InProcessGroup
        ] = {}  # by the number of the master that announces the ring to its members

    def form(self, form: ef.Form, master: int) -> None:
        """Record a ring that this master has decided to form."""
        self.forms.append(form)
        group = InProcessGroup(len(form.members), self.delivery(self.world, form, master))
        self._groups[master, form.generation] = group

    def opens(self, w: Sim, message: pb.ToWorker) -> None:
        """Let the worker enter the ring of this message."""
        assert w.group is None, "ordered into a ring while in another"
        w.ring.open(self._groups[w.master, Generation(message.generation)])

    def hears(self, w: Sim, message: pb.ToWorker) -> None:
        """Deliver a message of the master to the worker."""
        match message.WhichOneof("body"):
            case "form":
                self.opens(w, message)
            case "stop":
                w.stopping = True
                self.world.fleet.stop(w)
        w.session.hear(message)
        if w.session.stopped:
            self.world.fleet.must_end(w)

    def peers(self, worker: WorkerId) -> list[Sim]:
        """All workers that were ever in a ring with this one."""
        rings = [f.members for f in self.forms if worker in f.members]
        return [self.world.fleet.workers[m] for members in rings for m in members if m != worker]


class Delivery:
    """The delivery of the results of one ring's collectives."""

    def __init__(self, world: World, form: ef.Form, master: int):
        self.master = master
        self.world, self.random, self.clock, self.fleet = world, world.random, world.clock, world.fleet
        self.form = form
        self.members = [world.fleet.workers[m] for m in form.members]
        self.lock = nullcontext()
        root = world.fleet.workers[form.root]
        untrusted_up_to = (
            form.untrusted_up_to > 0 and root.worker.state.synced_generation <= form.untrusted_up_to
        )
        has_state = root.has_state and not untrusted_up_to
        self._begins_at = root.step if has_state else None  # None once it has begun
        # Without a state, the root begins with the newest checkpoint.
        self._at_least = 0 if has_state else world.newest_checkpoint
        if world.config.asynchronous:  # the ring begins at the servers' step
            self._begins_at, self._at_least = None, 0
        self._noted = False  # whether the break is recorded as a moment
        self._awaiting_state: dict[Sim, None] = {}
        self._came: set[int] = set()  # the ranks that have received a state

    def wait(self, slot: Slot) -> None:
        self.members[slot.rank].waits(lambda: slot.done)

    def deliver(self, group: InProcessGroup, slots: list[Slot]) -> None:
        """Schedule the result of a collective; called when all members have entered it."""
        match slots[0].call:
            case ("form",):
                takes, spread = self.random.uniform(0.02, 0.2), 0.003
            case ("reduce",):
                # Some ranks may receive a sum long before others. A death then leaves them at different
                # steps.
                takes = self.random.uniform(0.0005, 0.003)
                spread = 0.003 if self.random.random() < 0.8 else self.random.uniform(0.01, 0.2)
                root = self.world.fleet.workers[self.form.root]
                if isinstance(root.servers, SimServers) and root.servers.restored:
                    self._begins_at = None  # the root may have rolled back together with the servers
                self.world.checks.one_state(self.members, self._begins_at, self._at_least)
                if self.world.servers is not None:
                    self.world.servers.meets(self.members)
                self._begins_at, self._at_least = None, 0
            case _:
                takes, spread = 0.001, self.random.random() * 0.1
        self.clock.later(takes, lambda: self._comes_back(group, slots, spread))

    def _comes_back(self, group: InProcessGroup, slots: list[Slot], spread: float) -> None:
        """Deliver the result to each rank at a different time, or never."""
        apart = slots[0].call == ("form",) and not self.fleet.met(self.form, self.master)
        if (apart or any(w.frozen and w.alive for w in self.members)) and not group.broken:
            self.clock.later(0.05, lambda: self._comes_back(group, slots, spread))  # it hangs until it is cut
            return
        if group.broken and self.random.random() < 0.5:
            return  # the ring broke before the collective was complete: no member has the result
        for slot in slots:
            w, at = self.members[slot.rank], self.random.random() * spread
            self.fleet.does(w, at, lambda w=w, slot=slot: self._arrives(group, w, slot))
        self.world.faults.moment({"form": "syncing", "reduce": "stepping"}.get(slots[0].call[0], ""))

    def _arrives(self, group: InProcessGroup, w: Sim, slot: Slot) -> None:
        if not slot.done and not (group.broken and self.random.random() < 0.5):
            slot.complete()
            w.go_on()

    def send(self, group: InProcessGroup, transfer: StateTransfer, parts: list[np.ndarray]) -> None:
        """Deliver a state after a while; never if its source dies or the ring breaks meanwhile."""
        source, receiver = self.members[transfer.source], self.members[transfer.rank]

        def complete() -> None:
            if source.alive and not source.frozen and not group.broken and receiver.group is group:
                self._came.add(transfer.rank)
                transfer.complete(parts)
                receiver.go_on()

        self.world.faults.moment("sending")
        # A member forwards the state piece by piece. So its receiver has nearly all of it at the same time.
        takes = (0.001, 0.05) if transfer.source in self._came else (0.001, 0.05, 0.5, 3.0)
        self.fleet.does(receiver, self.random.choice(takes) * self.random.random(), complete)

    def wait_for_state(self, transfer: StateTransfer) -> None:
        w = self.members[transfer.rank]
        self._awaiting_state[w] = None
        w.waits(lambda: transfer.done or transfer.group.broken)
        self._awaiting_state.pop(w, None)
        if not transfer.done:
            raise RingBroken("the state did not come")

    def fail_slots(self, group: InProcessGroup, slots: Sequence[Slot], why: str) -> None:
        """Let the members notice a failure, each at a different time."""
        for w in self._awaiting_state:
            self.fleet.does(w, 0.01, w.go_on)
        alone = self.world.config.asynchronous  # in an async phase each member leaves by itself
        assert group.broken or alone or not slots, "the members leave the ring at different steps"
        if group.broken and not self._noted:  # a break reaches some members first, which then cut the ring
            self._noted = True
            self.world.faults.moment("breaking")
            some = self.random.sample(slots, self.random.randint(1, len(slots))) if slots else ()
            slots = [slot for slot in slots if slot in some or self.members[slot.rank].ring.is_cut]
        for slot in slots:
            w = self.members[slot.rank]
            own = w.session.was_cut(self.form.generation) or w.session.stopped
            if slot.call == ("form",) and not own and self.random.random() < 0.5:
                continue  # without peers it cannot notice the break, and waits for the master's cut
            at = self.random.uniform(0.001, 0.08)
            self.fleet.does(w, at, lambda w=w, slot=slot: self._fails(w, slot, why))

    def _fails(self, w: Sim, slot: Slot, why: str) -> None:
        if not slot.done:
            slot.fail(why)
            w.go_on()
            assert w.ring.is_cut or w.done, (
                f"worker {w.id} has not cut the ring that broke: others wait for ever"
            )
