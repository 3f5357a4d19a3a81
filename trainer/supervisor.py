# SPDX-License-Identifier: Apache-2.0
"""`python -m edl.trainer.supervisor`: process 1 of a worker's pod. It imports the trainer, and forks workers.

    import ─▶ fork the worker ─▶ wait for its end ─▶ it crashed: fork the next one, at once
                                                     else: end as it did

A process that has imported TensorFlow and run nothing has only one thread. So a fork of it is a worker whose
imports cost nothing, neither at the start nor after a crash. To the master, the next worker is a new worker.
If the master replies that no worker is needed here, this process ends.

This process has further duties, because the pod has no other process for them:

    asked to end   the worker is asked, and no further one is started
    orphans        what a worker leaves behind is killed before the next one starts, and zombies are reaped
    its own death  the kernel kills the worker, because no process would report how it ends
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from edl.contract.exit_codes import WorkerExit
from edl.contract.workers import WORKER_ENVIRONMENT
from edl.exit_announcements import Announcement, announce, announce_to
from edl.signals import to_handle
from edl.trainer.runtime.termination import (
    ASKING,
    PR_SET_PDEATHSIG,
    become_subreaper,
    end_children,
    leave,
    prctl,
)

CRASH_LOOP_SECONDS = 5.0  # a worker that does not live longer has crashed at its start
CRASH_LOOP = 3  # so often in a row, and the pod ends: its master judges what comes next
# Files of the container with a line `oom_kill N`: cgroup v2, and v1.
OOM_KILLS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


@dataclass(frozen=True)
class Ended:
    """The end of a worker's process.

    Args:
        code: the exit code, as in subprocess: a negative number is a signal.
        out_of_memory: whether the kernel has killed a process of this container meanwhile for lack of memory.
    """

    code: int
    out_of_memory: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether a new process may succeed: this one crashed, was killed, or its peers broke its ring."""
        return self.code < 0 or self.code == WorkerExit.PEER_BROKEN

    @property
    def exit_code(self) -> int:
        """The exit code of the container; a signal is encoded as in shells."""
        return self.code if self.code >= 0 else 128 - self.code

    def told(self, place: int) -> dict[str, Any]:
        """The fields of a Predecessor, for the master."""
        if self.out_of_memory and self.code == -signal.SIGKILL:
            return {"place": place, "code": self.exit_code, "why": "OOMKilled"}
        if self.code < 0:
            return {"place": place, "signal": signal.Signals(-self.code).name}
        return {"place": place, "code": self.code}


@dataclass
class Supervisor:
    """The successive worker processes of one place.

    Args:
        work: what a worker's process does; takes the arguments of `edl worker`, returns its exit code.
        place: the worker that the pod was made for.
        clock: monotonic seconds.
    """

    work: Callable[[list[str]], int]
    place: int
    clock: Callable[[], float] = time.monotonic
    worker: int = 0  # its process id, while it lives
    asked: bool = field(default=False, init=False)  # to end

    def run(self) -> int:
        """Run workers until no further one is to be started; returns the exit code of the last one."""
        arguments: list[str] = []
        crashes = 0
        while True:
            began, killed = self.clock(), _killed_for_memory()
            code = self._one(arguments)
            ended = Ended(code, _killed_for_memory() > killed)
            end_children()
            if self.asked or not ended.goes_on:
                announce(ended.exit_code)
                return ended.exit_code
            crashes = crashes + 1 if self.clock() - began < CRASH_LOOP_SECONDS else 0
            if crashes >= CRASH_LOOP:
                print(f"edl supervisor: {crashes} workers crashed as they started; ending", file=sys.stderr)
                announce(ended.exit_code)
                return ended.exit_code
            told = ended.told(self.place)
            print(
                f"edl supervisor: the worker's process has ended ({_words(told)}); a new one is started",
                file=sys.stderr,
                flush=True,
            )
            arguments = ["--predecessor", json.dumps(told)]

    def handle_signals(self) -> None:
        """Pass SIGTERM and SIGINT on to the worker, unless this process was started to ignore them."""
        for number in to_handle(ASKING):
            signal.signal(number, lambda number, _: self.ask(number))

    def ask(self, number: int) -> None:
        """Ask the worker to end, and start no further one."""
        self.asked = True
        if self.worker:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and was reaped a moment ago
                os.kill(self.worker, number)

    def _one(self, arguments: list[str]) -> int:
        """Run one worker, from its start to its end; returns its exit code, as in subprocess."""
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between the fork and the moment at which the worker's process id is known would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        me, announcement = os.getpid(), Announcement()
        self.worker = os.fork()
        if self.worker == 0:
            announce_to(announcement.write)
            self._become(arguments, me)
        announcement.started()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while True:
            pid, status = os.waitpid(-1, 0)  # of others too: an orphan's parent is this process
            if pid == self.worker:
                self.worker = 0
                return announcement.believed(os.waitstatus_to_exitcode(status))

    def _become(self, arguments: list[str], supervisor: int) -> NoReturn:
        code = 1
        try:
            for number in to_handle(ASKING):
                signal.signal(number, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it has died before that was asked for
                leave(WorkerExit.LOST)
            os.setsid()
            asked = signal.sigpending() & ASKING
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # it may end here, and has nothing to lose
            if asked:
                leave(WorkerExit.STOPPED)
            code = self.work(arguments)
        finally:
            leave(code)


def main() -> int:
    """Run workers in this pod, one after the other. Return the exit code."""
    os.environ.update(WORKER_ENVIRONMENT)  # before Keras is imported
    for number in to_handle(ASKING):
        signal.signal(number, lambda *_: os._exit(WorkerExit.STOPPED))
    become_subreaper()
    from edl.trainer import __main__ as worker
    from edl.trainer.start.preimport import import_all

    import_all()
    supervisor = Supervisor(worker.main, int(os.environ["EDL_WORKER_ID"]))
    supervisor.handle_signals()
    return supervisor.run()


def _killed_for_memory() -> int:
    """Return how many processes of this container the kernel has killed for want of memory.

    The number is 0 if it is unknown.
    """
    for path in OOM_KILLS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0


def _words(told: Mapping[str, Any]) -> str:
    return str(told.get("why") or told.get("signal") or f"exit code {told['code']}")


if __name__ == "__main__":
    sys.exit(main())
