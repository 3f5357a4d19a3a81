# SPDX-License-Identifier: Apache-2.0
"""`edl new`: a model file to begin with."""

from __future__ import annotations

import importlib.util
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from edl.cli.shared import display
from edl.errors import ConfigError, EdlError

STARTERS = "edl.zoo.starters"


class Starter(StrEnum):
    """The starters, by their modules' names and as a user names them."""

    tabular = "tabular"
    images = "images"
    text = "text"
    timeseries = "timeseries"
    recommender = "recommender"
    custom_loop = "custom-loop"


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, such as my_model.py.")],
    kind: Annotated[
        Starter, typer.Option("--from", help="What the model is like.", show_default=True)
    ] = Starter.tabular,
) -> None:
    """Write a model file that trains at once, to change step by step.

    It makes its own data; a comment says where yours go.
    """
    if file.suffix != ".py":
        raise ConfigError(f"{file}: expected the name of a Python file, such as {file.stem or 'my_model'}.py")
    found = importlib.util.find_spec(f"{STARTERS}.{kind.name}")
    if found is None or found.origin is None:
        raise EdlError("no model zoo is installed")
    licence, text = Path(found.origin).read_text(encoding="utf-8").split("\n", 1)
    assert licence.startswith("# SPDX")  # it is the product's; what a user makes of the file is theirs
    try:
        with open(file, "x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise EdlError(f"{file}: already exists; nothing was written") from None
    except OSError as error:
        raise EdlError(f"{file}: cannot write: {error.strerror}") from error
    path = os.path.join(".", file) if file.parent == Path() else file
    script = "--script " if kind is Starter.custom_loop else ""
    display.line(f"wrote {file}")
    display.line(f"next: {display.called()} run --workers 3 --epochs 5 {script}{path}")
