# SPDX-License-Identifier: Apache-2.0
"""A worker that idles or misbehaves on order.

Orders are files in the directory EDL_FAULTS, and are obeyed when the next batch is read. While
`idle` is there, each batch takes long: a test has all the time it needs to do something to the
job, and none is lost afterwards. A file named by a worker's process id says `exit` (end by itself
with code 0), `raise` (an error in the user's code), `sleep` (return a minute later) or `hang` (never return).
"""

import os
import threading
import time
from pathlib import Path

IDLE_SECONDS, SLEEP_SECONDS = 0.3, 60.0


class Ordered(Exception):
    """An error of the user's code."""


def obey() -> None:
    orders = Path(os.environ.get("EDL_FAULTS", "."))
    if (orders / "idle").exists():
        time.sleep(IDLE_SECONDS)
    order = orders / str(os.getpid())
    if order.exists():
        what = order.read_text()
        order.unlink()
        if what == "exit":
            os._exit(0)
        if what == "hang":
            threading.Event().wait()
        if what == "sleep":
            time.sleep(SLEEP_SECONDS)
            return
        raise Ordered("the storm said so")
