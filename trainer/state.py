"""The job's state, as one worker has it: the model, the ledger, and what the ring has summed beyond them.

    ledger, model       one state: changed together, taken over together, copied together
    kept                steps that the ring has taken, and that are not in the state yet
    step, round, turn   what the ring takes next: the ledger's own, once nothing is kept

Most of the time a step is kept no longer than `add` takes. But who enters a ring without the state follows
it: the state of one moment is on its way, and the steps since then are kept, and put into it when it is here.

Training changes the state in `_put` only. Else another one is taken over as a whole: another member's
(`sync`, `follow`), that of a worker before this one (`begin_from_memory`), a checkpoint's
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
from edl.trainer.agreement.epochs import Turn
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.evaluation.rounds import Rounds
from edl.trainer.ps_client.interfaces import Servers
from edl.trainer.ring.base import Arrival, Ring, broadcast_parts
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.step.interfaces import Learner

KEPT = 256 << 20  # bytes of sums that a member keeps, or as many as its state has, while that is on its way
AT_ONCE = 2  # steps that it applies in the time of one, so that nobody waits for it long


class State:
    """
    Args:
        learner: has the model.
        rounds: of its evaluations.
        memory: takes a copy of each state; None: nobody keeps one.
        servers: have the rows of the model's tables; None: it has none.
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
        self.step, self.round, self.turn = 0, 0, 0  # which the ring takes next
        self.stop = 0  # with so many epochs the training ends, because a callback wants it; 0: none does
        self.is_held = False  # whether it is a copy of the job's state
        self.held_in = 0  # the last ring whose state it was
        # Of a member that has entered the ring without its state:
        self.kept: deque[control.Sums | Turn] = deque()
        self._arrival: Arrival | None = None  # until the state is here
        self._arrives_in = 0  # that ring

    # --- as a whole

    def begin_with(self, ledger: Ledger) -> None:
        """That is what is in the model."""
        self.ledger, self.step, self.round, self.turn = ledger, ledger.step, ledger.round, ledger.turn
        self.stop = ledger.epochs.stop

    def begin_from_memory(self) -> bool:
        """Take over what a worker before this one has left in the memory of their place. False: nothing."""
        if self._memory is None or (found := self._memory.newest()) is None:
            return False
        ledger, parts = found
        self.learner.take_over(self.learner.prepared(parts))
        self.begin_with(ledger)
        self.is_held = True
        return True

    def sync(self, ring: Ring, root: int, rank: int) -> None:
        """All take the root's: ledger and model together, or neither."""
        ledger = self.ledger.pack() if rank == root else np.zeros(0, np.uint8)
        parts = self.learner.parts()  # of the root; of the others, as long as those
        # First how long everything is, so that the others can make room for it.
        header = np.array([len(ledger), sum(map(len, parts))], np.int64)
        lengths = ring.broadcast(header, root).tolist()
        if rank != root:
            ledger = np.zeros(lengths[0], np.uint8)
        if lengths[1] != header[1]:
            raise ModelError(f"the ring's state has {lengths[1]} bytes, this worker's model has {header[1]}")
        ledger = ring.broadcast(ledger, root)
        parts = broadcast_parts(ring, parts, root, rank)
        # Nothing is taken over before all of it is here.
        if rank != root:
            found = Ledger.unpack(ledger)
            self.learner.take_over(self.learner.prepared(parts))
            self.begin_with(found)

    def hold(self, generation: int) -> None:
        """It is the state of that ring, at the step that the ring is at."""
        self.is_held, self.held_in = True, generation

    def forget(self) -> None:
        """It may not be the job's: it counts for nothing, whatever becomes of the next ring."""
        self.is_held, self.held_in = False, 0
        if self._memory is not None:
            self._memory.forget()

    def left_ring(self, broken: str) -> pb.LeftRing:
        """What the master goes on from."""
        complete = self.is_held and self._steps.ends_epoch(self.ledger.step)  # it may be the last
        digest = self.learner.digest() if complete else ""
        return self.ledger.left_ring(self.is_held, broken, digest)

    # --- of a member that has entered the ring without it

    @property
    def follows(self) -> bool:
        """Whether steps of the ring are not in it yet."""
        return self._arrival is not None or bool(self.kept)

    def packed(self) -> list[np.ndarray]:
        """As it is now, for a member that follows: uint8 [bytes] each."""
        return [self.ledger.pack(), *self.learner.parts()]

    def prepared(self, parts: list[np.ndarray]) -> tuple[Ledger, Any]:
        """What another member has packed: on the thread that receives it, and nothing is changed yet."""
        return Ledger.unpack(parts.pop(0)), self.learner.prepared(parts)

    def follow(self, ring: Ring, form: FormRing, giver: int, passes_on: bool) -> None:
        """Have the state of the ring's first step come, and keep the steps since then.

        Args:
            giver: the rank that it comes from.
            passes_on: one more member takes it, from this one.
        """
        self.step, self.round, self.turn = form.step, form.round, form.turn
        self._arrival, self._arrives_in = ring.take(giver, self.prepared, passes_on), form.generation
        if not self.learner.follows:
            self._take_over(self._arrival)  # all wait for it

    def drop_kept(self) -> None:
        """The ring is left: what is kept is worth nothing without the others."""
        self._arrival = None
        self.kept.clear()
        self.begin_with(self.ledger)

    def _take_over(self, arrival: Arrival) -> None:
        """Take over the state that comes: ledger and model together."""
        ledger, values = arrival.state()
        self.learner.take_over(values)
        self.ledger, self._arrival = ledger, None
        self.hold(self._arrives_in)
        self.stop = self.stop or ledger.epochs.stop

    # --- one step, round or turn more

    def add(self, sums: control.Sums | Turn) -> dict[str, Value] | None:
        """The ring has taken it: put it into the state, or keep it until the state is here.

        Returns:
            the metrics of an epoch that ends with it, if one does.
        """
        self.kept.append(sums)
        if isinstance(sums, Turn):
            self.turn, self.stop = 1, sums.after.stop
        elif sums.round:
            self.round = sums.round
        else:
            self.step, self.round, self.turn = self.step + 1, 0, 0
        return self._catch_up()

    def _catch_up(self) -> dict[str, Value] | None:
        """Put what is kept into the state, as far as the state is here. Returns as `add` does."""
        if self._arrival is not None:
            # Beyond that all wait for the state.
            full = sum(s.nbytes for s in self.kept) > max(KEPT, self.learner.nbytes)
            if not self._arrival.here and not full:
                return None
            self._take_over(self._arrival)
        for _ in range(min(len(self.kept), AT_ONCE)):
            metrics = self._put(self.kept.popleft())
        self._copy()
        return None if self.kept else metrics

    def _put(self, sums: control.Sums | Turn) -> dict[str, Value] | None:
        """Model and ledger, one after the other, nothing in between that can fail."""
        if isinstance(sums, Turn):
            self.change(sums)
            self.ledger = replace(self.ledger, turn=1)
            return None
        if sums.round:
            ends_epoch = self._steps.ends_epoch(self.ledger.step)
            self.ledger = self._rounds.put(self.ledger, sums, ends_epoch)
            return None
        agreed = sums.agreed
        commit: Commit | None = None
        if self._servers is not None:
            made = self.learner.commit(self.ledger.step, sums)
            commit = replace(made, generation=self._servers.generation)
        if not agreed.nonfinite and agreed.records:
            self.learner.apply(sums)
        self.ledger = self.ledger.after(agreed, self._steps.epoch(self.ledger.step), commit)
        metrics: dict[str, Value] | None = None
        if self._steps.ends_epoch(self.ledger.step):
            metrics = self.learner.take_metrics()
            epochs = self.ledger.epochs.whole(metrics, self.learner.has_loss)
            self.ledger = replace(self.ledger, epochs=epochs)
        return metrics

    def change(self, turn: Turn) -> None:
        """As callbacks want it."""
        self.learner.change(turn.changed)
        self.ledger = replace(self.ledger, epochs=turn.after)

    def _copy(self) -> None:
        """Into the memory of its place: before the next step, which is then proof that all have this one
        twice. The rounds of a pass that is not over are not worth a copy of all weights."""
        if self._memory is not None and not self.ledger.totals:
            self._memory.put(self.ledger, self.learner.parts())
            if self._memory.full:
                self._session.warn(f"no second copy of the state is kept in memory: {self._memory.full}")
                self._memory = None
