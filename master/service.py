# SPDX-License-Identifier: Apache-2.0
"""The master of one job with its output directory, journal, gRPC server, backend and loop.

The caller of `serve` chooses the backend. The directory holds the journal, the master's address with its
token (`artifacts.CONTACT`), and at the end the summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from edl.contract import artifacts
from edl.contract.tokens import Tokens, token_of_environment
from edl.errors import EdlError
from edl.full_disk import places
from edl.master.backends.base import Backend
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import snapshot
from edl.master.journal.journal import Journal
from edl.master.loop import Master
from edl.master.parameter_servers.base import NoServers, ParameterServers
from edl.master.rpc.authority import Alone, Authority
from edl.master.rpc.server import MasterServer
from edl.master.rpc.storage import Storage
from edl.net import tls
from edl.net.listener import Listener

log = structlog.get_logger()


async def serve(
    master: Master,
    output: Path,
    listen: str,
    token: str,
    backend: Callable[[str], Backend],
    workers_stay: bool = True,
    salvage: Path | None = None,
    reached_at: str = "",
    authority: Authority = Alone(),  # noqa: B008
    servers: ParameterServers = NoServers(),  # noqa: B008
    storage: Storage | None = None,
) -> None:
    """Serve the job until it has ended or is abandoned.

    Args:
        listen: host:port for workers and users.
        backend: makes the backend, given the host:port at which workers reach this master.
        workers_stay: whether workers outlive this process and wait for the next master.
        salvage: directory for the trained model, the journal and the summary if `output` is full.
        reached_at: host name of this master for workers and users, if it is not that of `listen`.
        authority: decides whether this master may send to the workers.
        servers: the job's parameter servers.
        storage: serves the files on the master's volume; None if its pod has no such volume.

    Raises:
        EdlError: the address is taken, or the backend cannot start.
        OSError: the backend cannot start, or the directory cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    outage = master.spec.config.elastic.master_outage_timeout_seconds if workers_stay else 0.0
    tokens = Tokens.of_environment(token, log.warning)
    host = _reachable_host(listen)
    loop = asyncio.get_running_loop()

    def degraded(why: str) -> None:
        loop.call_soon_threadsafe(master.emit, ev.Degraded("TLS", why))

    certificate = tls.certificate_for(reached_at or host, degraded)
    server = MasterServer(
        master,
        Listener(tokens, certificate),
        json.dumps(master.spec.values),
        str(output.resolve()),
        outage,
        str(salvage.resolve()) if salvage is not None else "",
        authority,
        servers,
        storage,
    )

    def tell(_now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        if isinstance(event, ev.Live) or any(isinstance(effect, ef.ModeDecided) for effect in effects):
            server.take(json.dumps(master.spec.values))

    master.observers = [*master.observers, tell]
    port = await server.start(listen)  # before anything is written: the address may be taken
    try:
        state = partial(snapshot.dump, master.job)
        journal = Journal(output / artifacts.JOURNAL, master.run_id, master.spec, state)
        try:
            address = f"{host}:{port}"
            ca = tls.authority() if certificate is not None else ""
            artifacts.write_contact(output, artifacts.Contact(address, token, os.getpid(), ca))
            if not reached_at:
                with contextlib.suppress(OSError):  # a parent that was killed meanwhile: the job ends below
                    print(address, flush=True)  # the parent may connect now
            await _run(master, partial(backend, address), server, journal, servers)
        finally:
            journal.close()
            written = {"foreign_messages": server.foreign, "journal": asdict(journal.link)}
            _keep(journal, written | master.summary(), output, salvage)
    finally:
        await server.close()


def _reachable_host(listen: str) -> str:
    """Return the host of host:port, and localhost if that is all addresses of this machine."""
    host = listen.rpartition(":")[0]
    return "localhost" if host in ("", "0.0.0.0", "[::]") else host


async def _run(
    master: Master,
    backend: Callable[[], Backend],
    server: MasterServer,
    journal: Journal,
    servers: ParameterServers,
) -> None:
    """Run the job, and its parameter servers as long as it runs."""
    master.servers = servers
    try:
        await servers.start()
        await master.run(backend(), server, journal)
    finally:
        await servers.close(ended=master.job.ended)


def _keep(journal: Journal, summary: dict[str, Any], output: Path, salvage: Path | None) -> None:
    """Write the summary; if the disk is full, write summary and journal to a different directory.

    Raises:
        OSError: no directory can be written.
    """
    failed: OSError | None = None
    try:
        artifacts.write_whole(output / artifacts.SUMMARY, _text(summary))
    except OSError as error:
        failed = error
    if failed is None and not journal.trouble:
        return
    if model := summary["model"]:
        # Absolute, because the summary is in a different directory.
        summary = {
            **summary,
            "model": str(output.resolve() / model),
        }
    for directory in places(salvage):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal.rescue(directory)
            artifacts.write_whole(directory / artifacts.SUMMARY, _text(summary))
        except OSError as error:
            failed = error
            continue
        log.warning(f"{output} cannot be written: the summary and the journal are in {directory}")
        with contextlib.suppress(OSError):  # the parent of a detached job has closed the pipe
            print(directory, flush=True)  # for the parent, and for users
        return
    assert failed is not None
    raise failed


def _text(summary: dict[str, Any]) -> str:
    return json.dumps(summary, indent=1) + "\n"


def token_for(output: Path) -> str:
    """Return the job's token: from the environment, from the job in that directory, or a new one."""
    if given := token_of_environment():
        return given
    try:
        return artifacts.read_contact(output).token
    except EdlError:
        return secrets.token_urlsafe(24)
