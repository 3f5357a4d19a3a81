# SPDX-License-Identifier: Apache-2.0
"""A part of the master's state is changed by its own methods only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[3] / "master/core"
# The parts of `State` that have methods. The others are plain records.
PARTS = {"backoff", "checkpoints", "divergence", "failover", "goodput", "pool", "ring", "servers", "timeouts"}


def foreign(tree: ast.AST) -> Iterator[str]:
    """Yield the assignments to a field of a part, also through a local name of the part."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names: dict[str, str] = {}
        for node in (node for node in ast.walk(function) if isinstance(node, ast.stmt)):
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    if isinstance(node, ast.Assign) and _of_a_part(node.value, names):
                        names[target.id] = ast.unparse(node.value)
                elif _of_a_part(target.value, names):
                    yield f"{node.lineno}: {ast.unparse(target)}"


def _targets(node: ast.stmt) -> list[ast.Name | ast.Attribute | ast.Subscript]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=found)]) | ast.Assign(targets=found):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            found = [target]
        case ast.Delete(targets=found):
            pass
        case _:
            return []
    return [one for one in found if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)]


def _of_a_part(value: ast.expr, names: dict[str, str]) -> bool:
    """True for `job.ring`, and for what it has: `job.ring.changes[-1]`."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        if isinstance(value, ast.Attribute) and value.attr in PARTS and isinstance(value.value, ast.Name):
            return value.value.id in ("job", "self")
        value = value.value
    return isinstance(value, ast.Name) and value.id in names


def test_only_its_own_methods_change_a_part_of_the_state() -> None:
    found = {
        f"{path.name}:{line}"
        for path in CORE.glob("*.py")
        for line in foreign(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_an_assignment_through_a_local_name_is_found() -> None:
    text = (
        "def f(job):\n    change = job.ring.changes[-1]\n    change.step = 3\n    job.servers.known[1] = 2\n"
    )
    assert list(foreign(ast.parse(text))) == ["3: change.step", "4: job.servers.known[1]"]
