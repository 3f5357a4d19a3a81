# SPDX-License-Identifier: Apache-2.0
"""`python -m edl.ps`: a parameter server's process. Wiring only: flags, signals, the listening address.

Exit codes: 0, the server was stopped (SIGTERM, SIGINT; with --attached, the end of standard input), and its
log, if it writes one, is complete; 1, a thread has died, or hangs; 2, it could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog

from edl import full_disk
from edl.contract import hangs, vital
from edl.contract.tokens import Tokens
from edl.errors import EdlError
from edl.formatting import plain
from edl.log import log_at
from edl.net.listener import Listener
from edl.net.tls import certificate_for
from edl.signals import to_handle

ALIVE_SECONDS = 1.0  # between two touches of the alive file
GRACE_SECONDS = 2.0  # for running calls at shutdown


def main(argv: list[str] | None = None) -> int:
    """Run one parameter server until it is asked to end. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edl.ps", description=__doc__)
    parser.add_argument("--index", type=int, default=0, help="which server this is, from 0")
    parser.add_argument("--servers", type=int, default=0, help="their number; default: set by workers")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--reached-at", default="", metavar="HOST", help="for TLS; default: that of --listen")
    parser.add_argument("--run-id", default="", help="of the job; default: set by workers")
    parser.add_argument("--token-file", type=Path, help="with the job's token; default: EDL_TOKEN")
    parser.add_argument("--log-dir", type=Path, help="for this server's log")
    parser.add_argument("--no-log", action="store_true", help="write none: rows end with the process")
    parser.add_argument("--checkpoint-dir", default="", help="where the job writes its checkpoints")
    parser.add_argument("--memory-limit", type=int, default=0, metavar="BYTES", help="of rows; 0: unlimited")
    parser.add_argument("--address-file", type=Path, help="receives host:port when the server listens")
    parser.add_argument("--alive-file", type=Path, help="touched every second, unless the server hangs")
    parser.add_argument("--attached", action="store_true", help="end when standard input ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--compile", action="store_true", help="only compile, to build an image")
    args = parser.parse_args(argv)
    full_disk.outlive()
    vital.end_with_threads()
    log_at(args.log_level)
    try:
        if args.compile:
            from edl.ps.table import kernels  # noqa: F401

            return 0
        if args.log_dir is None:
            parser.error("--log-dir is required")
        if args.index < 0 or args.index >= args.servers > 0:
            most = f"0 to {args.servers - 1}" if args.servers else "0 or more"
            parser.error(f"--index {args.index}: expected {most}")
        return asyncio.run(_serve(args))
    except (EdlError, OSError) as error:
        print(f"edl ps: {plain(str(error))}", file=sys.stderr)
        return 2


async def _serve(args: argparse.Namespace) -> int:
    from edl.ps.rpc.service import OPTIONS, READING, Service
    from edl.ps.server import ParameterServer

    log = structlog.get_logger()
    hangs.end_with_hangs(f"parameter server {args.index}")
    tokens = Tokens(os.environ.get("EDL_TOKEN", ""), args.token_file, log.info)
    if not tokens.current:
        raise EdlError("the job's token is missing: expected it in --token-file or EDL_TOKEN")
    ending = asyncio.Event()
    for number in to_handle((signal.SIGTERM, signal.SIGINT)):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    if args.attached:
        _on_end_of_input(ending)
    if args.alive_file is not None:
        vital.task(_stay_alive(args.alive_file), "alive")
    kept = args.log_dir / "run"  # run id of the log, for a server started without --run-id

    def of_run(run_id: str) -> ParameterServer:
        about = (args.index, args.servers, run_id, args.log_dir, args.checkpoint_dir, args.memory_limit)
        server = ParameterServer(*about, log.warning, logged=not args.no_log)
        if not args.run_id:
            _write_whole(kept, run_id)
        return server

    known = kept.read_text(encoding="utf-8") if kept.exists() else ""
    server = of_run(args.run_id or known)
    service = Service(server, None if args.run_id else of_run, lambda: tokens.current)
    certificate = certificate_for(args.reached_at or args.listen.rpartition(":")[0], _warn)
    listener = Listener(tokens, certificate, options=OPTIONS, reading=READING)
    port = await listener.start(args.listen, service.register)
    address = f"{args.listen.rpartition(':')[0]}:{port}"
    if args.address_file is not None:
        _write_whole(args.address_file, address)
    at = server.position()
    where = "empty" if at.empty else f"at step {at.step:,}"
    of = f" of {server.servers}" if server.servers else ""
    log.info(f"parameter server {args.index}{of} listens on {address}, {where}")
    await ending.wait()
    await service.end_conversations(GRACE_SECONDS)
    await listener.close(GRACE_SECONDS)
    await service.close()
    log.info("asked to end" if args.no_log else "asked to end: the log is on the disk")
    return 0


async def _stay_alive(path: Path) -> None:
    """Touch `path` every second while the event loop runs."""
    while True:
        path.touch()
        await asyncio.sleep(ALIVE_SECONDS)


def _warn(text: str) -> None:
    """Log a problem with the certificate; empty: the problem is solved."""
    log = structlog.get_logger()
    if text:
        log.warning(f"TLS: {text}")
    else:
        log.info("TLS works again")


def _on_end_of_input(ending: asyncio.Event) -> None:
    """Set `ending` when standard input ends.

    It is a pipe held by the parent process only, so it ends with the parent, even if that is killed.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ending.set()

    loop.add_reader(0, read)


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
