"""What the trainer does: members meet, take the root's state over, step, and leave.

The collectives are here, with what a death makes of them: any part of the members may have what it
interrupts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl.contract.batching import local_batch
from edl.contract.ids import Generation, WorkerId
from edl.contract.ranges import Range, RangeSet
from master.core import events as ev
from tests.simulator.worker import NOTHING, Collective, Sim

if TYPE_CHECKING:
    from tests.simulator.world import World


class Rings:
    """All rings that there ever were."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.clock, self.fleet = world, world.random, world.clock, world.fleet
        self.forms: list[ev.Form] = []

    def form(self, form: ev.Form) -> None:
        """Each member is told of it."""
        ring = Collective(form)
        self.forms.append(form)
        for member, leases in zip(form.members, form.leases, strict=True):
            self.fleet.order_to(member, lambda w, left=leases: self.enter(w, ring, left))  # type: ignore[misc]

    def enter(self, w: Sim, ring: Collective, leases: tuple[Range, ...]) -> None:
        """hvd.init: nobody is through before everybody is there."""
        assert w.ring is None, "ordered into a ring while in another"
        w.ring, w.leases, w.asked = ring, RangeSet.of(leases), False
        w.form, w.up = ring.form, False
        w.stepped, w.failing, w.safe, w.told = False, False, None, NOTHING
        ring.entered.add(w.id)
        if w.was_cut == ring.generation or w.stopping or (ring.broken and self.random.random() < 0.5):
            self.fails(w)  # or, if it finds no peer to notice that it is broken, when the master says so
        elif ring.entered >= set(ring.form.members) and not ring.broken:
            self.clock.later(self.random.uniform(0.02, 0.2), lambda: self.synced(ring))

    def members(self, ring: Collective) -> list[Sim]:
        return [self.fleet.workers[m] for m in ring.form.members]

    def inside(self, ring: Collective) -> list[Sim]:
        return [w for w in self.members(ring) if w.alive and w.ring is ring]

    def peers(self, worker: WorkerId) -> list[Sim]:
        """All others that were ever in a ring with it."""
        rings = [f.members for f in self.forms if worker in f.members]
        return [self.fleet.workers[m] for members in rings for m in members if m != worker]

    def synced(self, ring: Collective) -> None:
        """The broadcast: taken over by each rank at its own moment, so some may have it when it breaks."""
        if ring.broken:
            return
        self.world.faults.moment("syncing")
        root = self.fleet.workers[ring.form.root]
        state = (root.step, root.applied, root.weights.copy())
        have: set[WorkerId] = set()
        late = self.random.random() * 0.1

        def take_over(w: Sim) -> None:
            if w.ring is not ring or w.failing:
                return
            if ring.form.sync and w is not root:
                w.step, w.applied, w.weights = state[0], state[1], state[2].copy()
                w.leases = w.leases.minus(w.applied)
            elif not ring.form.sync:
                assert (w.step, w.applied) == state[:2] and (w.weights == state[2]).all(), "not one state"
            w.has_state = w.up = True
            self.fleet.say(w, ev.JoinedRing(w.id, ring.generation, w.step))
            have.add(w.id)
            if have == set(ring.form.members):
                self.collective(ring)

        for w in self.members(ring):
            self.fleet.does(w, self.random.uniform(0, late), lambda w=w: take_over(w))  # type: ignore[misc]

    def collective(self, ring: Collective) -> None:
        """One step of everybody. When somebody dies in it, any part of the others may have it."""
        if ring.broken:
            return
        batches: list[Range] = []
        for rank, w in enumerate(self.members(ring)):
            share = local_batch(self.world.batch, rank, len(ring.form.members))
            if share and len(w.leases) < 2 * share and not w.asked:
                w.asked = True
                want = ev.LeaseRequest(w.id, ring.generation)
                self.fleet.does(w, 0, lambda w=w, want=want: self.fleet.say(w, want))  # type: ignore[misc]
            batch, _ = w.leases.take(share)
            if batch is not None:
                size = self.world.size
                assert batch[1] <= (batch[0] // size + 1) * size, "a batch of two epochs"
                batches.append(batch)
        leave = any(w.leave == ring.generation for w in self.members(ring))
        took = self.random.uniform(0.5, 1.5) * self.world.pace if batches else 0.02
        self.clock.later(took, lambda: self.came_back(ring, batches, leave))

    def came_back(self, ring: Collective, batches: list[Range], leave: bool) -> None:
        """The sum is there, for each rank at its own moment, or it never comes."""
        if any(w.frozen for w in self.inside(ring)) and not ring.broken:
            self.clock.later(0.05, lambda: self.came_back(ring, batches, leave))  # it hangs until it is cut
            return
        if ring.broken and self.random.random() < 0.5:
            return  # it broke before the sum was made: nobody has it
        back: set[WorkerId] = set()

        def arrives(w: Sim) -> None:
            if w.ring is not ring or w.failing or (ring.broken and self.random.random() < 0.5):
                return
            self.commit(w, ring, batches)
            back.add(w.id)
            if leave:
                self.out(w, "")
            elif back == set(ring.form.members):
                self.collective(ring)

        for w in self.inside(ring):
            self.fleet.does(w, self.random.random() * 0.003, lambda w=w: arrives(w))  # type: ignore[misc]
        self.world.faults.moment("stepping")

    def commit(self, w: Sim, ring: Collective, batches: list[Range]) -> None:
        w.safe = w.applied
        for start, stop in batches:
            w.applied = w.applied.add(start, stop)  # raises when it is there: counted twice
            w.weights[start:stop] += 1
        w.leases = w.leases.minus(RangeSet.of(batches))
        w.step += bool(batches)
        if not w.stepped:
            w.stepped = True
            self.fleet.say(w, ev.Stepped(w.id, ring.generation, w.step, self.random.random(), 3, 0.01))
        if not batches and w.safe != w.told and w.id == ring.form.members[0]:
            w.told = w.safe
            self.fleet.beat(w)

    def out(self, w: Sim, broken: str) -> None:
        ring, w.ring, w.safe = w.ring, None, None
        assert ring is not None
        complete = w.applied.covers(0, self.world.size * self.world.epochs)
        digest = w.weights.tobytes().hex()[:64] + str(w.weights.sum()) if w.has_state and complete else ""
        w.last_out = ev.LeftRing(
            w.id, ring.generation, w.step, w.has_state, w.applied, broken=broken, digest=digest
        )
        self.fleet.say(w, w.last_out)

    def fails(self, w: Sim) -> None:
        """Its collective fails: it cuts its connections and leaves; a frozen one when it thaws."""
        if w.failing:
            return
        w.failing = True
        ring, pause = w.ring, self.random.uniform(0.001, 0.05)
        self.fleet.does(w, pause, lambda: self.out(w, "a peer is gone") if w.ring is ring else None)

    def cut(self, w: Sim, generation: Generation) -> None:
        w.was_cut = generation
        if w.ring is not None and w.ring.generation == generation:
            self.fails(w)
            self.break_ring(w.ring)

    def break_ring(self, ring: Collective) -> None:
        if ring.broken:
            return
        ring.broken = True
        self.world.faults.moment("breaking")
        for w in self.inside(ring):
            at = self.random.uniform(0, 0.03)
            self.clock.later(at, lambda w=w: self.fails(w) if w.ring is ring else None)  # type: ignore[misc]

    def granted(self, w: Sim, lease: Range) -> None:
        w.leases, w.asked = w.leases.add(*lease), False
