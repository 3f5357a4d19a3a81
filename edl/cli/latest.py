"""The jobs of this machine: which one was started last, and whether its master is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from edl.contract import artifacts
from edl.errors import EdlError


def _pointer() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edl" / "latest"


def remember(output: Path) -> None:
    """Let `edl status` without a directory mean this job."""
    with contextlib.suppress(OSError):  # a convenience: a read-only home must not stop a job
        _pointer().parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(_pointer(), f"{output.resolve()}\n")


def is_orphaned(output: Path) -> bool:
    """Whether the directory holds a job that has not ended, and whose master is gone."""
    if not (output / artifacts.JOURNAL).exists() or (output / artifacts.SUMMARY).exists():
        return False
    try:
        return not psutil.pid_exists(artifacts.read_contact(output).pid)
    except EdlError:
        return True


def find(output: Path | None) -> Path:
    """The output directory that a command is about: `output`, else that of the job started last.

    Raises:
        EdlError: no job has been started yet.
    """
    if output is not None:
        return output
    try:
        return Path(_pointer().read_text(encoding="utf-8").strip())
    except OSError:
        raise EdlError(
            "no job has been started on this machine; start one with `edl run MODEL`, "
            "or give an output directory or --release"
        ) from None
