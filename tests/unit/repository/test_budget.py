# SPDX-License-Identifier: Apache-2.0
"""The project does not widen: each room keeps to its lines of code, and the surface to its size.

budget.toml holds the limits. A limit may fall; a commit raises one by an entry of `raised` that names its
users. A file belongs to the longest folder in the budget that holds it. Docstrings, comments, blank lines and
generated files do not count. This file as a program lowers the limits to the numbers of today.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import edl
from edl.config import File
from edl.config.paths import keys

ROOT = Path(__file__).parents[3]
BUDGET = Path(__file__).with_name("budget.toml")
MIN_SLACK = 10  # lines of code; beyond it 1 % of the room
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """The number of lines with code; those of docstrings and comments have none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines.difference_update(range(first, last + 1))
    return len(lines)


def room_of(file: Path, rooms: dict[str, int]) -> str:
    """The longest folder of the budget that holds the file; empty without one."""
    return next((str(folder) for folder in file.parents if str(folder) in rooms), "")


def counted(rooms: dict[str, int]) -> Counter[str]:
    """The lines of code by room, of all files that git knows."""
    names = subprocess.check_output(
        ["git", "ls-files", "-c", "-o", "--exclude-standard"], cwd=ROOT, text=True
    )
    found: Counter[str] = Counter()
    for name in map(Path, names.splitlines()):
        file = ROOT / name
        if file.is_symlink() or not file.is_file() or "_pb2" in name.name or name.suffix not in (".py", ""):
            continue
        if name.suffix == "" and not file.read_bytes().startswith(b"#!/usr/bin/env python"):
            continue
        found[room_of(name, rooms)] += lines_of_code(file.read_text())
    return found


def surface() -> dict[str, int]:
    """The numbers of what users and processes can name."""
    pages = ROOT / "docs"
    protos = (ROOT / "edl" / "contract" / "proto").glob("*.proto")
    return {
        "commands": len(re.findall(r"^#{2,3} `?edl ", (pages / "commands.md").read_text(), re.MULTILINE)),
        "values": len(keys(File)),
        "rpcs": sum(len(re.findall(r"^\s*rpc ", p.read_text(), re.MULTILINE)) for p in protos),
        "names": len(edl.__all__),
    }


def limits(budget: dict[str, Any]) -> Counter[str]:
    """The limits, with what was added to them."""
    total = Counter({**budget["code"], **budget["surface"]})
    for raised in budget["raised"]:
        assert raised["for"] and total[raised["of"]], raised
        total[raised["of"]] += raised["by"]
    return total


def test_no_room_and_no_surface_grows() -> None:
    budget = tomllib.loads(BUDGET.read_text())
    most, found = limits(budget), counted(budget["code"]) + Counter(surface())
    assert not found[""], "add the folder of the new file to budget.toml"
    larger = {name: f"{found[name]}, of {most[name]}" for name in most if found[name] > most[name]}
    assert larger == {}, "take something out, or add an entry to `raised` in budget.toml"
    slack = {name: max(MIN_SLACK, n // 100) if name in budget["code"] else 0 for name, n in most.items()}
    smaller = {name: found[name] for name in most if found[name] < most[name] - slack[name]}
    assert smaller == {}, f"lower the budget: python {Path(__file__).relative_to(ROOT)}"


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    source = '"""A\nmodule."""\n\n# note\nx = """two\nlines"""\n\n\ndef f():\n    "doc"\n    return x  # y\n'
    assert lines_of_code(source) == 4


if __name__ == "__main__":
    text = BUDGET.read_text()
    budget = tomllib.loads(text)
    most, found = limits(budget), counted(budget["code"]) + Counter(surface())
    for name in (name for name in most if found[name] < most[name]):
        rest = found[name] - (most[name] - {**budget["code"], **budget["surface"]}[name])
        text = re.sub(rf'^("?{re.escape(name)}"? = )\d+', rf"\g<1>{rest}", text, flags=re.MULTILINE)
    BUDGET.write_text(text)
