# SPDX-License-Identifier: Apache-2.0
"""`edl example`: whole examples, to look at and to change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

import edl
from edl.cli.shared import display, groups, output
from edl.errors import ConfigError, EdlError

FOLDER = Path(edl.__file__).with_name("examples")
README = "README.md"

app = groups.group("example", "List and copy the examples.")


@app.command("list")
def list_examples(form: output.FormOption = output.Form.table) -> None:
    """List the examples."""
    display.listed("Example", _titles(), form)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those that `edl example list` prints.")],
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The folder to write; default: NAME.", show_default=False),
    ] = None,
) -> None:
    """Copy an example into a new folder: `edl example copy vae`."""
    if name not in (known := _titles()):
        raise ConfigError(f"unknown example {name!r}; expected one of {', '.join(known)}")
    target = directory or Path(name)
    try:
        shutil.copytree(FOLDER / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        readme = target / README
        text = readme.read_text(encoding="utf-8").replace(
            f"examples/{name}/", ""
        )  # as typed in the new folder
        readme.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise EdlError(f"{target}: already exists; nothing was written") from None
    except (OSError, shutil.Error) as error:
        shutil.rmtree(target, ignore_errors=True)  # it did not exist before
        raise EdlError(f"{target}: cannot write: {error}") from error
    display.line(f"wrote {', '.join(str(path) for path in sorted(target.iterdir()))}")
    display.line("next:")
    for command in (f"cd {target}", *_commands(text)):
        display.line(f"  {command}")


def _titles() -> dict[str, str]:
    """Return the title of each example's README, by the name of its folder.

    Raises:
        EdlError: this installation has no examples (the images have none).
    """
    readmes = sorted(FOLDER.glob(f"*/{README}"))
    if not readmes:
        raise EdlError("no examples are installed")
    return {
        path.parent.name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in readmes
    }


def _commands(readme: str) -> list[str]:
    """Return the commands in the text of a README."""
    lines = readme.splitlines()
    return [line[2:].partition("  #")[0].strip() for line in lines if line.startswith("$ ")]
