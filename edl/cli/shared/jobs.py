# SPDX-License-Identifier: Apache-2.0
"""The interface of jobs for the commands, for jobs on this machine (`local`) and in a cluster (`release`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edl.contract.phases import ENDED as ENDED
from edl.contract.phases import Phase as Phase
from edl.errors import ConfigError
from edl.formatting import how_many

if TYPE_CHECKING:
    from edl.cli.shared.storm import Fault, Kind
    from edl.journal.audit import Elsewhere

NO_STATUS = "no status from the master yet"
DISCARD = "`edl stop --discard` ends the job at once"


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a job at one moment.

    Args:
        data: its status, or its summary once it has ended.
        kept: location of its summary.
        model: present or future location of the trained model.
        notes: additional lines of the output for people.
        given: the model as the user has given it; "": unknown.
        age: seconds since the master wrote the status; 0: it is the present one, or final.
    """

    data: dict[str, Any]
    kept: str
    model: str
    notes: tuple[str, ...] = ()
    given: str = ""
    age: float = 0.0

    @property
    def ended(self) -> bool:
        """True once the job has succeeded, failed or been stopped, so that its summary is final."""
        return self.data["phase"] in ENDED


@dataclass(frozen=True)
class Journal:
    """Where the journal of a job can be read.

    Args:
        directory: a directory on this machine with the journal, and with the summary once the job has ended.
        name: the job's name for people: its directory, or the release.
        told: the job's summary, or its status while it runs.
        elsewhere: access to exported files and checkpoints that are not in the directory.
    """

    directory: Path
    name: str
    told: dict[str, Any]
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True)
class LogSource:
    """A selection of logs: all, master, worker, worker-N, ps or ps-N (parameter servers).

    Raises:
        ConfigError: the name is not one of these.
    """

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|master|(worker|ps)(-\d+)?", self.name):
            expected = "all, master, worker, worker-N, ps or ps-N"
            raise ConfigError(f"unknown log source {self.name!r} (expected {expected})")

    @property
    def components(self) -> tuple[str, ...]:
        """The components whose logs are selected, as the chart labels their pods."""
        return ("master", "worker", "ps") if self.name == "all" else (self.name.partition("-")[0],)

    @property
    def number(self) -> int | None:
        """The number of the selected worker or server; None: all of them."""
        number = self.name.partition("-")[2]
        return int(number) if number else None


def stop_failure(status: Mapping[str, Any], asked: str) -> str:
    """Return why a job continues although it should stop with a checkpoint; empty if it may still stop.

    Args:
        status: the status from the master.
        asked: id of the request.
    """
    answer = status.get("stop") or {}
    if answer.get("id") != asked or not (why := answer.get("failed")):
        return ""
    return f"the job goes on: {why}. (`edl stop --checkpoint --force` ends it all the same)"


def unsaved(status: Mapping[str, Any]) -> str:
    """Describe the training that is lost if the job stops now; empty if the job writes checkpoints.

    Args:
        status: the status from the master. A job without a trained step has nothing to lose.
    """
    task = status.get("task") or {}
    done = int(task.get("step") or 0)
    if task.get("kind", "train") != "train" or not done or status.get("checkpoint") is not None:
        return ""
    return (
        f"the job writes no checkpoints (checkpoint.dir is empty), so its {how_many(done, 'trained step')} "
        f"of {task['steps']:,} would be lost"
    )


class Faults(Protocol):
    """The faults that can be inflicted on the workers and servers of a running job.

    Args:
        kinds: those that are possible where the job runs.
    """

    kinds: tuple[Kind, ...]

    def inflict(self, fault: Fault, victim: Mapping[str, Any]) -> bool:
        """Inflict a fault on a worker or a server of the status. False: it is already gone.

        Raises:
            EdlError: this victim must not be hit, or Kubernetes refuses.
        """


class JobHandle(Protocol):
    """The operations of the commands on a job.

    Raises (every method):
        EdlError: the job does not exist, cannot be reached, or refuses; the message says which.
    """

    def snapshot(self) -> JobSnapshot:
        """Return the job's status as it is now, and the place of its model."""
        ...

    def announce(self) -> None:
        """Name the job on standard error, before a command changes it."""

    def unsaved(self) -> str:
        """Describe the training that is lost if the job stops now; empty if nothing is."""

    def wait(self, phase: Phase, seconds: float | None) -> tuple[str, str]:
        """Wait until the job is in that phase, has ended, or the time is up. Return its phase and reason."""

    def until(self, reached: Callable[[dict[str, Any]], bool], seconds: float | None) -> bool:
        """Wait until the job's status meets a condition. False: the time is up, or the job has ended.

        Args:
            reached: called with the present status and with each later one.
            seconds: None: without limit.
        """

    def faults(self) -> Faults:
        """Prepare faults for this running job, which must be the user's own."""

    def logs(self, source: LogSource, tail: int | None, follow: bool) -> Generator[str, None, None]:
        """Yield the lines of its logs, each with its origin; with `follow`, also new ones until the job ends.

        Args:
            tail: number of last lines of each log; None: all.
        """

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        """Change the number of workers, or of parameter servers; return the outcome as text."""

    def checkpoint(self) -> str:
        """Make the job write a checkpoint; return the outcome as text."""

    def fetch(self, name: str, target: Path) -> str:
        """Copy the model that was exported in a format; return the outcome as text.

        Args:
            name: name of the format.
            target: the file or directory to create; it must not exist.
        """

    def audit(self) -> str:
        """Prove from the journal that each record counted once; return the verdict as text."""

    def journal(self) -> AbstractContextManager[Journal]:
        """Give access to the job's journal while the context is open."""

    def token(self) -> str:
        """The job's token."""

    def authority(self) -> str:
        """Path of the CA certificate for the job's certificates; empty: no TLS."""

    def stop(self, discard: bool, seconds: float) -> str:
        """Stop the job; return the outcome as text. A job that has ended is not changed.

        Args:
            discard: stop it at once. Otherwise, if it writes checkpoints, it writes one first; a release is
                awaited, because its state would be lost with `helm uninstall`.
            seconds: how long to wait for that.

        Raises:
            TimeoutError: as `stop_with_checkpoint`.
        """

    def stop_with_checkpoint(self, force: bool, seconds: float) -> str:
        """Stop the job once its state is in a checkpoint, and wait for that; return the outcome as text.

        Args:
            force: stop the job even if the checkpoint fails. Otherwise the job continues in that case, and an
                EdlError is raised.
            seconds: how long to wait.

        Raises:
            TimeoutError: the checkpoint is not complete; its text is the phase and reason. The request stays.
        """


def in_short(report: dict[str, Any]) -> dict[str, Any]:
    """Reduce a status or a summary to phase, reason, progress and number of workers."""
    task, workers = report.get("task") or {}, report.get("workers") or []
    done, steps = task.get("step", task.get("steps_done")) or 0, task.get("steps")
    if task.get("kind", "train") != "train":
        progress = str(task["kind"])
    else:
        progress = f"step {done:,} of {steps:,}" if steps else report.get("reason", "")
    return {
        "phase": str(report["phase"]),
        "reason": str(report.get("reason", "")),
        "progress": progress,
        "workers": sum(worker["state"] == "member" for worker in workers),
    }
