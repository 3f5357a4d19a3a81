"""Which parameter servers there are, and which of them has which bucket of rows (`buckets`).

With one copy, a bucket is on its owner. With two, it is also on the server after that one: rows are asked of
the first of the two that is not out, and learned by both. A server is *out* when it was away while the ring
had to go on: what it has is of an earlier step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS, bucket_of, owners

NOBODY = np.uint16(0xFFFF)


@dataclass(frozen=True, slots=True, order=True)
class Arrangement:
    """
    Args:
        servers: how many there are; 0: nobody has said so.
        replicas: on how many of them each bucket is.
        out: of these, those that have nothing that counts.
    """

    servers: int = 0
    replicas: int = 1
    out: tuple[int, ...] = ()

    @classmethod
    def of(cls, told: pb.Arrangement) -> Arrangement:
        return cls(told.servers, max(told.replicas, 1), tuple(told.out))

    def told(self) -> pb.Arrangement:
        return pb.Arrangement(servers=self.servers, replicas=self.replicas, out=self.out)

    @property
    def members(self) -> tuple[int, ...]:
        """The servers that have rows."""
        return tuple(index for index in range(self.servers) if index not in self.out)

    @property
    def coordinator(self) -> int:
        """The server that hands out steps, where they come in any order (mode=ps)."""
        return self.members[0]

    @property
    def copies(self) -> int:
        """Of each bucket, if no server is out."""
        return min(self.replicas, self.servers)

    @property
    def is_whole(self) -> bool:
        """Whether each bucket is somewhere."""
        return self.servers > 0 and not (self.first == NOBODY).any()

    @property
    def first(self) -> np.ndarray:
        """Whom to ask for a bucket, uint16 [BUCKETS]; `NOBODY`: all that had it are out."""
        found: np.ndarray = _places(self)[0]
        return found

    @property
    def second(self) -> np.ndarray:
        """Who has it beside that one, uint16 [BUCKETS]; `NOBODY`: nobody has."""
        found: np.ndarray = _places(self)[1]
        return found

    def held(self, index: int) -> np.ndarray:
        """The buckets that a server has, bool [BUCKETS]."""
        return _held(self, index)

    def has(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Which of these ids a server has, bool [n]."""
        found: np.ndarray = self.held(index)[bucket_of(ids)]
        return found

    def serves(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Which of these ids it is asked for, bool [n]: each id is one server's."""
        found: np.ndarray = (self.first == index)[bucket_of(ids)]
        return found

    def without(self, away: tuple[int, ...]) -> Arrangement:
        """With these out, too: those of them that are its servers."""
        out = {*self.out, *(index for index in away if index < self.servers)}
        return Arrangement(self.servers, self.replicas, tuple(sorted(out)))

    def __str__(self) -> str:
        return f"{self.servers} server{'s' if self.servers != 1 else ''}" + (
            f", {', '.join(map(str, self.out))} out" if self.out else ""
        )


def moves(of: Arrangement, to: Arrangement, source: int, target: int) -> np.ndarray:
    """The buckets that a server takes from another one, bool [BUCKETS], from one arrangement to another."""
    new: np.ndarray = to.held(target) & ~of.held(target) & (of.first == source)
    return new


@cache
def _copies(servers: int, replicas: int) -> np.ndarray:
    """The servers of each bucket, the one that is asked first, uint16 [copies, BUCKETS]."""
    owner = owners(servers).astype(np.int64)
    copies = min(replicas, servers)
    return np.stack([(owner + copy) % servers for copy in range(copies)]).astype(np.uint16)


@cache
def _places(of: Arrangement) -> np.ndarray:
    """The same of those that are not out; `NOBODY` where there is none, uint16 [2, BUCKETS]."""
    found = np.full((2, BUCKETS), NOBODY, np.uint16)
    if not of.servers:
        return found
    for copy in _copies(of.servers, of.replicas):
        there = ~np.isin(copy, of.out)
        to_first = there & (found[0] == NOBODY)
        to_second = there & ~to_first & (found[1] == NOBODY)
        found[0, to_first], found[1, to_second] = copy[to_first], copy[to_second]
    found.setflags(write=False)
    return found


@cache
def _held(of: Arrangement, index: int) -> np.ndarray:
    places = _places(of)
    found: np.ndarray = (places == index).any(axis=0)
    found.setflags(write=False)
    return found
