# SPDX-License-Identifier: Apache-2.0
"""Faults of `edl chaos` for processes of a job on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from edl.cli.local import pause
from edl.cli.shared.storm import Fault, Kind
from edl.contract import artifacts
from edl.errors import EdlError

# The signal of each action; None: SIGSTOP, and SIGCONT after some seconds.
ACTIONS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "pause": None}


class ProcessFaults:
    """Inflicts faults on the processes that the master of a job has started.

    Args:
        output: the job's output directory.

    Raises:
        EdlError: the job does not run, or belongs to a different user.
    """

    kinds: tuple[Kind, ...] = tuple(Kind)

    def __init__(self, output: Path):
        self._output = output
        try:
            self._master = psutil.Process(artifacts.read_contact(output).pid)
            user, name = self._master.uids().real, self._master.username()
        except psutil.Error as error:
            raise EdlError(f"{output}: the job's master does not run on this machine") from error
        if user != os.getuid():
            raise EdlError(f"{output}: the job belongs to {name}; faults are only for jobs of your own")

    def inflict(self, fault: Fault, victim: Mapping[str, Any]) -> bool:
        """Send the signal, and wait for the end of a pause. False: the process has already ended.

        Raises:
            EdlError: the process was not started by the job's master.
        """
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process = psutil.Process(int(victim["handle"]))
            if self._master not in process.parents():
                raise EdlError(
                    f"{self._output}: process {process.pid} was not started by the job's master; expected a "
                    "job of `edl run`"
                )
            strike(process, {Kind.stop: "pause", Kind.term: "term"}.get(fault.kind, "kill"), fault.seconds)
            return True
        return False


def strike(process: psutil.Process, action: str, seconds: float = 0.0) -> None:
    """Do an action of ACTIONS to a process; `pause` lasts so many seconds.

    A paused process also goes on if this process is interrupted or killed.

    Raises:
        ProcessLookupError, NoSuchProcess: the process has ended.
    """
    if (number := ACTIONS[action]) is not None:
        process.send_signal(number)
        return
    handle = os.pidfd_open(process.pid)
    try:
        if not process.is_running():  # the number belongs to a new process
            raise psutil.NoSuchProcess(process.pid)
        words = [sys.executable, "-I", str(Path(pause.__file__)), str(handle), str(seconds)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[handle], start_new_session=True
        ) as guard:
            guard.wait()
    finally:
        os.close(handle)
