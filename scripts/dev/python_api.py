#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/python-api.md for scripts/dev/docs: the public names of `edl`, with signature and docstring.

The source is parsed, because an import of the training loop would import TensorFlow.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import edl

ROOT = Path(__file__).parents[2]
SOURCES = {
    "EdlError": "edl/errors.py",
    "fit": "compat/notebook/fit.py",
    "join": "trainer/join.py",
    "state": "trainer/join.py",
    "State": "trainer/model/loop_state.py",
    "Job": "trainer/loop.py",
    "Step": "trainer/loop.py",
}
ORDER = (
    "fit",
    "join",
    "state",
    "State",
    "dataset",
    "arrays",
    "split",
    "open_files",
)  # and the readers of files after them
METHODS = (
    ("job.", "Job", "steps"),
    ("job.", "Job", "stop"),
    ("job.", "Job", "save"),
    ("step.", "Step", "mean"),
)  # of what edl.join returns
ATTRIBUTES = {
    "job.": ("Job", ("batch_size", "steps_per_epoch", "seed")),
    "step.": ("Step", ("records", "number", "epoch", "ends_epoch", "seed", "weight")),
}
HEAD = """# Python API

The names of the package `edl`, from their docstrings. `edl.layers.Embedding` is on [a page of its
own](embeddings.md#arguments), and so is [what a model file defines](models.md). `scripts/dev/docs` generates
this page.
"""
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$", re.MULTILINE)


def source(name: str) -> Path:
    """Return the file that defines a public name."""
    if name in SOURCES:
        return ROOT / SOURCES[name]
    return Path(inspect.getsourcefile(getattr(edl, name)) or "")


def definition(name: str, tree: ast.Module | ast.ClassDef) -> ast.FunctionDef | ast.ClassDef:
    """Return the syntax tree of a function or class in that of a module or class.

    Raises:
        LookupError: the tree does not define the name.
    """
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"no definition of {name}")


def signature(prefix: str, node: ast.FunctionDef) -> str:
    """Return a call of the function, with the types and defaults of its parameters."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg == "self":
        arguments.args.pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    call = f"{prefix}{node.name}({ast.unparse(arguments)}){returns}"
    if len(call) <= 100:
        return call
    # A comma within brackets, as in a type, divides no parameters.
    parts = re.split(r", (?![^\[\(]*[\]\)])", ast.unparse(arguments))
    return f"{prefix}{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def prose(text: str) -> str:
    """Return a docstring in Google's form as Markdown."""
    head, *sections = SECTION.split(text)
    parts = [head.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        items = re.split(r"\n(?=    \S)", body.strip("\n"))
        if title in ("Returns", "Yields"):
            parts.append(f"**{title}:** " + " ".join(body.split()))
            continue
        lines = []
        for item in items:
            name, _, rest = item.strip().partition(": ") if ": " in item else item.strip().partition(":\n")
            rest = re.sub(r"\n {8,}- ", r"\n  - ", rest)
            rest = re.sub(r"\n\n(?!  - )", "\n", rest)
            rest = re.sub(r"\n {5,}", "\n  ", rest)
            lines.append(f"- `{name.strip()}`: {rest.strip()}")
        parts.append(f"**{title}:**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def entry(name: str) -> str:
    """Return the section of a public name."""
    node = definition(name, ast.parse(source(name).read_text()))
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
        calls = "".join(f"    {signature('', method)}\n" for method in methods)
        shown = f"class edl.{name}" + (f":\n{calls}" if calls else "")
    else:
        shown = signature("edl.", node)
    return f"## edl.{name}\n\n```python\n{shown.rstrip()}\n```\n\n{prose(text)}\n"


def method(prefix: str, of: str, name: str) -> str:
    """Return the section of a method of what `edl.join` returns."""
    tree = definition(of, ast.parse(source(of).read_text()))
    assert isinstance(tree, ast.ClassDef)
    node = definition(name, tree)
    assert isinstance(node, ast.FunctionDef)
    text = prose(ast.get_docstring(node) or "")
    return f"### {prefix}{name}\n\n```python\n{signature(prefix, node)}\n```\n\n{text}\n"


def attributes() -> str:
    """Return the section of the attributes of what `edl.join` returns."""
    lines = []
    for prefix, (of, names) in ATTRIBUTES.items():
        tree = definition(of, ast.parse(source(of).read_text()))
        assert isinstance(tree, ast.ClassDef)
        for name in names:
            text = " ".join((ast.get_docstring(definition(name, tree)) or "").split())
            lines.append(f"- `{prefix}{name}`: {text}")
    return "### Attributes of job and step\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the page."""
    rest = sorted(set(edl.__all__) - {*ORDER}, key=str.lower)
    entries = {name: entry(name) for name in (*ORDER, *rest)}
    entries["join"] += "\n" + "\n".join(method(*of) for of in METHODS) + "\n" + attributes()
    print("\n".join([HEAD, *entries.values()]), end="")


if __name__ == "__main__":
    main()
