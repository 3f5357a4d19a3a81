# SPDX-License-Identifier: Apache-2.0
"""A second copy of the state, in memory that outlives this process, as a part of the loop."""

from __future__ import annotations

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.checkpoint.in_memory_snapshot import InMemorySnapshot
from edl.trainer.parts.part import Part
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.state import State


class MemoryCopies(Part):
    """Copies each state to the memory, and restores the copy of an earlier worker in the same pod."""

    def __init__(self, memory: InMemorySnapshot, state: State, session: Session):
        self._memory, self._state, self._session = memory, state, session

    def ready(self, message: pb.Ready) -> None:
        if (found := self._memory.newest()) is not None:
            self._state.restore_copy(*found)

    def entering(self, form: FormRing) -> None:
        if not self._state.has_state:  # its copy is as invalid, and must not come back in a later process
            self._memory.forget()

    def changed(self) -> None:
        # The copy is made before the next step, whose all-reduce then proves that all members have both
        # copies of this step. The batches of an unfinished evaluation are not worth a copy of all weights.
        if self._memory.full or self._state.receiving or self._state.ledger.totals:
            return
        self._memory.put(self._state.ledger, self._state.learner.parts())
        if self._memory.full:
            self._session.warn(f"no second copy of the state is kept in memory: {self._memory.full}")
