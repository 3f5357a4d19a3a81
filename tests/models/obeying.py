# SPDX-License-Identifier: Apache-2.0
"""Orders to a job's workers, as files in the directory EDL_FAULTS, obeyed when the next batch is read.

While `idle` is there, each batch takes long: a test has all the time it needs to do something to the job,
and none is lost afterwards. A file named by a worker's process id says `exit` (end by itself with code 0),
`raise` (an error in the user's code), `sleep` (return a minute later) or `hang` (never return).
"""

import os
import threading
import time
from pathlib import Path

IDLE_SECONDS, SLEEP_SECONDS = 0.3, 60.0


class Ordered(Exception):
    """An error of the user's code."""


def ordered() -> str:
    """Do what this worker was ordered to do; returns the order, of which the caller carries out `raise`."""
    orders = Path(os.environ.get("EDL_FAULTS", "."))
    if (orders / "idle").exists():
        time.sleep(IDLE_SECONDS)
    order = orders / str(os.getpid())
    if not order.exists():
        return ""
    what = order.read_text()
    order.unlink()
    if what == "exit":
        os._exit(0)
    if what == "hang":
        threading.Event().wait()
    if what == "sleep":
        time.sleep(SLEEP_SECONDS)
    return what


def obey() -> None:
    """Do what this worker was ordered to do."""
    if ordered() == "raise":
        raise Ordered("the storm said so")
