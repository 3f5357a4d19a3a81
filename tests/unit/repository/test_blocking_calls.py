# SPDX-License-Identifier: Apache-2.0
"""Calls of the product that can block without a time limit name the rule of WAITS.md by which they end."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
LISTED = Path(__file__).with_name("blocking_calls.toml")
# Methods that block until another thread, process or machine acts. With an argument, `get` and `join` are
# those of a dictionary and of a string, or have a time limit, as the others have then.
BLOCKING = {"acquire", "communicate", "get", "join", "result", "wait"}
LIMITS = {"timeout", "blocking", "within"}
SELECT = re.compile(r"\bselect(or)?\.select$")


class _Calls(ast.NodeVisitor):
    """Counts the calls without a time limit, as `file:Class.method`."""

    def __init__(self, file: str):
        self._names, self.found = [file], Counter[str]()

    def _named(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _named

    def visit_Await(self, node: ast.Await) -> None:
        """An awaited call blocks no thread; its arguments are looked at."""
        for child in ast.iter_child_nodes(node.value):
            self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("create_task"):  # its argument is awaited elsewhere
            return
        if isinstance(node.func, ast.Attribute) and _blocks(node.func, node):
            self.found[f"{self._names[0]}:{'.'.join(self._names[1:])}"] += 1
        self.generic_visit(node)


def _blocks(method: ast.Attribute, call: ast.Call) -> bool:
    if any(keyword.arg in LIMITS for keyword in call.keywords):
        return False
    receiver = ast.unparse(method)
    if SELECT.search(receiver):
        return len(call.args) < 4
    if re.search(r"stub\w*(\(.*\))?\.[A-Z]\w+$", receiver, re.IGNORECASE):  # a remote call
        return True
    if method.attr == "wait_for":
        return len(call.args) < 2
    return method.attr == "recv" or (method.attr in BLOCKING and not call.args)


def _calls(source: str, file: str = "file") -> Counter[str]:
    visitor = _Calls(file)
    visitor.visit(ast.parse(source))
    return visitor.found


def test_every_wait_without_a_limit_names_the_rule_by_which_it_ends() -> None:
    found = Counter[str]()
    for room in ("edl", "master", "ps", "trainer", "compat"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if not path.is_symlink() and "proto" not in path.parts:
                found += _calls(path.read_text(encoding="utf-8"), path.stem)
    rules = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    listed = Counter(name for names in rules.values() for name in names)
    assert found == listed, (
        "a call that can block for ever is added or gone. Read WAITS.md, and list it in "
        f"{LISTED.name} under the rule by which it ends.\n"
        f"not listed: {sorted((found - listed).elements())}\ngone: {sorted((listed - found).elements())}"
    )
    numbers = set(re.findall(r"^(\d+)\. ", (ROOT / "WAITS.md").read_text(encoding="utf-8"), re.M))
    assert {key.removeprefix("rule-") for key in rules} <= {*numbers, "none"}


def test_calls_that_can_block_are_found() -> None:
    source = """
class Link:
    def ask(self):
        self.thread.join()
        ", ".join(names)
        self.future.result()
        self.future.result(timeout=1)
        self.stub.Describe(request)
        self.stub.Describe(request, timeout=1)
        self.condition.wait_for(lambda: done)
        self.condition.wait_for(lambda: done, 3)
        select.select([connection], [], [])
        select.select([connection], [], [], 1)
        table.select(columns)
        connection.recv(4096)

async def serve():
    await event.wait()
"""
    assert _calls(source) == {"file:Link.ask": 6}
