# SPDX-License-Identifier: Apache-2.0
"""`edl report`: pictures of a job, in one HTML file or as single files."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from edl.cli.jobs.target import about_a_job
from edl.cli.shared import display
from edl.cli.shared.jobs import JobHandle, Journal
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.report import PICTURES


@about_a_job
def report(
    job: JobHandle,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The file to write; default: report.html in DIR, or RELEASE.html."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    svg: Annotated[
        str,
        typer.Option("--svg", metavar="PICTURE", help=f"Write only one picture: {', '.join(PICTURES)}."),
    ] = "",
    png: Annotated[str, typer.Option("--png", metavar="PICTURE", help="Like --svg, as PNG.")] = "",
) -> None:
    """Write a report with pictures of a job, as one HTML file.

    The file needs no network. For a running job, the report shows what has happened so far.
    """
    if svg and png:
        raise ConfigError("--svg and --png are mutually exclusive")
    name, kind = (svg, "svg") if svg else (png, "png")
    if name and name not in PICTURES:
        raise ConfigError(f"--{kind} {name}: unknown picture (expected {', '.join(PICTURES)})")
    from edl.report import write  # imported late: with NumPy

    with job.journal() as found:
        target = output or _target(found, f"{name}.{kind}" if name else "")
        try:
            if name:
                target.write_bytes(write.picture(found.directory, name, kind, found.told))
            else:
                page = write.html(found.directory, found.told, found.name, found.elsewhere)
                artifacts.write_whole(target, page)
        except OSError as error:
            raise EdlError(f"{target}: cannot write: {error.strerror}") from error
    display.line(str(target))
    if open_it:
        webbrowser.open(target.resolve().as_uri())


def _target(found: Journal, picture: str) -> Path:
    """The default file of a report, or of one picture."""
    if picture:
        return Path(picture)
    return Path(f"{found.name}.html") if found.elsewhere is not None else found.directory / artifacts.REPORT
