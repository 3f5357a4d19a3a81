# SPDX-License-Identifier: Apache-2.0
"""The master of a job whose workers only talk, with its output directory. For `benchmarks.observe`.

    python -m benchmarks.talked OUTPUT WORKERS

It prints the address of the master. A line of standard input with a worker's number ends that worker, which
the job then replaces.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks import master as masters
from edl.config import values
from edl.contract.ids import RunId, WorkerId
from edl.log import log_at
from edl.master.backends.base import Emit
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.loop import Master
from edl.master.service import serve
from edl.master.spec import JobSpec


class Talking:
    """A backend whose workers are talkers.

    Args:
        address: of the master.
        emit: hears what becomes of the workers.
        workers: their number at the beginning.
    """

    def __init__(self, address: str, emit: Emit, workers: int):
        self._port, self._emit, self._first = int(address.rpartition(":")[2]), emit, workers
        self._open = AsyncExitStack()

    async def start(self) -> None:
        self._processes = await self._open.enter_async_context(masters.talkers(self._port, self._first))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        self._killing = asyncio.create_task(self._kill(reader))

    def perform(self, effect: ef.ForBackend) -> None:
        if isinstance(effect, ef.Create):
            self._emit(ev.Seen(effect.worker, f"edl-worker-{effect.worker}"))
            if effect.worker >= self._first:
                self._order(effect.worker, f"+{effect.worker}")

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        self._killing.cancel()
        await self._open.aclose()

    async def _kill(self, orders: asyncio.StreamReader) -> None:
        while line := await orders.readline():
            worker = WorkerId(int(line))
            self._order(worker, f"{worker}")
            self._emit(ev.Gone(worker, signal="SIGKILL"))

    def _order(self, worker: WorkerId, line: str) -> None:
        """Send an order to the process that has this worker."""
        processes = self._processes
        per = -(-self._first // len(processes))
        pipe = processes[worker // per if worker < self._first else worker % len(processes)].stdin
        assert pipe is not None
        pipe.write(f"{line}\n")
        pipe.flush()


async def main(output: Path, workers: int) -> None:
    given = values.merge(
        masters.a_spec(workers), {"elastic": {"joinDelaySeconds": 1.0, "maxFailures": 10_000}}
    )
    (output / "values.json").write_text(json.dumps(given))
    master = Master(JobSpec.parse(given), RunId("bench"))
    await serve(
        master,
        output,
        "127.0.0.1:0",
        "token",
        lambda address: Talking(address, master.emit, workers),
        workers_stay=False,
    )


if __name__ == "__main__":
    log_at("error")
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
