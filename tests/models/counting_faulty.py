# SPDX-License-Identifier: Apache-2.0
"""The counting model, with workers that idle, and one that misbehaves, on order (obeying.py)."""

import numpy as np
from obeying import Ordered, ordered  # a worker finds what lies beside the model's file

from edl.zoo.counting import data, model
from edl.zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    if ordered() == "raise":
        raise Ordered("the storm said so")
    return plain_feed(records)
