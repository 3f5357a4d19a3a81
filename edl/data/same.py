# SPDX-License-Identifier: Apache-2.0
"""Comparison of two readers by their records."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.nest import leaves


def same_records(one: Reader, other: Reader) -> bool:
    """Whether two readers hold the same records, as far as their number and the first and last ones show.

    The last ones are read only if the first ones are equal, so different data cost one read each.
    """
    if one is other:
        return True
    count = len(one)
    if count != len(other) or not count:
        return False
    return all(_equal(one.read(at, at + 1), other.read(at, at + 1)) for at in dict.fromkeys((0, count - 1)))


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    if ours.keys() != theirs.keys():
        return False
    return all(_equal_arrays(np.asarray(array), np.asarray(theirs[path])) for path, array in ours.items())


def _equal_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
