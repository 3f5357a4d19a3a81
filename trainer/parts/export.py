# SPDX-License-Identifier: Apache-2.0
"""The end of a job on the worker that saves its result, as a part of the loop."""

from __future__ import annotations

from collections.abc import Callable

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.parts.part import Part
from edl.trainer.ps_client.interfaces import TrainedOn
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.orders import Export, WriteCheckpoint
from edl.trainer.session.state import Session


class FinalModel(Part):
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
