# SPDX-License-Identifier: Apache-2.0
"""`edl model`: copy the trained model of a job to a local file, or export it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edl.cli.jobs.export import Format, export
from edl.cli.jobs.target import about_a_job
from edl.cli.shared import display, groups
from edl.cli.shared.jobs import JobHandle
from edl.contract.artifacts import FORMATS
from edl.errors import EdlError

app = groups.group("model", "Copy or export the trained model of a job.")


app.command()(export)


@app.command()
@about_a_job
def get(
    job: JobHandle,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Where to write it; default: under its own name, here."),
    ] = None,
    name: Annotated[
        Format, typer.Option("--format", help="Which of those that were exported; savedmodel is a directory.")
    ] = "keras",
) -> None:
    """Copy a job's trained model here, whole and verified."""
    target = file or Path(FORMATS[name])
    if target.is_dir() and name != "savedmodel":
        target = target / FORMATS[name]
    if target.exists():
        raise EdlError(f"{target} already exists; choose another FILE")
    display.line(job.fetch(name, target))
