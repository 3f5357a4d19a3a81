# SPDX-License-Identifier: Apache-2.0
"""A counting model whose code is wrong: it raises when its third batch is read, on every worker."""

import numpy as np

from edl.zoo.counting import data, model

__all__ = ["data", "feed", "model"]

batches = 0


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    global batches
    batches += 1
    return records[0], np.full(len(records[0]), 1 // (batches != 3))
