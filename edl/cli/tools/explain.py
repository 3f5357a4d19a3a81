# SPDX-License-Identifier: Apache-2.0
"""`edl explain`: the meaning of a value."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from edl.cli.shared import display, output
from edl.config.explained import Explained, explained

COLUMNS = 100


def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="E.g. training.batchSize, or a section such as elastic.")
    ] = "",
    form: output.FormOption = output.Form.table,
) -> None:
    """Explain a value of --set and of values files.

    Prints its type, default and meaning. For a section, all its values are listed; without KEY, those of all
    sections of a job.
    """
    found = explained(key)
    if form.is_document:
        output.write("Value", [asdict(value) for value in found], form)
    elif found[0].key == key:
        _print(found[0])
    else:
        display.listed(
            "Value", {value.key: value.meaning.partition(". ")[0].rstrip(".") for value in found}, form
        )


def _print(value: Explained) -> None:
    lines = [
        f"{value.key}: {value.type}; default {json.dumps(value.default)}",
        f"A running job {'takes a new value over' if value.live else 'keeps its value'}.",
        "",
        value.meaning,
    ]
    for line in lines:
        display.line(textwrap.fill(line, COLUMNS) if sys.stdout.isatty() else line)
