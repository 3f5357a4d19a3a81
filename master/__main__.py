"""`edl master`: where the master's process begins. Wiring only: which backend, which server, which signals.

Exit codes: 0 Succeeded; 1 the job ended otherwise; 2 it could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edl.contract import artifacts
from edl.contract.exit_codes import MasterExit
from edl.contract.ids import RunId
from edl.errors import EdlError
from master import journal
from master.backends.base import Backend
from master.backends.external import External
from master.backends.processes import ForkServer, Launcher, Processes, Spawn
from master.log import log_at
from master.loop import Master
from master.service import serve, token_for
from master.spec import JobSpec


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl master", description=__doc__)
    parser.add_argument("--values", type=Path, help="the job's merged values, as JSON")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--metrics", default="[::]:8501", metavar="HOST:PORT", help="of --backend kubernetes")
    parser.add_argument("--backend", choices=("processes", "external", "kubernetes"), default="processes")
    args = parser.parse_args(argv)
    try:
        if args.backend == "kubernetes":
            log_at("info")
            return asyncio.run(_kubernetes(args.output, args.listen, args.metrics))
        if args.values is None:
            parser.error("--values is required with this --backend")
        spec = JobSpec.parse(json.loads(args.values.read_text(encoding="utf-8")))
        log_at(spec.config.log_level)
        start = _by_hand if args.backend == "external" else _processes
        return asyncio.run(start(spec, args.output, args.listen))
    except (EdlError, OSError, RuntimeError) as error:
        print(f"edl master: {error}", file=sys.stderr)
        return MasterExit.NOT_STARTED


async def _processes(spec: JobSpec, output: Path, listen: str) -> int:
    master, token = Master(spec, RunId(secrets.token_hex(8))), token_for(output)
    _on_signals(lambda name: master.stop(f"the master got {name}"))
    await serve(master, output, listen, token, processes(master, output, token), workers_stay=False)
    return MasterExit.SUCCEEDED if master.succeeded else MasterExit.NOT_SUCCEEDED


async def _by_hand(spec: JobSpec, output: Path, listen: str) -> int:
    known = journal.unfinished(output, spec)  # in a directory whose master was killed, this one goes on
    run_id, adopted = known if known is not None else (RunId(secrets.token_hex(8)), None)
    master = Master(spec, run_id, adopted=adopted)
    _on_signals(lambda name: master.stop(f"the master got {name}"))
    await serve(master, output, listen, token_for(output), partial(External, master.emit))
    return MasterExit.SUCCEEDED if master.succeeded else MasterExit.NOT_SUCCEEDED


async def _kubernetes(output: Path, listen: str, metrics: str) -> int:
    from master.in_cluster import ReleaseMaster  # with lightkube, which only an image for clusters has

    release = ReleaseMaster(output, listen, metrics)
    _on_signals(lambda _: release.leave())
    await release.run()
    return MasterExit.SUCCEEDED


def processes(master: Master, output: Path, token: str) -> Callable[[str], Backend]:
    """The backend of a master that workers reach at an address: processes of this machine."""

    def backend(address: str) -> Backend:
        environment = {
            **os.environ, "PYTHONUNBUFFERED": "1", "EDL_TOKEN": token, "EDL_RUN_ID": master.run_id,
        }  # fmt: skip
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        arguments = ["--master", address]
        launcher: Launcher = Spawn([sys.executable, "-m", "trainer", *arguments], environment)
        if master.spec.config.local.start_method == "fork":
            launcher = ForkServer([sys.executable, "-m", "trainer.forkserver"], arguments, environment)
        return Processes(master.emit, launcher, output / artifacts.LOGS)

    return backend


def _on_signals(act: Callable[[str], object]) -> None:
    """Have `act` called with the name of the signal that asks this process to end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act, number.name)


if __name__ == "__main__":
    sys.exit(main())
