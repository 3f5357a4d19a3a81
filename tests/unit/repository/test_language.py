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
    r"|nobody|somebody|anybody|whatever|another one|such a one"
    r"|by now|of which|(is|are|was|were) told|stands? still|goes? back|went back|speaks? of|in vain"
    r"|there (is|are) none|without a word|gladly"
    r"|no longer|as before|used to|formerly)\b",  # history, which belongs into commit messages
    re.IGNORECASE,
)
FRAGMENT = re.compile(r"""["'#/] ?(Of|And|Who|Whose|That) [a-z]""")  # the start of a text or comment
WRITTEN = {".py", ".proto", ".md", ".sh", ".tpl", ".yaml", ""}  # endings of files that are written by hand
OTHERS = {
    "test_language.py",
    "values-0.1.0.yaml",  # as released
}
MAXIMUM = {
    "benchmarks": 0,
    "chart": 0,
    "compat": 0,
    "docs": 0,
    "edl": 0,
    "examples": 0,
    "master": 0,
    "model_zoo": 0,
    "ps": 0,
    "scripts": 0,
    "tests": 0,
    "tools": 0,
    "trainer": 0,
}


def texts(file: Path) -> Iterator[str]:
    """The comments and strings of a Python file, docstrings included; the lines of any other file."""
    source = file.read_text()
    if not HABITS.search(source):  # which is quick, and the rule
        return
    if file.suffix != ".py" and not source.startswith("#!/usr/bin/env python"):
        yield from source.splitlines()
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    with open(file, "rb") as lines:
        yield from (
            token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT
        )


def test_no_habit_of_language_grows() -> None:
    found: Counter[str] = Counter()
    for folder in MAXIMUM:
        for file in (ROOT / folder).rglob("*"):
            if (
                file.is_file()
                and file.suffix in WRITTEN
                and "_pb2" not in file.name
                and not OTHERS & {*file.relative_to(ROOT).parts}
            ):
                found[folder] += sum(len(HABITS.findall(text)) for text in texts(file))
                found[folder] += len(FRAGMENT.findall(file.read_text()))
    more = {folder: found[folder] for folder in MAXIMUM if found[folder] > MAXIMUM[folder]}
    assert more == {}, "write the new sentences in other words (CONTRIBUTING.md)"
