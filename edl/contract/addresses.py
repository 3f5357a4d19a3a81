# SPDX-License-Identifier: Apache-2.0
"""Compact encoding of rendezvous addresses.

The addresses at which one member awaits the others differ in a few bytes only (a port). The bytes that they
share are sent once. A ring of 1000 members has a million addresses of 136 bytes; encoded, they take a few
megabytes at the master.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from edl.contract.proto import edl_pb2 as pb


def from_member(scope: str, by_rank: Sequence[bytes]) -> pb.Addresses:
    """Encode the addresses that a member sends.

    Args:
        by_rank: one address for each other member, all of one length; empty for the member itself.
    """
    given = [address for address in by_rank if address]
    alike, backwards = given[0], [address[::-1] for address in given]
    start = _common(min(given), max(given))
    stop = max(len(alike) - _common(min(backwards), max(backwards)), start)
    differ = [address[start:stop] for address in by_rank]
    return pb.Addresses(scope=scope, alike=alike, at=[start], differ=differ)


def to_member(scope: str, alike: bytes, at: Sequence[int], differ: Sequence[bytes]) -> pb.Addresses:
    """Encode the addresses that are sent to a member.

    Args:
        alike: the shared bytes of all members, compressed; the same in every message.
    """
    return pb.Addresses(scope=scope, alike=alike, at=at, differ=differ)


def compressed(alike: Sequence[bytes]) -> bytes:
    """Compress addresses for one message: zlib's fastest level, because addresses are alike."""
    return zlib.compress(b"".join(alike), 1)


def by_rank(told: pb.Addresses) -> list[bytes]:
    """Decode the addresses that a member receives. The entry for its own rank is meaningless."""
    alike = zlib.decompress(told.alike)
    length = len(alike) // len(told.at)
    found = []
    for rank, (start, differ) in enumerate(zip(told.at, told.differ, strict=True)):
        whole = alike[rank * length : (rank + 1) * length]
        found.append(whole[:start] + differ + whole[start + len(differ) :])
    return found


def _common(low: bytes, high: bytes) -> int:
    """The length of the common prefix of a sorted list, given its first and last elements."""
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
