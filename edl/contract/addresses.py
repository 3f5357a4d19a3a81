"""The addresses of a rendezvous as they travel: those at which one member awaits the others are alike but for
a few bytes (a port), so the rest of them is sent once for all.

A ring of a thousand has a million addresses of 136 bytes; so they take some megabytes at the master.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from edl.contract.proto import edl_pb2 as pb


def from_member(scope: str, by_rank: Sequence[bytes]) -> pb.Addresses:
    """What a member says. `by_rank`: for each of the others, all of one length; empty for itself."""
    given = [address for address in by_rank if address]
    alike, backwards = given[0], [address[::-1] for address in given]
    start = _common(min(given), max(given))
    stop = max(len(alike) - _common(min(backwards), max(backwards)), start)
    differ = [address[start:stop] for address in by_rank]
    return pb.Addresses(scope=scope, alike=alike, at=[start], differ=differ)


def to_member(scope: str, alike: bytes, at: Sequence[int], differ: Sequence[bytes]) -> pb.Addresses:
    """What a member is told. `alike`: the members', compressed, as they are the same for all of them."""
    return pb.Addresses(scope=scope, alike=alike, at=at, differ=differ)


def compressed(alike: Sequence[bytes]) -> bytes:
    return zlib.compress(b"".join(alike), 1)


def by_rank(told: pb.Addresses) -> list[bytes]:
    """The addresses that a member is told; its own is of no use."""
    alike = zlib.decompress(told.alike)
    length = len(alike) // len(told.at)
    found = []
    for rank, (start, differ) in enumerate(zip(told.at, told.differ, strict=True)):
        whole = alike[rank * length : (rank + 1) * length]
        found.append(whole[:start] + differ + whole[start + len(differ) :])
    return found


def _common(low: bytes, high: bytes) -> int:
    """How many bytes all begin with, of which these are the first and the last in order."""
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
