# SPDX-License-Identifier: Apache-2.0
"""The lines of a job's script, shown as they come: those of rank 0, or of all workers with a prefix.

Workers write into their logs, so nothing waits for a slow terminal but the thread that prints here. If a
script prints more than a terminal can show, the rest is counted and stays in the log.

Rank 0 changes when its worker is lost. Before the first ring, the lines are those of the first worker; after
the last one, those of the worker that saves.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from edl.formatting import plain

LOOK_SECONDS = 0.2  # between two looks at the logs
BURST, PER_LOOK = 400, 20  # lines at once, and lines that are then shown with each look
PIECE = 1 << 18  # bytes of a log that are read at a time; more between two looks is left out
NOTE_LOOKS = 25  # with so many looks between them, lines that are left out are reported
LATE_LOOKS = 5  # a worker may have become rank 0 so many looks before the status says so
# Lines that edl itself writes into a worker's log; those of other loggers have a level after the time.
OURS = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z (?!(DEBUG|INFO|WARNING|ERROR|CRITICAL) )|edl (worker|supervisor)\b.*: |"
    r"SIG\w+: leaving at the next step boundary$"
)

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ScriptLines:
    """Shows the lines of a script while the context is open.

    Args:
        logs: the directory of the workers' logs.
        show: prints a line; the thread ends if it raises OSError.
        everyone: whether the lines of all workers are shown.
        closed: called if a line cannot be printed.
    """

    def __init__(
        self,
        logs: Path,
        show: Callable[[str], None],
        everyone: bool,
        closed: Callable[[], None] = lambda: None,
    ):
        self._logs, self._show, self._everyone, self._closed = logs, show, everyone, closed
        self._speaker = -1  # the worker whose lines are shown; -1: none is known
        self._tails: dict[int, _Tail] = {}
        self._budget, self._left_out, self._looks = BURST, 0, 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lines of the script", daemon=True)

    def __enter__(self) -> ScriptLines:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what has been written meanwhile, and end."""
        self._ending.set()
        self._thread.join()

    def follow(self, statuses: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass the statuses of the job on, and learn from them whose lines are to be shown."""
        for status in statuses:
            ranks = {w["rank"]: w["id"] for w in status["workers"]}
            found = ranks.get(0, status.get("exporter"))
            if found is None and self._speaker < 0:
                found = min((w["id"] for w in status["workers"]), default=None)
            if found is not None:
                self._speaker = found
            yield status

    def look(self) -> None:
        """Show the lines that were written since the last look."""
        self._looks += 1
        self._budget = min(self._budget + PER_LOOK, BURST)
        for path in self._logs.glob("worker-*.log"):
            number = path.stem.partition("-")[2]
            if number.isdecimal() and int(number) not in self._tails:
                self._tails[int(number)] = _Tail(path)
        speaker = self._speaker
        for worker, tail in sorted(self._tails.items()):
            if worker != speaker and not self._everyone:
                tail.pass_over()
                continue
            prefix = f"[worker {worker}] " if worker != speaker else ""
            for line in tail.news():
                self._print(prefix, line)
            self._left_out, tail.gaps = self._left_out + tail.gaps, 0
        if self._left_out and (self._looks % NOTE_LOOKS == 0 or self._ending.is_set()):
            self._show(f"... at least {self._left_out:,} more lines are in {self._logs}")
            self._left_out = 0

    def _print(self, prefix: str, line: str) -> None:
        if OURS.match(line):
            return
        if self._budget <= 0:
            self._left_out += 1
            return
        self._budget -= 1
        line = COLOUR.sub("", line).rstrip("\r")
        self._show(prefix + plain(line.rpartition("\r")[2]))  # a bar that is redrawn: its last state

    def _run(self) -> None:
        try:
            while not self._ending.wait(LOOK_SECONDS):
                self.look()
            self.look()
        except OSError:  # the terminal is closed
            self._closed()


class _Tail:
    """The end of a growing log."""

    def __init__(self, path: Path):
        self._path, self._at, self._rest, self._within_line = path, 0, b"", False
        self._sizes: deque[int] = deque([0], maxlen=LATE_LOOKS)  # at the last looks
        self.gaps = 0  # how often a part of the log was too long to be read

    def pass_over(self) -> None:
        """Leave out what was written, but for the last moments."""
        self._sizes.append(self._path.stat().st_size)
        self._at, self._rest = self._sizes[0], b""
        self._within_line = self._at > 0

    def news(self) -> list[str]:
        """The complete lines since the last call."""
        self._sizes.clear()
        with open(self._path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end - self._at > PIECE:
                self.gaps += 1
                self._at, self._rest, self._within_line = end - PIECE, b"", True
            file.seek(self._at - self._within_line)
            read = file.read(end - self._at + self._within_line)
        self._at = end
        if self._within_line:  # leave out what is left of this line: nothing after a newline
            _, newline, read = read.partition(b"\n")
            self._within_line = not newline
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[-PIECE:]
        return [line.decode(errors="replace") for line in lines]
