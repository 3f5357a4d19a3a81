# SPDX-License-Identifier: Apache-2.0
"""Placement of rows on parameter servers: ids are hashed to buckets, and buckets belong to servers.

A bucket is a hash of the id, the same for every table. Its server follows from Lamping and Veach's jump
consistent hash ("A Fast, Minimal Memory, Consistent Hash Algorithm", 2014): from n to n + 1 servers one in
n + 1 buckets moves, and only to the new server.
"""

from __future__ import annotations

from functools import cache

import numpy as np

BUCKETS = 1 << 12


def bucket_of(ids: np.ndarray) -> np.ndarray:
    """The bucket of each id, uint16 [n]: the upper bits of SplitMix64's output function.

    Args:
        ids: int64 [n].
    """
    x = ids.astype(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(64 - 12)).astype(np.uint16)


@cache
def owners(servers: int) -> np.ndarray:
    """The server of each bucket, uint16 [BUCKETS]. Read-only.

    Raises:
        ValueError: `servers` is less than 1.
    """
    if servers < 1:
        raise ValueError(f"{servers} servers: expected at least 1")
    found = np.array([_jump(bucket, servers) for bucket in range(BUCKETS)], np.uint16)
    found.setflags(write=False)
    return found


def server_of(ids: np.ndarray, servers: int) -> np.ndarray:
    """The server of each id, uint16 [n]."""
    found: np.ndarray = owners(servers)[bucket_of(ids)]
    return found


def _jump(key: int, servers: int) -> int:
    # Buckets are small numbers: spread them over 64 bits first.
    key = (key + 1) * 0x9E3779B97F4A7C15 & _WORD
    at, following = -1, 0
    while following < servers:
        at = following
        key = (key * 2862933555777941757 + 1) & _WORD
        following = int((at + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return at


_WORD = (1 << 64) - 1
