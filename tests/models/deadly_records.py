# SPDX-License-Identifier: Apache-2.0
"""The counting model on a file with a record that crashes the process that reads it."""

import os
import signal

import numpy as np

import edl
from edl.zoo.counting import RECORDS, feed, model

__all__ = ["data", "feed", "model"]

DEADLY = 200


class File:
    """Returns blocks of consecutive records, as a file does."""

    def __len__(self) -> int:
        return RECORDS

    def read(self, start: int, stop: int) -> tuple[np.ndarray]:
        if start <= DEADLY < stop:
            os.kill(os.getpid(), signal.SIGSEGV)
        return (np.arange(start, stop, dtype=np.int32),)


def data(split: str) -> edl.Reader | None:
    return File() if split == "train" else None
