# SPDX-License-Identifier: Apache-2.0
"""Exchange of addresses between the members of a generation. The core is not involved.

Each member sends one message with the addresses, by rank, at which it listens for each other member. Once all
have sent theirs, each member receives one message with the addresses, by rank, at which the others listen for
it. So a ring of n costs n messages each way. A message has the common part of its addresses only once.
"""

from __future__ import annotations

from edl.contract import addresses
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb


class Rendezvous:
    """The rendezvous of the newest generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[WorkerId, ...] = ()
        self._ranks: dict[WorkerId, int] = {}
        self._said: dict[str, dict[int, pb.Addresses]] = {}  # by scope, and by the rank of the sender

    def open(self, generation: int, members: tuple[WorkerId, ...]) -> None:
        """Start the rendezvous of a new generation, and drop the one before."""
        self.generation, self.members, self._said = generation, members, {}
        self._ranks = {worker: rank for rank, worker in enumerate(members)}

    def hear(self, worker: WorkerId, said: pb.Addresses) -> list[tuple[WorkerId, pb.ToWorker]]:
        """Record the addresses of a member; return the messages to all members after the last one.

        Raises:
            ValueError: the worker is not a member, or the message lacks the address for a member.
        """
        rank, size = self._ranks.get(worker), len(self.members)
        if rank is None or len(said.differ) != size or len(said.at) != 1:
            raise ValueError(f"worker {worker} says {len(said.differ)} addresses in a ring of {size}")
        rows = self._said.setdefault(said.scope, {})
        rows[rank] = said
        if len(rows) < size:
            return []
        said_by = [self._said[said.scope][rank] for rank in range(size)]
        del self._said[said.scope]
        alike, at = addresses.compressed([row.alike for row in said_by]), [row.at[0] for row in said_by]
        columns = zip(*(row.differ for row in said_by), strict=True)
        told = (addresses.to_member(said.scope, alike, at, column) for column in columns)
        return [
            (member, pb.ToWorker(generation=self.generation, addresses=column))
            for member, column in zip(self.members, told, strict=True)
        ]
