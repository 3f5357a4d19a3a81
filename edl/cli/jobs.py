"""The jobs that commands are about: one of `edl run`, by its output directory; or a release in a cluster.

Both answer to the same commands. `release` is imported only where one is named, for it brings along
what talks to Kubernetes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from edl.cli import client
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError


class Phase(StrEnum):
    """What a job is doing, in one word."""

    Starting = "Starting"
    Training = "Training"
    Suspended = "Suspended"
    Waiting = "Waiting"
    Finishing = "Finishing"
    Ending = "Ending"
    Succeeded = "Succeeded"
    Failed = "Failed"
    Stopped = "Stopped"


ENDED = frozenset({Phase.Succeeded, Phase.Failed, Phase.Stopped})


@dataclass(frozen=True)
class Now:
    """A job now.

    Args:
        data: its status, or once it has ended its summary; for programs.
        kept: where that is which it leaves.
        notes: what else there is to say, line by line.
    """

    data: dict[str, Any]
    kept: str
    notes: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.data["phase"] in ENDED


@dataclass(frozen=True)
class Whose:
    """Whose logs are wanted.

    Raises:
        ConfigError: the words mean nobody.
    """

    words: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|master|worker(-\d+)?", self.words):
            raise ConfigError(f"{self.words}: nobody's logs; allowed: all, master, worker, worker-N")

    @property
    def components(self) -> tuple[str, ...]:
        return ("master", "worker") if self.words == "all" else (self.words.partition("-")[0],)

    @property
    def worker(self) -> int | None:
        """The one that is meant, if it is one."""
        number = self.words.partition("-")[2]
        return int(number) if number else None


class Job(Protocol):
    """What all commands ask of a job.

    Raises (every method):
        EdlError: it is not there, cannot be reached, or refuses; the text says which.
    """

    def now(self) -> Now: ...

    def wait(self, so: Callable[[str], bool], seconds: float | None) -> tuple[str, str]:
        """Until something is so of its phase, it has ended, or the time is up: phase and reason then."""

    def logs(self, whose: Whose, tail: int | None, follow: bool, show: Callable[[str], None]) -> None:
        """Show each line of its logs, with who says it; and with `follow` those to come until it ends.

        Args:
            tail: how many of the last lines of each; None: all.
        """

    def scale(self, workers: int) -> str:
        """Ask for so many workers; what has come of it, in words."""

    def stop(self) -> str:
        """End it; what has come of it, in words. One that has ended stays as it is."""


class Local:
    """A job on this machine.

    Args:
        output: its output directory; None: that of the job started last.
    """

    def __init__(self, output: Path | None):
        self._output = client.find(output)

    def now(self) -> Now:
        summary = self._summary()
        return Now(summary if summary is not None else self._client().status(), str(self._output))

    def wait(self, so: Callable[[str], bool], seconds: float | None) -> tuple[str, str]:
        deadline = time.monotonic() + seconds if seconds is not None else None
        last = str(Phase.Starting), "its master has not said anything yet"
        if self._summary() is None:
            for status in self._client().follow(seconds):
                last = status["phase"], status["reason"]
                if so(last[0]):
                    return last
        if (summary := self._summary()) is not None:
            return summary["phase"], summary["reason"]
        if deadline is not None and time.monotonic() >= deadline:
            return last
        raise EdlError(f"{self._output}: the master is gone, and has not said how the job ended")

    def logs(self, whose: Whose, tail: int | None, follow: bool, show: Callable[[str], None]) -> None:
        logs: dict[Path, _Log] = {}

        def read() -> None:
            for path in sorted(self._logs(whose), key=_seniority):
                for line in logs.setdefault(path, _Log(path, tail)).news():
                    show(f"{path.stem}: {line}")

        read()
        if not logs and self._summary() is not None:
            raise EdlError(f"{self._output / artifacts.LOGS}: there is no log of {whose.words}")
        if follow and self._summary() is None:
            for _ in self._client().follow():  # who has something to say also beats
                read()
            read()

    def scale(self, workers: int) -> str:
        return self._going_on().scale(workers)

    def stop(self) -> str:
        if (summary := self._summary()) is not None:
            return f"the job has ended already: {summary['phase']}, {summary['reason']}"
        return self._going_on().stop("stopped by edl stop")

    def _logs(self, whose: Whose) -> Iterator[Path]:
        for component in whose.components:
            name = component if whose.worker is None else f"{component}-{whose.worker}"
            pattern = name if component == "master" or whose.worker is not None else f"{name}-*"
            yield from (self._output / artifacts.LOGS).glob(f"{pattern}.log")

    def _summary(self) -> dict[str, Any] | None:
        """How it has ended, if it has."""
        try:
            return dict(json.loads((self._output / artifacts.SUMMARY).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def _going_on(self) -> client.Client:
        if (summary := self._summary()) is not None:
            raise EdlError(f"{self._output}: the job has ended: {summary['phase']}")
        return self._client()

    def _client(self) -> client.Client:
        return client.Client(artifacts.read_contact(self._output))


def _seniority(path: Path) -> tuple[bool, int]:
    """The master first, then the workers by number."""
    number = path.stem.rpartition("-")[2]
    return path.stem != "master", int(number) if number.isdecimal() else 0


class _Log:
    """A log file that grows."""

    def __init__(self, path: Path, tail: int | None):
        self._file, self._tail, self._rest = open(path, "rb"), tail, b""

    def news(self) -> list[str]:
        """The lines that were finished since the last look."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        if self._tail is not None:
            lines, self._tail = lines[max(len(lines) - self._tail, 0) :], None
        return [line.decode(errors="replace") for line in lines]
