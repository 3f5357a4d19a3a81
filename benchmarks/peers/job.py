# SPDX-License-Identifier: Apache-2.0
"""The job that each peer trains, and what its workers write down. It needs NumPy only.

985,000 weights (25 million with BENCH_WIDTH=4960), a batch of 192 records in order, SGD, one thread. After
each completed step a worker appends a line to $BENCH_DIR/steps.PID: `monotonic-seconds step workers
first-record count`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

WIDTH = int(os.environ.get("BENCH_WIDTH", "955"))
SIZES = (64, WIDTH, WIDTH, 10)
RECORDS, BATCH = 19_200, 192
RATE = 0.01
WORKERS = int(os.environ.get("BENCH_WORKERS", "3"))
PLAIN = bool(os.environ.get("BENCH_PLAIN"))  # without what makes the job survive
RECORD_SECONDS = float(os.environ.get("BENCH_RECORD_SECONDS", "0"))  # of sleep, as work of each record

_rng = np.random.default_rng(1)
X = _rng.random((RECORDS, SIZES[0]), np.float32)
Y = _rng.integers(0, SIZES[-1], RECORDS)
_log = None


def share(step: int, rank: int, size: int) -> np.ndarray:
    """The numbers of the records of one of `size` workers in a step, counted from the first of the job."""
    return np.array_split(np.arange(step * BATCH, (step + 1) * BATCH), size)[rank]


def batch(step: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The records of one of `size` workers in a step, after the time that their work takes."""
    at = share(step, rank, size) % RECORDS
    work(len(at))
    return X[at], Y[at]


def work(records: int) -> None:
    if RECORD_SECONDS:
        time.sleep(RECORD_SECONDS * records)


def done(step: int, size: int, records: np.ndarray) -> None:
    """Write down that this worker has completed a step, counted from 0."""
    global _log
    if _log is None:
        _log = open(Path(os.environ["BENCH_DIR"]) / f"steps.{os.getpid()}", "a", buffering=1)
    _log.write(f"{time.monotonic()} {step} {size} {records[0]} {len(records)}\n")
