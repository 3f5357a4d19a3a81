#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/keras-api.md for scripts/dev/docs: what each argument of Keras' fit(), compile() and evaluate()
is in edl, and each hook of Callback. scripts/dev/keras_api.toml has the rows."""

from __future__ import annotations

import tomllib
from pathlib import Path

DATA = Path(__file__).with_suffix(".toml")
HOW = {
    "exact": "as in Keras",
    "expressed": "expressed",
    "refused": "refused",
    "missing": "not available",
}
HEAD = """# The arguments of Keras' fit, and what they are in edl

A job calls neither `fit` nor `evaluate`: the ring runs the training and the evaluation. This page lists what
stands for each argument. [`model()`](models.md#model) of your module calls `compile`, and
[`callbacks()`](callbacks.md) returns callbacks.

| | |
| --- | --- |
| as in Keras | the argument or hook itself is used, with the same result |
| expressed | a function of the module or a value of the job has the same effect |
| refused | using it ends the job before its first step, with its name and what to do instead |
| not available | nothing has the same effect; the row names what is near |

A test compares the names with those of the installed Keras, so that a new argument is not missed. The last
column links the test of a row. `scripts/dev/docs` generates the page.

"""
SECTIONS = {
    "fit": "## `Model.fit`",
    "compile": "## `Model.compile`",
    "evaluate": "## `Model.evaluate`",
    "Callback": "## `Callback`",
}
NAMES = {"fit": "argument", "compile": "argument", "evaluate": "argument", "Callback": "attribute or hook"}


def page() -> str:
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    parts = [HEAD]
    for section, title in SECTIONS.items():
        parts.append(f"{title}\n\n| {NAMES[section]} | in edl | by what | test |\n")
        parts.append("| --- | --- | --- | --- |\n")
        parts += [row(name, **cells) for name, cells in data[section].items()]
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def row(name: str, how: str, text: str, test: str = "") -> str:
    return f"| `{name}` | {HOW[how]} | {text} | {link(test) if test else ''} |\n"


def link(test: str) -> str:
    """A link to the test's file, with the case or else the file's name as its text."""
    path, _, function = test.partition("::")
    _, _, case = function.partition("[")
    return f"[{case[:-1] or Path(path).stem.removeprefix('test_').replace('_', ' ')}](../{path})"


if __name__ == "__main__":
    print(page(), end="")
