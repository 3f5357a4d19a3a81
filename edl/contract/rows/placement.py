# SPDX-License-Identifier: Apache-2.0
"""Shard assignment: which parameter servers exist, and which of them hold which bucket of rows (`buckets`).

With one replica, a bucket is on its owner. With two, it is also on the next server: reads go to the first of
the two that is not out, and both apply updates. A server is *out* if it was down while the ring had to
continue: its rows are of an earlier step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS, bucket_of, owners

NO_SERVER = np.uint16(0xFFFF)


@dataclass(frozen=True, slots=True, order=True)
class ShardAssignment:
    """The servers of a job, and the buckets on each.

    Args:
        servers: number of servers; 0: unknown.
        replicas: servers per bucket.
        out: servers whose rows are outdated.
    """

    servers: int = 0
    replicas: int = 1
    out: tuple[int, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.ShardAssignment) -> ShardAssignment:
        """Read an assignment from a message, in which 0 replicas mean 1."""
        return cls(message.servers, max(message.replicas, 1), tuple(message.out))

    def to_proto(self) -> pb.ShardAssignment:
        """Write the assignment into a message."""
        return pb.ShardAssignment(servers=self.servers, replicas=self.replicas, out=self.out)

    @property
    def members(self) -> tuple[int, ...]:
        """The servers that hold current rows."""
        return tuple(index for index in range(self.servers) if index not in self.out)

    @property
    def coordinator(self) -> int:
        """The server that leases steps in asynchronous SGD (mode=ps)."""
        return self.members[0]

    @property
    def copies(self) -> int:
        """Replicas of each bucket if no server is out."""
        return min(self.replicas, self.servers)

    @property
    def is_whole(self) -> bool:
        """Whether each bucket is on at least one server that is not out."""
        return self.servers > 0 and not (self.first == NO_SERVER).any()

    @property
    def first(self) -> np.ndarray:
        """The server that serves each bucket, uint16 [BUCKETS]; `NO_SERVER`: all its servers are out."""
        found: np.ndarray = _places(self)[0]
        return found

    @property
    def second(self) -> np.ndarray:
        """The server of each bucket's second replica, uint16 [BUCKETS]; `NO_SERVER`: none."""
        found: np.ndarray = _places(self)[1]
        return found

    def held(self, index: int) -> np.ndarray:
        """The buckets on a server, bool [BUCKETS]."""
        return _held(self, index)

    def has(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Whether each of these ids is on a server, bool [n]."""
        found: np.ndarray = self.held(index)[bucket_of(ids)]
        return found

    def serves(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Whether a server serves each of these ids, bool [n]. Each id is served by one server."""
        found: np.ndarray = (self.first == index)[bucket_of(ids)]
        return found

    def without(self, away: tuple[int, ...]) -> ShardAssignment:
        """The assignment with these servers out, too; indices of other servers are ignored."""
        out = {*self.out, *(index for index in away if index < self.servers)}
        return ShardAssignment(self.servers, self.replicas, tuple(sorted(out)))

    def __str__(self) -> str:
        return f"{self.servers} server{'s' if self.servers != 1 else ''}" + (
            f", {', '.join(map(str, self.out))} out" if self.out else ""
        )


def moves(of: ShardAssignment, to: ShardAssignment, source: int, target: int) -> np.ndarray:
    """The buckets that server `target` copies from `source`, bool [BUCKETS], if `of` changes to `to`."""
    new: np.ndarray = to.held(target) & ~of.held(target) & (of.first == source)
    return new


@cache
def _copies(servers: int, replicas: int) -> np.ndarray:
    """The servers of each bucket, the owner first, uint16 [copies, BUCKETS]."""
    owner = owners(servers).astype(np.int64)
    copies = min(replicas, servers)
    return np.stack([(owner + copy) % servers for copy in range(copies)]).astype(np.uint16)


@cache
def _places(of: ShardAssignment) -> np.ndarray:
    """The servers of `_copies` that are not out, uint16 [2, BUCKETS]; `NO_SERVER` for missing ones."""
    found = np.full((2, BUCKETS), NO_SERVER, np.uint16)
    if not of.servers:
        return found
    for copy in _copies(of.servers, of.replicas):
        there = ~np.isin(copy, of.out)
        to_first = there & (found[0] == NO_SERVER)
        to_second = there & ~to_first & (found[1] == NO_SERVER)
        found[0, to_first], found[1, to_second] = copy[to_first], copy[to_second]
    found.setflags(write=False)
    return found


@cache
def _held(of: ShardAssignment, index: int) -> np.ndarray:
    places = _places(of)
    found: np.ndarray = (places == index).any(axis=0)
    found.setflags(write=False)
    return found
