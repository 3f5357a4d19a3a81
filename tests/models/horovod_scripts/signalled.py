# SPDX-License-Identifier: Apache-2.0
"""A fault for elastic scripts: the first worker that commits often enough sends itself a signal.

EDL_TEST_SIGNAL is `SIGKILL 10` for the tenth commit of a worker. One worker of a job does it, and training
is slow until that worker has ended, because the ring must change before the script does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import psutil
from horovod.tensorflow.elastic import State


def at_a_commit() -> None:
    """Prepare the fault, if one is asked for."""
    if not (text := os.environ.get("EDL_TEST_SIGNAL", "")):
        return
    name, commits = text.split()
    commit, made = State.commit, 0

    def counted(state: Any) -> None:
        nonlocal made
        made += 1
        if made >= int(commits):
            with contextlib.suppress(FileExistsError), open("signalled", "x") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.kill(os.getpid(), signal.Signals[name])
            with open("signalled") as file:
                if psutil.pid_exists(int(file.read() or os.getpid())):
                    time.sleep(0.5)
        commit(state)

    State.commit = counted
