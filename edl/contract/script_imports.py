# SPDX-License-Identifier: Apache-2.0
"""What a user's script imports before it does anything else.

A process that forks workers imports the same, so that a new worker need not. The first statement that is no
import ends the list: it may set a variable such as KERAS_BACKEND, which an import after it reads.
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

VARIABLE = "EDL_SCRIPT_IMPORTS"
"""The environment variable by which such a process receives the modules, separated by commas."""


def leading_imports(script: str) -> list[str]:
    """The modules that a script's first statements import, without those of Python itself.

    A file beside the script ends the list: it is imported in the place of an installed package of its name.

    Args:
        script: the path of a Python file, or its text (it has more than one line then).

    Returns:
        An empty list also if the script cannot be read or parsed.
    """
    found: list[str] = []
    for statement in _parsed(script).body:
        match statement:
            case ast.Import(names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found.append(module)
            case ast.Expr(ast.Constant(str())):
                continue  # the docstring
            case _:
                break
    ours = {*sys.stdlib_module_names, "edl"}
    foreign = [name for name in dict.fromkeys(found) if name.partition(".")[0] not in ours]
    return [*itertools.takewhile(lambda name: not _is_beside(script, name.partition(".")[0]), foreign)]


def relative_depth(script: Path) -> int:
    """The greatest number of dots of a script's relative imports; 0 without one: it belongs to no package."""
    nodes = ast.walk(_parsed(str(script)))
    return max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)


def _is_beside(script: str, root: str) -> bool:
    folder = Path(script).parent
    return "\n" not in script and any((folder / f"{root}{end}").is_file() for end in (".py", "/__init__.py"))


def _parsed(script: str) -> ast.Module:
    """A script's tree; without statements if it cannot be read or parsed: its worker reports that."""
    try:
        return ast.parse(script if "\n" in script else Path(script).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ast.Module([], [])
