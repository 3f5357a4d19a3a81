# SPDX-License-Identifier: Apache-2.0
"""`edl master`: where the master's process begins. Wiring only: which backend, which server, which signals.

Exit codes: 0 Succeeded; 1 the job ended otherwise; 2 it could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edl import full_disk
from edl.config.address import Address
from edl.contract import artifacts, hangs, vital
from edl.contract.exit_codes import MasterExit
from edl.contract.gpus import visible_gpus, workers_per_gpu
from edl.contract.ids import RunId
from edl.contract.own_modules import module_command
from edl.contract.workers import WORKER_ENVIRONMENT, script_environment, worker_environment
from edl.errors import EdlError
from edl.formatting import plain
from edl.log import log_at
from edl.master.backends.base import Backend
from edl.master.backends.external import External
from edl.master.backends.gpus import Gpus
from edl.master.backends.launchers import ForkServer, Launcher, Spawn
from edl.master.backends.processes import Processes
from edl.master.journal import journal
from edl.master.loop import Master
from edl.master.parameter_servers.base import NoServers, ParameterServers
from edl.master.parameter_servers.deferred import DeferredServers
from edl.master.parameter_servers.processes import Plan, ServerProcesses
from edl.master.service import serve, token_for
from edl.master.spec import JobSpec
from edl.report.at_end import write_report
from edl.signals import to_handle


def main(argv: list[str] | None = None) -> int:
    """Run the master of one job until the job has ended. Return the exit code: 0 if it has succeeded."""
    parser = argparse.ArgumentParser(prog="edl master", description=__doc__)
    parser.add_argument("--values", type=Path, help="the job's merged values, as JSON")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument(
        "--salvage", type=Path, help="where the model is saved when --output cannot be written"
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--attached",
        default="",
        metavar="COMMAND",
        help="end the job when standard input ends, which this command keeps open",
    )
    parser.add_argument("--metrics", default="[::]:8501", metavar="HOST:PORT", help="of --backend kubernetes")
    parser.add_argument("--backend", choices=("processes", "external", "kubernetes"), default="processes")
    args = parser.parse_args(argv)
    full_disk.outlive()
    vital.end_with_threads()
    _collect_seldom()
    try:
        Address.parse(args.listen, "--listen")
        if args.backend == "kubernetes":
            Address.parse(args.metrics, "--metrics")
            log_at("info")
            return asyncio.run(_watched(_kubernetes(args.output, args.listen, args.metrics)))
        if args.values is None:
            parser.error("--values is required with this --backend")
        spec = JobSpec.parse(json.loads(args.values.read_text(encoding="utf-8")))
        log_at(spec.config.log_level)
        if args.backend == "external":
            job = _by_hand(spec, args.output, args.listen, args.salvage, args.attached)
        else:
            job = _processes(spec, args.output, args.listen, args.salvage, args.attached)
        code = asyncio.run(_watched(job))
        if not args.attached and (told := write_report(args.output)):  # else `edl run` writes it
            print(f"edl master: {plain(told)}", file=sys.stderr)
        return code
    except (EdlError, OSError, RuntimeError) as error:
        print(f"edl master: {plain(str(error))}", file=sys.stderr)
        return MasterExit.NOT_STARTED


async def _watched(job: Coroutine[Any, Any, int]) -> int:
    """Run a master, and end this process if its event loop hangs, for example in a write to a mount."""
    hangs.end_with_hangs("the master")
    return await job


async def _processes(spec: JobSpec, output: Path, listen: str, salvage: Path | None, attached: str) -> int:
    master, token = Master(spec, RunId(secrets.token_hex(8))), token_for(output)
    _on_signals(partial(_stop, master))
    if attached:
        _on_end_of_input(lambda: _stop(master, f"`{attached}` was ended"))
    backend = processes(master, output, token)
    await serve(
        master,
        output,
        listen,
        token,
        backend,
        workers_stay=False,
        salvage=salvage,
        servers=servers_of(master, output, listen, token),
    )
    return MasterExit.SUCCEEDED if master.succeeded else MasterExit.NOT_SUCCEEDED


async def _by_hand(spec: JobSpec, output: Path, listen: str, salvage: Path | None, attached: str) -> int:
    known = journal.unfinished(output, spec)  # if its master was killed, this one continues the job
    run_id, adopted = known if known is not None else (RunId(secrets.token_hex(8)), None)
    if adopted is not None:
        since = adopted.active_seconds + journal.silent_seconds(output)
        adopted = replace(adopted, active_seconds=since)
    master = Master(spec, run_id, adopted=adopted)
    _on_signals(partial(_stop, master))
    if attached:
        _on_end_of_input(lambda: _stop(master, f"rank 0 of `{attached}` was ended"))
    token = token_for(output)
    await serve(
        master,
        output,
        listen,
        token,
        lambda address: External(master.emit, "" if attached else address),
        workers_stay=not attached,  # no other master replaces one that ends with its parent process
        salvage=salvage,
        servers=servers_of(master, output, listen, token),
    )
    return MasterExit.SUCCEEDED if master.succeeded else MasterExit.NOT_SUCCEEDED


def _stop(master: Master, why: str) -> None:
    """End the job: with its state in a checkpoint, if it writes checkpoints."""
    master.stop(why, checkpoint=bool(master.spec.config.checkpoint.dir), force=True)


async def _kubernetes(output: Path, listen: str, metrics: str) -> int:
    from edl.master.cluster.runs import ReleaseMaster  # with lightkube, which only an image for clusters has

    release = ReleaseMaster(output, listen, metrics)
    _on_signals(lambda _: release.leave())
    await release.run()
    return MasterExit.SUCCEEDED


def processes(
    master: Master,
    output: Path,
    token: str,
    fork_server: Callable[[Sequence[str], Mapping[str, str]], Launcher] | None = None,
) -> Callable[[str], Backend]:
    """Return a factory that creates the process backend for the master's address.

    Args:
        fork_server: creates the launcher of local.startMethod=fork from the workers' arguments and
            environment; None to start a fork server for this job.
    """

    def backend(address: str) -> Backend:
        environment = {
            **os.environ,
            **worker_environment(os.environ),
            "PYTHONUNBUFFERED": "1",
            "EDL_TOKEN": token,
            "EDL_RUN_ID": master.run_id,
        }
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        config = master.spec.config
        if config.own_loop:
            environment |= script_environment(os.environ, config.own_loop, config.local.threads)
        arguments = ["--master", address]
        launcher: Launcher = Spawn([*module_command("edl.trainer"), *arguments], environment)
        if config.local.start_method == "fork":
            make = fork_server or partial(ForkServer, module_command("edl.trainer.forkserver"))
            launcher = make(arguments, environment)
        asked = config.local.gpus_per_worker
        gpus = Gpus(visible_gpus(os.environ), workers_per_gpu(asked))
        return Processes(master.emit, launcher, output / artifacts.LOGS, gpus)

    return backend


def servers_of(master: Master, output: Path, listen: str, token: str) -> ParameterServers:
    """Create the parameter servers of a job on this machine. They listen on the master's host."""
    make = partial(_server_processes, master, output, listen, token)
    return make() if master.spec.config.is_decided else DeferredServers(master.emit, make)


