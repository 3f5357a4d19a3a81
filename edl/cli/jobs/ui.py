# SPDX-License-Identifier: Apache-2.0
"""`edl ui`: the live page of a job, in a browser on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edl.cli.jobs.target import about_a_job
from edl.cli.shared import display
from edl.cli.shared.jobs import JobHandle
from edl.contract.own_modules import module_command
from edl.errors import EdlError

if TYPE_CHECKING:
    from edl.report import live


@about_a_job
def ui(
    job: JobHandle,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; default: a free one.")] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    attached: Annotated[bool, typer.Option("--attached", hidden=True)] = False,
) -> None:
    """Show a job in a browser while it trains.

    The page is the report, redrawn as the job goes on. Prints the address, and serves it on this machine
    until Ctrl-C. The page shows and changes nothing.
    """
    from edl.report import live  # imported late: with NumPy

    @contextmanager
    def journal() -> Iterator[live.Reading]:
        with job.journal() as found:
            yield live.Reading(found.directory, found.told)

    def status() -> live.Status:
        found = job.snapshot()
        return live.Status(found.data, found.age)

    shown = live.Job(job.snapshot().kept, status, journal)
    try:
        server = live.PageServer(shown, port)
    except OSError as error:
        raise EdlError(f"--port {port}: cannot listen: {error.strerror}") from error
    if attached:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    display.line(server.address)
    sys.stdout.flush()
    if open_it:
        webbrowser.open(server.address)
    with server, suppress(KeyboardInterrupt):
        server.run()


def _end_with_input(server: live.PageServer) -> None:
    """Stop serving when standard input ends: with `edl run --ui`, however that ends."""
    while os.read(0, 4096):
        pass
    server.job.show_the_end()
    server.shutdown()


@contextmanager
def beside(output: Path) -> Iterator[str]:
    """Serve the live page in a process of its own while the context is open. Yield a line that says where.

    The job does not depend on the page: if it cannot be served, the line is a warning.
    """
    process = subprocess.Popen(
        [*module_command("edl.cli"), "ui", str(output), "--attached"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C on the terminal ends the job, and then this page
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        address = process.stdout.readline().strip()
        if address:
            yield f"live page: {address}"
        else:
            why = (process.stderr.read().strip().splitlines() or ["no message"])[-1]
            yield f"warning: no live page: {why.removeprefix('edl: ')}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.stderr.close()
        process.wait()
