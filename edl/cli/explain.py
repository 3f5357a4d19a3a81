# SPDX-License-Identifier: Apache-2.0
"""`edl explain`: the meaning of a value."""

from __future__ import annotations

import sys
import textwrap
from typing import Annotated

import typer

from edl.cli import display
from edl.config.explained import explained

COLUMNS = 100


def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="E.g. training.batchSize, or a section such as elastic.")
    ] = "",
) -> None:
    """Explain a value of --set and of values files.

    Prints its type, default and meaning. For a section, all its values are listed; without KEY, those of all
    sections of a job.
    """
    for line in explained(key):
        if sys.stdout.isatty() and "  " not in line:
            display.line(textwrap.fill(line, COLUMNS))
        else:
            display.line(line)
