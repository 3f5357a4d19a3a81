# SPDX-License-Identifier: Apache-2.0
"""Times of the core: those that something waits for are registered, so that a `Tick` comes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import edl.master.core.job
from edl.master.core.state import DEADLINES

CORE = Path(inspect.getfile(edl.master.core.job)).parent


def compared_with_now(tree: ast.AST) -> set[str]:
    """Fields of the job, such as `job.next_ring.join_at`, that are compared with the time of the event."""
    found = set()
    for compare in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = [ast.unparse(side) for side in (compare.left, *compare.comparators)]
        if "job.now" in sides:
            found |= {
                side for side in sides if side.startswith("job.") and side.isascii() and " " not in side
            }
    return found - {"job.now"}


def test_each_time_that_the_core_waits_for_is_a_registered_deadline() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(CORE.glob("*.py"))]
    waits = set().union(*map(compared_with_now, trees))
    assert {"job.next_ring.join_at", "job.backoff.until"} < waits
    registered = "".join(inspect.getsource(due) for due in DEADLINES)
    assert sorted(wait for wait in waits if wait not in registered) == []


def test_a_function_is_registered_once() -> None:
    assert len({due.__qualname__ + due.__module__ for due in DEADLINES}) == len(DEADLINES) == 12
