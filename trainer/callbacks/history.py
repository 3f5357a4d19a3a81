# SPDX-License-Identifier: Apache-2.0
"""The history of a training as files: history.json and history.csv in the output directory.

Promise: a reader sees the old file or the new one, and each has all epochs of the job, whichever worker
writes, and however often the job was interrupted.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edl.contract import artifacts
from edl.trainer.agreement.epochs import columns
from edl.trainer.agreement.metric_values import Value, mapped
from edl.trainer.runtime.log import log

PAUSE_SECONDS = 2.0  # an epoch may take but a moment

MAX_TOLD = 1_000  # epochs of the history in the summary, which must fit into a ConfigMap


class HistoryFiles:
    """The files of one worker. Called again and again: they follow, and a disk that fails stops nothing.

    Args:
        output: the directory to write them to; None to write nothing.
    """

    def __init__(self, output: Path | None, clock: Callable[[], float] = time.monotonic):
        self._output, self._clock = output, clock
        self._written = 0  # epochs
        self._at = clock() - PAUSE_SECONDS

    def __call__(self, history: Sequence[Mapping[str, Value]]) -> None:
        if len(history) != self._written and self._clock() >= self._at + PAUSE_SECONDS:
            self.end(history)

    def end(self, history: Sequence[Mapping[str, Value]]) -> None:
        """Write the final history."""
        self._written, self._at = len(history), self._clock()
        if self._output is None or not history:
            return
        try:
            write(self._output, history)
        except OSError as error:
            log.warning(f"the history of the training could not be written: {error}")


def write(output: Path, history: Sequence[Mapping[str, Value]]) -> None:
    """Write the history's files.

    Raises:
        OSError: the directory cannot be written.
    """
    artifacts.write_whole(output / artifacts.HISTORY, as_json(history) + "\n")
    artifacts.write_whole(output / artifacts.HISTORY_TABLE, as_csv(history))


def as_json(history: Sequence[Mapping[str, Value]]) -> str:
    """The value of `history.history` in `fit`, as JSON; null for numbers that are not finite."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    found = {
        name: [None if v is None else mapped(v, finite) for v in values]
        for name, values in columns(history).items()
    }
    return json.dumps(found)


def as_csv(history: Sequence[Mapping[str, Value]]) -> str:
    """A line for each epoch, from 0, as Keras' CSVLogger has them."""
    table = columns(history)
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["epoch", *table])
    for epoch in range(len(history)):
        lines.writerow(
            [epoch, *("" if (v := values[epoch]) is None else _cell(v) for values in table.values())]
        )
    return file.getvalue()


def _cell(value: Value) -> str:
    return f'"[{", ".join(map(str, value))}]"' if isinstance(value, list) else repr(value)
