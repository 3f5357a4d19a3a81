#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/commands.md for scripts/dev/docs: each command with its help."""

from __future__ import annotations

from typing import Any

import typer
from typer.cli import get_docs_for_click
from typer.core import TyperCommand

from edl.cli.app import app
from edl.compat.elasticdl import command as elasticdl
from edl.compat.horovod import flags as horovod_flags


def page() -> str:
    """Return the page. Commands that parse flags of a different program have their help as it is printed."""
    # A list of commands has 45 characters of each first sentence, which is meant for terminals.
    TyperCommand.get_short_help_str.__defaults__ = (100,)
    group: Any = typer.main.get_command(app)
    for name, help in (("horovod", horovod_flags.HELP), ("elasticdl", elasticdl.HELP)):
        group.commands[name].epilog = f"```text\n{help}\n```"
    context = typer.Context(group, help_option_names=["-h", "--help"])
    return get_docs_for_click(obj=group, ctx=context, name="edl", title="Commands").strip()


if __name__ == "__main__":
    print(page())
