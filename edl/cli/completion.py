# SPDX-License-Identifier: Apache-2.0
"""`edl completion`: scripts with which a shell completes commands, options, values and models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

# Typer offers these only through options of every command (add_completion).
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from edl.cli.shared import display

VARIABLE = "_EDL_COMPLETE"  # set by the scripts: `edl` then prints completions instead of running a command


class Shell(StrEnum):
    """Shells with a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell that reads the script.")]) -> None:
    """Print a script with which a shell completes edl's commands.

    For bash, put this into ~/.bashrc: eval "$(edl completion bash)". For zsh, put the same with zsh into
    ~/.zshrc, after compinit. For fish: edl completion fish > ~/.config/fish/completions/edl.fish
    """
    display.line(get_completion_script(prog_name="edl", complete_var=VARIABLE, shell=shell))


def prepare() -> None:
    """Let `edl` answer the scripts, which set `VARIABLE`."""
    completion_init()


def keys(incomplete: str) -> list[str]:
    """Complete the last key of a `--set`: sections, or the keys of one."""
    from edl.config import values
    from edl.config.job import flat

    before, comma, key = incomplete.rpartition(",")
    return [f"{before}{comma}{known}=" for known in flat(values.defaults()) if known.startswith(key)]


def models(incomplete: str) -> list[str]:
    """Complete the name of a model of the zoo; the shell completes files."""
    from edl.cli.shared.models import zoo

    return [name for name in zoo() if name.startswith(incomplete)]
