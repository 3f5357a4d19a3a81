# SPDX-License-Identifier: Apache-2.0
"""The backend of `edl master`: it prints which workers are needed, and the user starts them.

It does not observe their processes. The master knows from a worker's stream that it runs, so `Seen` is not
emitted. `Gone` means that the job has released the worker; its exit is not awaited.
"""

from __future__ import annotations

import sys

from edl.contract.ids import WorkerId
from edl.master.backends.base import Emit
from edl.master.core import effects as ef
from edl.master.core import events as ev


class External:
    """Prints the command that starts each worker that is needed.

    Args:
        emit: called with Gone.
        address: the master's address, for the workers; empty: print nothing, as programs start the workers.
    """

    def __init__(self, emit: Emit, address: str):
        self._emit, self._address = emit, address
        self._gone: set[WorkerId] = set()

    async def start(self) -> None:
        pass

    def perform(self, effect: ef.ForBackend) -> None:
        match effect:
            case ef.Create() if self._address:
                print(f"start a worker: edl worker --master {self._address}", file=sys.stderr, flush=True)
            case ef.Delete(worker) if worker not in self._gone:
                self._gone.add(worker)
                self._emit(ev.Gone(worker, free=True, why="its exit is not observed"))

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        pass
