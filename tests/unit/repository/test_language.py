# SPDX-License-Identifier: Apache-2.0
"""Habits of language that make a reader translate are counted by pattern, and the count may only fall.

CONTRIBUTING.md says how we write. A pattern is no proof: some matches are right, and a bad sentence may match
none. But each number below was counted, so that none of these habits grows again: lower it when you can.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
HABITS = re.compile(
    r"\b(who|whoever|whom"  # a clause as a noun: "whoever joins", for "new workers"
    r"|nobody|somebody|another one|such a one"
    r"|by now|of which|is told|are told|stands? still|goes? back|went back|speaks? of|in vain"
    r"|there (is|are) none"
    r"|no longer|as before|used to|formerly)\b",  # history, which belongs into commit messages
    re.IGNORECASE,
)
OTHERS = {"horovod_examples", "test_language.py"}  # files that others have written, and this one
MOST = {
    "benchmarks": 0,
    "chart": 0,
    "docs": 2,
    "edl": 0,
    "master": 0,
    "model_zoo": 0,
    "ps": 0,
    "tests": 5,
    "trainer": 0,
}


def texts(file: Path) -> Iterator[str]:
    """The comments and strings of a Python file; docstrings and messages are strings."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    with open(file, "rb") as lines:
        yield from (
            token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT
        )


def test_no_habit_of_language_grows() -> None:
    found: Counter[str] = Counter()
    for folder in MOST:
        for file in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in file.name and not OTHERS & {*file.parts}:
                found[folder] += sum(len(HABITS.findall(text)) for text in texts(file))
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "chart" / "values.yaml"]:
        found[page.parent.name] += len(HABITS.findall(page.read_text()))
    more = {folder: found[folder] for folder in MOST if found[folder] > MOST[folder]}
    assert more == {}, "write the new sentences in other words (CONTRIBUTING.md)"