def _server_processes(master: Master, output: Path, listen: str, token: str) -> ParameterServers:
    config = master.spec.config
    if not config.servers:
        return NoServers()
    folder, logs = (output / artifacts.SERVERS).resolve(), (output / artifacts.LOGS).resolve()
    host = listen.rpartition(":")[0]
    plan = Plan(
        config.servers,
        master.run_id,
        folder,
        logs,
        host,
        config.ps.memory_mebibytes << 20,
        config.checkpoint.dir,
        config.ps.log,
    )
    environment = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    listen_timeout = config.elastic.startup_timeout_seconds
    return ServerProcesses(master.emit, plan, token, environment=environment, listen_timeout=listen_timeout)


def _collect_seldom() -> None:
    """Run Python's garbage collector less often than by default, and exclude the objects of imports.

    Reference counting frees nearly all objects of a master. With 300 workers that come and go, collection
    took 8 % of its time.
    """
    gc.freeze()
    gc.set_threshold(20_000)


def _on_signals(act: Callable[[str], object]) -> None:
    """Call `act` with the reason, once a signal asks this process to end. `edl run` sends it Ctrl-C, too."""
    loop = asyncio.get_running_loop()
    for number, why in ((signal.SIGTERM, "the master got SIGTERM"), (signal.SIGINT, "interrupted by Ctrl-C")):
        if number in to_handle((number,)):
            loop.add_signal_handler(number, act, why)


def _on_end_of_input(act: Callable[[], object]) -> None:
    """Call `act` when standard input ends.

    It is a pipe whose other end only the parent process holds, so it ends with the parent, even if that is
    killed.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            act()

    loop.add_reader(0, read)


if __name__ == "__main__":
    sys.exit(main())
