# SPDX-License-Identifier: Apache-2.0
"""`edl rows export`: rows of parameter servers, read while their job trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edl.cli.jobs.target import about_a_job
from edl.cli.shared import display, groups
from edl.cli.shared.jobs import JobHandle
from edl.contract.phases import ENDED
from edl.contract.tokens import for_reading
from edl.errors import ConfigError, EdlError

app = groups.group("rows", "Export rows of a job's parameter servers.")


@app.command()
@about_a_job
def export(
    job: JobHandle,
    output: Annotated[
        Path,
        typer.Option("--output", help="The directory to make: a Parquet file for each table, and mark.json."),
    ],
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="Only this table: the name of its layer (may be repeated)."),
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(
            "--since", help="Only rows that have changed since that export: its directory, or its mark.json."
        ),
    ] = None,
    servers: Annotated[
        str,
        typer.Option(
            "--servers",
            help="Where the servers can be reached, in the order of their numbers: HOST:PORT,HOST:PORT; "
            "default: as the status says.",
        ),
    ] = "",
) -> None:
    """Write the rows of a running job to Parquet files.

    All of them, or only those that have changed since an earlier export.
    """
    from edl.rows import export  # imported late, because NumPy is slow to import
    from edl.rows.client import Client

    addresses = servers.split(",") if servers else _addresses(job)
    with Client(addresses, for_reading(job.token()), ca=job.authority()) as client:
        for each in export.export(client, output, tables or (), since):
            rows = f"{each.rows:,} rows ({'all' if each.whole else 'those that have changed'})"
            display.line(f"{output / each.file}: {rows} at step {each.step:,}, {each.nbytes:,} bytes")


def _addresses(job: JobHandle) -> list[str]:
    """Get the addresses of the servers from the job's status.

    Raises:
        ConfigError: the job has no servers, or has ended.
        EdlError: a server has not begun to listen yet.
    """
    data = job.snapshot().data
    if data["phase"] in ENDED:
        raise ConfigError(
            f"the job has ended ({data['phase']}), and its servers have no rows any more: they are in the "
            "trained model and in the job's checkpoints"
        )
    if not (there := data.get("servers")):
        raise ConfigError("the job has no parameter servers, and so no rows that could be exported")
    found = [str(server["address"]) for server in there]
    if not all(found):
        raise EdlError("not all parameter servers have begun to listen yet: try again")
    return found
