"""The history of a training as files: history.json and history.csv in the output directory.

Promise: a reader sees the old file or the new one, and each has all epochs of the job, whichever worker
writes, and however often the job was interrupted.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from edl.contract import artifacts
from trainer.epochs import columns


def write(output: Path, history: Sequence[Mapping[str, float]]) -> None:
    """
    Raises:
        OSError: the directory cannot be written.
    """
    artifacts.write_whole(output / artifacts.HISTORY, as_json(history) + "\n")
    artifacts.write_whole(output / artifacts.HISTORY_TABLE, as_csv(history))


def as_json(history: Sequence[Mapping[str, float]]) -> str:
    """What `fit` returns as `history.history`; null for what is not finite, which JSON has no number for."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return json.dumps({name: [*map(finite, values)] for name, values in columns(history).items()})


def as_csv(history: Sequence[Mapping[str, float]]) -> str:
    """A line for each epoch, from 0, as Keras' CSVLogger has them."""
    table = columns(history)
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["epoch", *table])
    for epoch in range(len(history)):
        lines.writerow(
            [epoch, *("" if (v := values[epoch]) is None else repr(v) for values in table.values())]
        )
    return file.getvalue()
