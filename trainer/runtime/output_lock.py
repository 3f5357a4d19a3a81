# SPDX-License-Identifier: Apache-2.0
"""A lock on the output directory: one run uses it at a time, and no run overwrites another run's results.

The workers of a run hold one shared lock on a file that names the run. The lock ends with their processes. On
a claim that several nodes mount, it works if the file system supports locks (NFS and CephFS do). Without
locks, nothing is locked, and nothing fails.

Several runs may use a directory in turn: those of a release, or of releases that share a claim. The first run
writes into the directory itself. A run that finds results of a different run there writes into its own
subdirectory (`results_of`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from edl.contract import artifacts
from edl.errors import EdlError

NAME = ".run"
OWNER = ".results-of"  # holds the id of the run whose results are in the directory itself
PER_RUN = "EDL_RESULTS_PER_RUN"  # in the environment of a release's workers
RESULTS = (
    "model.weights.h5",  # of edl before 0.2.0
    *artifacts.FORMATS.values(),
    artifacts.VARIABLES,
    artifacts.EXPORTS,
    artifacts.HISTORY,
)
LOOK_SECONDS = 0.5
MAX_SECONDS = 60.0  # the workers of a release's last run may still be ending


def hold(output: Path, run_id: str, seconds: float = MAX_SECONDS) -> int | None:
    """Hold the directory for a run, together with its other workers, as long as this process lives.

    Returns:
        The descriptor that holds the lock; None if the file system has no locks.

    Raises:
        EdlError: the workers of another run hold it, and have not let go within `seconds`.
    """
    deadline = time.monotonic() + seconds
    try:
        file = os.open(output / NAME, os.O_RDWR | os.O_CREAT, 0o664)
        while True:
            if _try(file, fcntl.LOCK_EX):
                os.ftruncate(file, 0)
                os.pwrite(file, run_id.encode(), 0)
            # Changing the kind of lock releases it for a moment: read the holder's name then.
            holder = ""
            if _try(file, fcntl.LOCK_SH):
                holder = os.pread(file, 1000, 0).decode(errors="replace")
                if holder == run_id:
                    return file
                fcntl.flock(file, fcntl.LOCK_UN)
            if time.monotonic() >= deadline:
                break
            time.sleep(LOOK_SECONDS)  # a lock with a time limit has no event to wait for
        os.close(file)
    except OSError:
        return None  # not writable, or without locks: saving the model there will report the error
    raise EdlError(
        f"{output}: the workers of another run ({holder or 'unknown'}) still use this output directory; "
        "give each job an output directory, claim or host path of its own"
    )


def results_of(output: Path, run_id: str) -> Path:
    """The directory for the results of a run: `output`, or in it `run-<id>` if it has results of another run.

    All workers of the run get the same answer, at any time. To be called while the run holds the lock.
    """
    own = output / f"run-{run_id}"
    if own.is_dir():
        return own
    try:
        owner = (output / OWNER).read_text(encoding="utf-8")
    except (OSError, ValueError):  # none has written its id: results that are there are of an older version
        owner = ""
    if owner == run_id:
        return output
    if any((output / name).exists() for name in RESULTS):
        with contextlib.suppress(OSError):  # no room: reported when the model is to be saved there
            own.mkdir()
        return own
    with contextlib.suppress(OSError):
        artifacts.write_whole(output / OWNER, run_id)
    return output


def _try(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
