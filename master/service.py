"""One job's master with all that belongs to it: output directory, journal, gRPC server, backend, loop.

The caller of `serve` chooses the backend. The directory then holds the journal, the address with its token
for those who may talk to the master (`artifacts.CONTACT`), and at the end the summary.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from edl.contract import artifacts
from edl.errors import EdlError
from master.backends.base import Backend
from master.journal import Journal
from master.loop import Master
from master.rpc.server import Server


async def serve(
    master: Master,
    output: Path,
    listen: str,
    token: str,
    backend: Callable[[str], Backend],
    workers_stay: bool = True,
) -> None:
    """The job from its first to its last moment, or until it is abandoned.

    Args:
        listen: host:port for workers and people.
        backend: the backend of a master that workers reach at that host:port.
        workers_stay: the workers outlive this process, and wait for the next master for a while.

    Raises:
        RuntimeError: the address is taken.
        EdlError: the backend cannot start. OSError: the same, or the directory cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    journal = Journal(output / artifacts.JOURNAL, master.run_id, master.spec.values)
    outage = master.spec.config.elastic.master_outage_timeout_seconds if workers_stay else 0.0
    server = Server(master, token, json.dumps(master.spec.values), str(output.resolve()), outage)
    try:
        port = await server.start(listen)
        host = listen.rsplit(":", 1)[0]
        address = f"{'localhost' if host == '[::]' else host}:{port}"
        artifacts.write_contact(output, artifacts.Contact(address, token, os.getpid()))
        print(address, flush=True)  # the parent may now talk to us
        await master.run(backend(address), server, journal)
    finally:
        journal.close()
        summary = {"foreign_messages": server.foreign, **master.summary()}
        artifacts.write_whole(output / artifacts.SUMMARY, json.dumps(summary, indent=1) + "\n")
        await server.close()


def token_for(output: Path) -> str:
    """The job's token: from the environment, else of the job in that directory, else a new one."""
    if given := os.environ.get("EDL_TOKEN"):
        return given
    try:
        return artifacts.read_contact(output).token
    except EdlError:
        return secrets.token_urlsafe(24)
