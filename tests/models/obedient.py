"""The counting model, which does as files bid it: it idles until one says go, it eats all memory for another.

So a test has all the time it needs to do something to the job, and none is lost afterwards.
"""

import time
from pathlib import Path

import numpy as np

from model_zoo.counting import data, model
from model_zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]

GO = Path("/var/lib/edl/go")  # in the output directory: for all workers at once
EAT = Path("/tmp/eat")  # in one worker's container
IDLE_SECONDS = 0.5  # in each step


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    eaten = []
    if EAT.exists():
        EAT.unlink()  # the next worker may live in the same container
        while True:
            eaten.append(np.ones(1 << 24))
    if not GO.exists():
        time.sleep(IDLE_SECONDS)
    return plain_feed(records)
