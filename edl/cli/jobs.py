"""What the commands ask of a job, wherever it runs: on this machine (`local`) or in a cluster (`release`)."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edl.contract.phases import ENDED as ENDED
from edl.contract.phases import Phase as Phase
from edl.errors import ConfigError

NO_STATUS = "no status from the master yet"


@dataclass(frozen=True)
class JobSnapshot:
    """A job at one moment.

    Args:
        data: its status, or its summary once it has ended; printed by `--json`.
        kept: where its summary is.
        model: where the trained model is, or will be.
        notes: further lines for people.
    """

    data: dict[str, Any]
    kept: str
    model: str
    notes: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.data["phase"] in ENDED


@dataclass(frozen=True)
class LogSource:
    """Whose logs are wanted: all, master, worker, worker-N, ps or ps-N (parameter servers).

    Raises:
        ConfigError: another name.
    """

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|master|(worker|ps)(-\d+)?", self.name):
            expected = "all, master, worker, worker-N, ps or ps-N"
            raise ConfigError(f"unknown log source {self.name!r} (expected {expected})")

    @property
    def components(self) -> tuple[str, ...]:
        return ("master", "worker", "ps") if self.name == "all" else (self.name.partition("-")[0],)

    @property
    def number(self) -> int | None:
        """Of the one worker or server that is meant; None: all of them."""
        number = self.name.partition("-")[2]
        return int(number) if number else None


def not_stopped(status: Mapping[str, Any], asked: str) -> str:
    """Why a job goes on that was to end with a checkpoint; empty: it has not come to that.

    Args:
        status: the master's.
        asked: the id of the asking.
    """
    answer = status.get("stop") or {}
    if answer.get("id") != asked or not (why := answer.get("failed")):
        return ""
    return f"the job goes on: {why}. (`edl stop --checkpoint --force` ends it all the same)"


class JobHandle(Protocol):
    """What all commands ask of a job.

    Raises (every method):
        EdlError: it does not exist, cannot be reached, or refuses; the text says which.
    """

    def snapshot(self) -> JobSnapshot: ...

    def wait(self, phase: Phase, seconds: float | None) -> tuple[str, str]:
        """Until the job is in that phase, has ended, or the time is up: its phase and the reason then."""

    def logs(self, source: LogSource, tail: int | None, follow: bool) -> Generator[str, None, None]:
        """The lines of its logs, each with its origin; with `follow` also new ones until the job ends.

        Args:
            tail: how many of the last lines of each log; None: all.
        """

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        """Change the number of workers, or of parameter servers; returns the outcome in words."""

    def checkpoint(self) -> str:
        """Have a checkpoint written; returns the outcome in words."""

    def fetch(self, name: str, target: Path) -> str:
        """Copy what was exported in this format; returns the outcome in words.

        Args:
            name: of the format.
            target: the file or directory to make. Nothing lies there.
        """

    def audit(self) -> str:
        """Prove from the journal that each record counted once; returns the verdict in words."""

    def token(self) -> str:
        """The job's token."""

    def authority(self) -> str:
        """The file of who vouches for its certificates; empty: it does not speak TLS."""

    def stop(self) -> str:
        """End it; returns the outcome in words. A job that has ended stays as it is."""

    def stop_with_checkpoint(self, force: bool) -> str:
        """End it once its state is in a checkpoint, and wait for that; returns the outcome in words.

        Args:
            force: end it also if the checkpoint fails; else the job goes on then, and that is an EdlError.
        """
