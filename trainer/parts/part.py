# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and what a job may have beside it.

The loop (trainer/worker.py) calls all parts of its worker at fixed moments, in their order, and knows none of
them by name. A part that does not care about a moment inherits a method that does nothing. The methods are
listed in the order in which the loop calls them.

Each job has one part that makes its steps (`StepSource`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict

import numpy as np

from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement.control import StepResult
from edl.trainer.agreement.ledger import RoundResult, Update
from edl.trainer.agreement.metric_values import Value
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import RingSlot
from edl.trainer.session.orders import Export, FormRing, WriteCheckpoint


class LoopPart:
    """One part of a job; it does nothing unless it overrides a method.

    A part may raise RingBroken in all methods from `before_sync` to `after`: the ring then breaks.
    """

    # --- outside of rings

    def ready(self, message: pb.Ready) -> None:
        """Before the worker's first ring: add to the message what the master must know of this part."""

    def carry_out(self, order: Export | WriteCheckpoint) -> None:
        """Carry out an order that is for one worker alone."""

    def finish(self) -> None:
        """End the training, on the worker that saves the final model, before it is saved."""

    # --- a ring begins

    def entering(self, form: FormRing) -> None:
        """Before this worker meets the other members of a ring."""

    def before_sync(self, form: FormRing, restored: bool) -> str:
        """Before any member receives the root's state, or computes with it.

        Args:
            restored: whether the root has just restored an initial state.

        Returns:
            why the ring rolls back to the state that the root has now, the same on all ranks; "" if it does
            not.
        """
        return ""

    def after_sync(self, form: FormRing) -> None:
        """When all members in sync hold the root's state."""

    def take(self, share: StepSlice, since: int) -> None:
        """Take this share of the records of each step from `since` on, and of each evaluation batch."""

    def joined(self, here: RingSlot, message: pb.JoinedRing) -> None:
        """When this member has the state of the ring's step: add to the message for the master."""

    def ring_up(self, here: RingSlot) -> None:
        """Before the first step of the ring."""

    # --- the ring steps

    def between_steps(self, here: RingSlot, vote: Callable[[], np.ndarray]) -> Update | None:
        """Do what is due before the next step, on all ranks alike; changes nothing yet.

        Args:
            vote: returns this rank's control vector, for an all-reduce that this part makes.

        Returns:
            what to add to the state, the same on all ranks; None if nothing is due.
        """
        return None

    def before_step(self, here: RingSlot, batch: Batch | None) -> None:
        """Before the gradients of a step are computed.

        Args:
            batch: this rank's part of the step; None if it has no records.
        """

    def vote(self, here: RingSlot, vector: np.ndarray) -> None:
        """Set fields of this rank's control vector, before the all-reduce that carries it."""

    def summed(self, here: RingSlot, result: StepResult) -> None:
        """When all sums of a step have come back, before it is applied."""

    def changed(self) -> None:
        """After each update of the state, while no other rank can be more than one step ahead."""

    def after(
        self, here: RingSlot, result: StepResult | RoundResult, metrics: Mapping[str, Value] | None
    ) -> None:
        """After a step or an evaluation batch, which is applied unless this member is catching up.

        Args:
            metrics: of an epoch that has ended with this step; None if none has.
        """

    # --- the ring ends

    def leaving(self) -> None:
        """After the ring was left or has broken."""

    def idle(self) -> Sequence[Future[None]]:
        """Return futures that are done when all reads that have begun until now have returned."""
        return ()

    def left(self, message: pb.LeftRing) -> None:
        """Correct the description of the state that this worker holds outside of rings, for the master."""


class StepSource(LoopPart, ABC):
    """Decides which steps this worker makes, and makes them with the other members of its ring.

    There are two: steps by arithmetic (ring_steps.py), and steps that a server leases (leased_steps.py).

    Args:
        batches: the records of the steps.
    """

    def __init__(self, batches: Batches):
        self._batches = batches

    def ready(self, message: pb.Ready) -> None:
        message.layout.CopyFrom(pb.Layout(**asdict(self._batches.layout)))

    def idle(self) -> Sequence[Future[None]]:
        return (self._batches.idle(),)

    @abstractmethod
    def compute(self, here: RingSlot, begin: Callable[[Batch | None], np.ndarray]) -> StepResult | None:
        """Make one or more steps with the other members. If nothing is left to train, only vote.

        Args:
            begin: must be called once, before the all-reduce. It takes this rank's part of the step (None
                without records), and returns this rank's control vector.

        Returns:
            what the members have agreed on; None if this worker has to leave the ring before the all-reduce.

        Raises:
            RingBroken: the all-reduce did not come back here.
        """

    @abstractmethod
    def apply(self, result: StepResult) -> Mapping[str, Value] | None:
        """Add the step to the state.

        Returns:
            the metrics of an epoch that has ended with it; None if no epoch has.
        """
