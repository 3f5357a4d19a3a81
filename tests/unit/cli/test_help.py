# SPDX-License-Identifier: Apache-2.0
"""`--help`: sections of commands, whole sentences at 80 columns, and the generated page of commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edl.cli.app import app
from edl.cli.shared.groups import Section

ROOT: Any = typer.main.get_command(app)
GROUPS = {name: each for name, each in ROOT.commands.items() if hasattr(each, "commands")}


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], terminal_width=80, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("name", ["", *GROUPS])
def test_each_command_has_its_whole_sentence_in_one_line_of_80_columns(name: str) -> None:
    lines = shown(*name.split()).splitlines()
    for command, each in (GROUPS[name] if name else ROOT).commands.items():
        sentence = each.get_short_help_str(limit=1000)
        assert sentence.endswith(".")
        assert re.search(rf"^  {command} +{re.escape(sentence)}$", "\n".join(lines), re.M), command
        assert max(map(len, [*lines, *shown(*name.split(), command).splitlines()])) <= 80, command


def test_the_commands_are_in_sections() -> None:
    text = shown()
    headings = re.findall(r"^(\S.*):$", text, re.M)
    assert headings == ["Options", *Section], "and no command is without a section"
    change = text.partition("\nChange:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (\w+)", change, re.M) == ["scale", "stop", "rm", "checkpoint"]


def test_the_page_of_commands_has_the_flags_of_commands_that_parse_their_own() -> None:
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    for name, flag in (("horovod", "  --min-np N"), ("elasticdl", "  --dry-run ")):
        section = page.partition(f"\n## `edl {name}`\n")[2].partition("\n## ")[0]
        assert f"\n{flag}" in section
    assert "* `-h, --help`: " in page
