# SPDX-License-Identifier: Apache-2.0
"""What reads journals names events and effects of the core, which would otherwise be passed over silently."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import edl
from edl.master.core import effects, events
from edl.report import reading

KNOWN = {kind.__name__ for union in (events.Event, effects.Effect) for kind in get_args(union)}
READERS = sorted(
    path for room in ("journal", "report", "cli") for path in (Path(edl.__file__).parent / room).rglob("*.py")
)
TYPES = ("['type']", ".get('type')")


def texts(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def named(tree: ast.AST) -> set[str]:
    """Texts with which the type of an entry's event or effect is compared or matched."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Match(subject, cases) if _is_type(subject):
                for case in cases:
                    found |= set(texts(case.pattern))
            case ast.Compare(left, comparators=others) if _is_type(left):
                for other in others:
                    found |= set(texts(other))
    return found


def _is_type(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return any(text == f"{of}{how}" for of in ("event", "effect", "e") for how in TYPES)


@pytest.mark.parametrize("path", READERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_events_and_effects_that_are_read_are_those_of_the_core(path: Path) -> None:
    assert named(ast.parse(path.read_text(encoding="utf-8"))) <= KNOWN


def test_the_names_are_found() -> None:
    found = set().union(*(named(ast.parse(path.read_text(encoding="utf-8"))) for path in READERS))
    assert {"JoinedRing", "ServersReady", "Commit", "Form", "Checkpointed"} < found


def test_the_report_reads_events_and_effects_of_the_core() -> None:
    assert reading._EVENTS.keys() | reading._EFFECTS.keys() <= KNOWN
