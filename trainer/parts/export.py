# SPDX-License-Identifier: Apache-2.0
"""The end of a job on the worker that saves its result, as a part of the loop."""

from __future__ import annotations

from collections.abc import Callable

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.parts.part import LoopPart
from edl.trainer.ps_client.interfaces import TrainedOn
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.orders import Export, WriteCheckpoint
from edl.trainer.session.state import Session
from edl.trainer.state import State


class FinalModel(LoopPart):
    """Saves the final model when the master orders it.

    Args:
        export: saves the model, and reports the result to the master. It raises RingBroken if servers have
            lost rows of the model.
    """

    def __init__(self, session: Session, export: Callable[[], None]):
        self._session, self._export = session, export

    def carry_out(self, order: Export | WriteCheckpoint) -> None:
        """Save the final model.

        If servers have lost rows of it, report `RowsLost`; the master then forms a ring that rolls back to a
        checkpoint.
        """
        if not isinstance(order, Export):
            return
        try:
            self._export()
        except RingBroken as error:
            if self._session.stopped or self._session.ended:
                return
            trained_on = isinstance(error, TrainedOn)
            self._session.say(rows_lost=pb.RowsLost(why=str(error), trained_on=trained_on))


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
