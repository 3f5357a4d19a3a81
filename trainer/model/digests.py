# SPDX-License-Identifier: Apache-2.0
"""The digest of a state: equal for states that are equal, bit for bit, and else not, as far as chance goes.

XXH3, as of what travels between members (trainer/ring/transfer.py): it finds bits that have changed by
themselves, as fast as memory can be read. It is no protection against an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash


def digest(parts: Iterable[np.ndarray], told: bytes = b"") -> bytes:
    """The digest of contiguous arrays, in order.

    Args:
        told: what else is in the state.
    """
    found = xxhash.xxh3_128(told)
    for part in parts:
        found.update(part.data)
    return found.digest()


def sha256(parts: Iterable[np.ndarray]) -> str:
    """The SHA-256 of contiguous arrays, in order, by which users compare two jobs."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.data)
    return found.hexdigest()


def drained(parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the parts, and remove each from the list before the next one is read.

    A step has to copy a value that is still referenced before it changes the value.
    """
    parts.reverse()
    while parts:
        yield parts.pop()
