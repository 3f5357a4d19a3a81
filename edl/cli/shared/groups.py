# SPDX-License-Identifier: Apache-2.0
"""Groups of commands, whose help has sections and whole sentences; parameters that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import typer
from typer.core import TyperGroup


class Section(StrEnum):
    """A section of the help of `edl`, in the order in which they are printed."""

    START = "Start"
    WATCH = "Watch"
    CHANGE = "Change"
    RESULTS = "Results"
    CLUSTER = "Cluster"
    ELSEWHERE = "From elsewhere"
    ADVANCED = "Advanced"


class Group(TyperGroup):
    """A group of commands. `rich_help_panel` of a command is its section.

    Typer prints panels only with boxes, and without them it cuts descriptions off.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by section, each with the first sentence of its help."""
        sections: dict[str, list[tuple[str, str]]] = {section: [] for section in ("Commands", *Section)}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            section = panel if isinstance(panel, Section) else "Commands"
            sections[section].append((f"{name:{width}}", command.get_short_help_str(limit=1000)))
        for section, rows in sections.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def group(name: str, help: str, cls: type[TyperGroup] = Group) -> typer.Typer:
    """Create a group of commands of `edl`."""
    return typer.Typer(name=name, help=help, cls=cls, no_args_is_help=True)


def with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command the parameters that Typer reads, as keywords."""
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in keywords}
    return command
