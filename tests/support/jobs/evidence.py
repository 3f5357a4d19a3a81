# SPDX-License-Identifier: Apache-2.0
"""Evidence against a job: weights that did not count each record once, and exits that only a crash causes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import h5py
import numpy as np

CRASHES = {"SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}


def check_weights(model: Path, records: int, epochs: int) -> str:
    """Describe the first error in the counts of a saved counting model; "" if all counts are right.

    A vector of a different length must have counted all records in each of its elements (counting_large.py).
    """
    vectors = [a for a in saved_weights(model) if a.ndim == 1]
    counters = [a for a in vectors if a.shape == (max(records, 1),)]
    if not counters:
        return "the model has no counts"
    for counts in counters:
        off = np.flatnonzero(counts[:records] != epochs)
        if len(off):
            return f"record {off[0]} counted {counts[off[0]]:g} times, not {epochs}; {len(off)} are wrong"
    total = records * epochs
    for elements in (a for a in vectors if a.dtype == np.float32 and len(a) not in (1, max(records, 1))):
        off = np.flatnonzero(elements != total)
        if len(off):
            return f"element {off[0]} counted {elements[off[0]]:g} records, not {total}; {len(off)} are wrong"
    return ""


def saved_weights(model: Path) -> list[np.ndarray]:
    """All weights of the layers of a saved model, whose classes need not be importable here."""
    found: list[np.ndarray] = []

    def collect(_: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(item[()])

    with (
        zipfile.ZipFile(model) as archive,
        archive.open("model.weights.h5") as weights,
        h5py.File(weights) as h5,
    ):
        h5["layers"].visititems(collect)
    return found
