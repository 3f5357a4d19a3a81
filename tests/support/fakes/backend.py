# SPDX-License-Identifier: Apache-2.0
"""A backend without processes: a test or a simulator says what becomes of each worker.

It keeps the contract of `master.backends.base`, and knows no clock but the one it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from edl.contract.ids import WorkerId
from edl.master.backends.base import Emit
from edl.master.core import effects as ef
from edl.master.core import events as ev

Later: TypeAlias = Callable[[float, Callable[[], None]], object]


@dataclass
class Process:
    """A worker's process, as far as it is one."""

    id: WorkerId
    running: bool = False
    deleted: bool = False


class FakeBackend:
    """Workers that run when `place_seconds` have passed.

    Args:
        emit: takes Seen, Delayed, Gone.
        later: has something done after some seconds.
        place_seconds: from the creation of a worker until it runs.
        end_seconds: from a polite request until it ends; one with no grace ends at once.
    """

    def __init__(self, emit: Emit, later: Later, place_seconds: float = 0.0, end_seconds: float = 0.0):
        self._emit, self._later = emit, later
        self.place_seconds, self.end_seconds = place_seconds, end_seconds
        self.processes: dict[WorkerId, Process] = {}
        self.delay = ""  # why no worker runs for now
        self._closed = False

    async def start(self) -> None:
        pass

    def perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Create(worker):
                process = self.processes[worker] = Process(worker)
                self._soon(self.place_seconds, lambda: self._place(process))
            case ef.Delete(worker, grace) if worker in self.processes:
                process = self.processes[worker]
                process.deleted = True
                wait = 0.0 if not process.running else min(grace, self.end_seconds)
                self._soon(wait, lambda: self._delete(process))

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        self._closed = True

    # --- what becomes of workers

    def exit(self, worker: WorkerId, gone: ev.Gone) -> None:
        """The worker's process ends so."""
        if self.processes.pop(worker, None) is not None and not self._closed:
            self._emit(gone)

    def hold(self, why: str) -> None:
        """No further worker runs, for that reason; "": those that wait run now."""
        self.delay = why
        for process in [p for p in self.processes.values() if not p.running]:
            self._place(process)

    def _place(self, process: Process) -> None:
        if self.processes.get(process.id) is not process or process.running or process.deleted:
            return
        self._emit(ev.Delayed(process.id, self.delay))
        if not self.delay:
            process.running = True
            self._emit(ev.Seen(process.id, f"fake-{process.id}"))

    def _delete(self, process: Process) -> None:
        if process.running:
            self.exit(process.id, ev.Gone(process.id, signal="SIGTERM"))
        else:
            self.exit(process.id, ev.Gone(process.id, free=True, why="it was not started yet"))

    def _soon(self, seconds: float, act: Callable[[], None]) -> None:
        self._later(seconds, lambda: None if self._closed else act())
