# SPDX-License-Identifier: Apache-2.0
"""The counting model on a file with bad records: some cannot be read, and one `feed` does not take."""

import numpy as np

import edl
from edl.zoo.counting import RECORDS, model
from edl.zoo.counting import feed as plain_feed

__all__ = ["data", "feed", "model"]

UNREADABLE, UNFIT = (0, 40, 41), 123


class File:
    """Gives blocks of consecutive records, as a file does; no block with a bad one."""

    def __len__(self) -> int:
        return RECORDS

    def read(self, start: int, stop: int) -> tuple[np.ndarray]:
        for record in UNREADABLE:
            if start <= record < stop:
                raise ValueError(f"line {record + 1} has 3 fields, not 4")
        return (np.arange(start, stop, dtype=np.int32),)


def data(split: str) -> edl.Reader | None:
    return File() if split == "train" else None


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    if UNFIT in records[0]:
        raise KeyError("label")
    return plain_feed(records)
