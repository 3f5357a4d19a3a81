"""The counting model, with a worker that misbehaves on order.

The order is a file in the directory EDL_FAULTS, named by the worker's process id; it says
`exit` (end by itself with code 0) or `raise` (an error in the user's code). It is obeyed
when the next batch is read.
"""

import os
from pathlib import Path

import numpy as np

from model_zoo.counting import data, model
from model_zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]


class Ordered(Exception):
    """An error of the user's code."""


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    order = Path(os.environ.get("EDL_FAULTS", ".")) / str(os.getpid())
    if order.exists():
        what = order.read_text()
        order.unlink()
        if what == "exit":
            os._exit(0)
        raise Ordered("the storm said so")
    return plain_feed(records)
