# SPDX-License-Identifier: Apache-2.0
"""DeepFM of the zoo, whose records lie in memory, and which notes when it takes them.

Each worker appends a line for each of its batches to a file in EDL_BENCH_STAMPS: when, and how many records.
Without records in memory a benchmark would measure how fast a click log is drawn.
"""

import os
import time
from pathlib import Path

import numpy as np

import edl
from edl.zoo import deepfm
from edl.zoo.datasets import clicks

model = deepfm.model


def drawn(split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, ids and labels of all records."""
    reader = clicks.data(split)
    assert reader is not None
    features, clicked = deepfm.feed(reader.read(0, len(reader)))
    return features["numbers"], features["ids"], clicked


def data(split: str) -> edl.Reader | None:
    return edl.arrays(*drawn(split)) if split == "train" else None


def feed(records: tuple[np.ndarray, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    numbers, ids, clicked = records
    stamp(len(ids))
    return {"numbers": numbers, "ids": ids}, clicked


def stamp(count: int) -> None:
    """So many records are taken now."""
    if folder := os.environ.get("EDL_BENCH_STAMPS"):
        with open(Path(folder) / str(os.getpid()), "a", encoding="ascii") as file:
            file.write(f"{time.monotonic()} {count}\n")
