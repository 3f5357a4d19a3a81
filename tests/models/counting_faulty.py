# SPDX-License-Identifier: Apache-2.0
"""The counting model, with workers that idle, and one that misbehaves, on order (orders.py)."""

import numpy as np
import orders

from edl.zoo.counting import data, model
from edl.zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    orders.obey()
    return plain_feed(records)
