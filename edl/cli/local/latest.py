# SPDX-License-Identifier: Apache-2.0
"""The jobs of this machine: the default job of commands without a directory, and the running jobs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from enum import Enum
from pathlib import Path

import psutil

from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.formatting import how_many, plain

RUNS = Path("runs")  # the folder in which `edl run` creates output directories
MAX_NAMED = 8  # files in a line
VALUES = "values.json"  # in an output directory: the job's values, complete
MAX_LISTED = 10


def _known_jobs() -> Path:
    """Return the folder that holds a file for each job of this user; the file holds its output directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edl" / "jobs"


def remember(output: Path) -> None:
    """Record a job that has begun, so that commands in other folders find it."""
    path = str(output.resolve())
    # A convenience: a job also runs without a home directory.
    with contextlib.suppress(OSError, RuntimeError):
        _known_jobs().mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(_note_of(path), f"{path}\n")


def _note_of(path: str) -> Path:
    return _known_jobs() / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def is_orphaned(output: Path) -> bool:
    """Whether the directory holds a job that has not ended, and whose master is gone."""
    if not (output / artifacts.JOURNAL).exists() or (output / artifacts.SUMMARY).exists():
        return False
    try:
        return not psutil.pid_exists(artifacts.read_contact(output).pid)
    except EdlError:
        return True


class Scope(Enum):
    """Where a command without a job directory looks for its job, as the help says it."""

    MACHINE = "the newest under runs/, else that of your only running job"  # commands that only read
    HERE = "the newest under runs/"  # commands that change a job
    NOWHERE = ""  # commands that break or remove a job: the directory must be given


def find(output: Path | None, scope: Scope = Scope.MACHINE) -> Path:
    """Return the job directory that a command is about.

    Without `output` it is the newest job under runs/ in the current folder, else this user's only running
    job, as far as `scope` allows. The directory is printed on standard error.

    Raises:
        ConfigError: `output` is None and no job is found; the message has the command for possible ones.
    """
    if output is not None:
        return output
    here = _newest_first(_folders(RUNS)) if scope is not Scope.NOWHERE else []
    if here:
        found, why = here[0], f"the newest under {RUNS}"
    else:
        running = [job for job in known() if _is_running(job)]
        if scope is not Scope.MACHINE or len(running) != 1:
            raise ConfigError(_candidates(running, scope))
        found, why = running[0], "your only running job"
    announce(found, f" ({why})")
    return found


def announce(output: Path, why: str = "") -> None:
    """Name a job on standard error."""
    print(f"edl: job {plain(str(output))}{why}", file=sys.stderr, flush=True)


def known() -> list[Path]:
    """Return the output directories of this user's jobs on this machine, the newest first."""
    here = {job.resolve() for job in _folders(RUNS)}
    return _newest_first([*here, *(job for job in _remembered() if job not in here)])


def forget(output: Path) -> None:
    """Remove the record of a job whose directory was removed."""
    with contextlib.suppress(OSError, RuntimeError):
        _note_of(str(output.resolve())).unlink(missing_ok=True)


def _candidates(running: list[Path], scope: Scope) -> str:
    if not (all_known := known()):
        return (
            "no job has been started on this machine; start one with `edl run MODEL`, "
            "or give a job directory or --release"
        )
    where = "no job directory given" if scope is Scope.NOWHERE else f"there is no job under {RUNS} here"
    if running:
        return f"{where}; {how_many(len(running), 'running job')} of yours{commands(running)}"
    last = f"; the last ones{commands(all_known)}" if scope is Scope.MACHINE else ""
    return f"{where}, and no job of yours runs{last}"


def commands(jobs: list[Path]) -> str:
    """Return lines with the command that the user has entered, once for each of these jobs."""
    lines = [plain(shlex.join(["edl", *sys.argv[1:], str(job)])) for job in jobs[:MAX_LISTED]]
    if len(jobs) > MAX_LISTED:
        lines.append(f"and {len(jobs) - MAX_LISTED} more")
    return "\n  ".join([":", *lines]) if jobs else ""


def _is_running(output: Path) -> bool:
    begun = (output / artifacts.JOURNAL).exists() and not (output / artifacts.SUMMARY).exists()
    return begun and not is_orphaned(output)


def _remembered() -> list[Path]:
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for note in _known_jobs().iterdir():
            with contextlib.suppress(OSError, ValueError):
                job = Path(note.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n"))
                if (job / VALUES).exists():
                    found.append(job)
                elif not job.exists():
                    note.unlink()
    return found


def _folders(parent: Path) -> list[Path]:
    try:
        return [folder for folder in parent.iterdir() if (folder / VALUES).exists()]
    except OSError:
        return []


def _newest_first(jobs: list[Path]) -> list[Path]:
    """Sort jobs by their start, the newest first."""
    times = {}
    for job in jobs:
        with contextlib.suppress(OSError):
            times[job] = (job / VALUES).stat().st_mtime_ns
    return sorted(times, key=lambda job: times[job], reverse=True)


def others(output: Path) -> str:
    """Name the files in an output directory that edl itself does not write: a script has saved them."""
    own = {path.name for path in artifacts.written(output)} | {VALUES}
    names = sorted(p.name for p in output.iterdir() if p.name not in own and not p.name.startswith("."))
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return plain(", ".join(names[:MAX_NAMED]) + more)
