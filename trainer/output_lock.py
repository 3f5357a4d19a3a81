"""One run at a time has an output directory: the workers of two would overwrite each other's model.

The workers of a run hold one shared lock on a file that names the run. It goes with their processes. On a
claim that several nodes mount it holds as far as its file system has locks (NFS and CephFS have); where there
are none, nothing is locked, and nothing fails.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from edl.errors import EdlError

NAME = ".run"
LOOK_SECONDS = 0.5
MOST_SECONDS = 60.0  # the workers of a release's last run may still be ending


def hold(output: Path, run_id: str, seconds: float = MOST_SECONDS) -> int | None:
    """Hold the directory for a run, together with its other workers, as long as this process lives.

    Returns:
        The descriptor that holds the lock; None: there are no locks here.

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
            # To go from one kind of lock to the other is to let go for a moment: read who is named then.
            holder = ""
            if _try(file, fcntl.LOCK_SH):
                holder = os.pread(file, 1000, 0).decode(errors="replace")
                if holder == run_id:
                    return file
                fcntl.flock(file, fcntl.LOCK_UN)
            if time.monotonic() >= deadline:
                break
            time.sleep(LOOK_SECONDS)  # there is no event for who cannot wait for ever
        os.close(file)
    except OSError:
        return None  # it cannot be written, or has no locks: that is told when the model is to be saved there
    raise EdlError(
        f"{output}: the workers of another run ({holder or 'unknown'}) still use this output directory; "
        "give each job an output directory, claim or host path of its own"
    )


def _try(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
