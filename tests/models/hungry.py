"""The counting model, whose feed takes all the memory there is once the file /tmp/eat exists."""

from pathlib import Path

import numpy as np

from model_zoo.counting import data, model
from model_zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    eaten = []
    while Path("/tmp/eat").exists():
        eaten.append(np.ones(1 << 24))
    return plain_feed(records)
