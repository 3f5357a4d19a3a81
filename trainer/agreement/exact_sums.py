# SPDX-License-Identifier: Apache-2.0
"""Sums of float32 numbers without rounding, and so without an order: each number is divided into words.

A word is a multiple of a fixed quantum, and so is a sum of words. For up to BLOCKS summands, both have at
most the 24 bits of float32, so the sum is exact. Demmel and Nguyen (Fast Reproducible Floating-Point
Summation, 2013) choose the quanta by the data. Here a fixed window is enough: what is below 2^-61 counts as
zero, and no number above 2^80 trains a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

BLOCKS = 8  # of a step, at most so many summands; more workers than these have no records
BITS, WORDS = 20, 7
QUANTA = [2.0 ** (60 - BITS * nth) for nth in range(WORDS)]
LARGEST = QUANTA[0] * 2**BITS


def words(values: Any, rint: Callable[[Any], Any] = np.rint) -> list[Any]:
    """Divide float32 numbers below LARGEST into WORDS arrays of the same shape, which add up to them.

    Args:
        rint: rounds to whole numbers.
    """
    found = []
    for quantum in QUANTA:
        found.append(rint(values * np.float32(1 / quantum)) * np.float32(quantum))
        values = values - found[-1]
    return found
