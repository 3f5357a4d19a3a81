"""How the members of a generation learn where they await each other, without the core: it decides nothing.

Each member says once, by rank, where it awaits each of the others; when all have, each is told once, by rank,
where the others await it. So a ring of n costs n messages each way, with what differs between its sockets.
"""

from __future__ import annotations

from edl.contract import addresses
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb


class Rendezvous:
    """Of the newest generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[WorkerId, ...] = ()
        self._ranks: dict[WorkerId, int] = {}
        self._said: dict[str, dict[int, pb.Addresses]] = {}  # by scope, and by the rank of who said it

    def open(self, generation: int, members: tuple[WorkerId, ...]) -> None:
        """From now on only this generation is spoken of."""
        self.generation, self.members, self._said = generation, members, {}
        self._ranks = {worker: rank for rank, worker in enumerate(members)}

    def hear(self, worker: WorkerId, said: pb.Addresses) -> list[tuple[WorkerId, pb.ToWorker]]:
        """A member awaits the others there. What the members are told, once all have said it.

        Raises:
            ValueError: it is no member, or does not say an address for each of them.
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
