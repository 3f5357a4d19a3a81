# SPDX-License-Identifier: Apache-2.0
"""`edl zoo`: the models of the zoo."""

from __future__ import annotations

import typer

from edl.cli import display, moved
from edl.cli.models import zoo
from edl.errors import EdlError

app = typer.Typer(
    name="zoo",
    help="List the models of the zoo.",
    cls=moved.ZooGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_models() -> None:
    """List the models of the zoo."""
    models = zoo()
    if not models:
        raise EdlError("no model zoo is installed")
    width = max(len(name) for name in models)
    for name, summary in models.items():
        display.line(f"{name:{width}}  {summary}".rstrip())
