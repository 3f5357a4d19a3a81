# SPDX-License-Identifier: Apache-2.0
"""Checks of a user's model as one file (`model.source`), made before any worker is started for it.

The master only parses the file; it does not run or import anything. So certain mistakes are refused here (not
Python, no model(), a data() without a parameter). Mistakes that only show when the file runs (a function made
by an import or an assignment, or one that returns no model) are left to the worker.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import symtable
import warnings
from collections.abc import Collection, Iterable, Iterator

MAX_CHARACTERS = 262_144
MAX_BYTES = 786_432  # with JSON's escapes: a ConfigMap holds 1 MiB, including the job's other values
# The functions of a model file, and how each is called.
CONTRACT = {
    "model": "model()",
    "data": "data(split) or data()",
    "feed": "feed(records) or feed(records, split)",
}
# Functions that a module of ElasticDL's contract must have, beside custom_model() or CustomModel.
ELASTICDL = ("loss", "optimizer", "feed", "eval_metrics_fn")
_ELASTICDL = re.compile(rb"^(def custom_model|class CustomModel)\b", re.MULTILINE)
_EDL = re.compile(rb"^def (model|data)\b", re.MULTILINE)
FROM_FIT = (
    "edl makes the calls of fit() itself: let model() return the compiled model and data(split) the arrays "
    "(docs/coming-from-fit.md)"
)
SAFE_ENCODINGS = ("utf-8", "utf8", "utf-8-sig", "ascii", "us-ascii")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def digest(source: str) -> str:
    """Digest of the model's text, as part of a run's identity: a different text is a different run."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_elasticdl(source: bytes) -> bool:
    """Whether a module has ElasticDL's contract: custom_model() or CustomModel, and no function of edl's."""
    return bool(_ELASTICDL.search(source)) and not _EDL.search(source)


def check(
    source: str,
    name: str = "model.source",
    most: int | None = MAX_CHARACTERS,
    contract: bool = True,
    with_data: bool = True,
    named: Collection[str] = (),
) -> list[str]:
    """List the mistakes in a model's text, one line each; empty if workers may try it.

    Args:
        source: the text of the Python file.
        name: name of the file in the messages.
        most: greatest number of characters; None if the text need not fit into a ConfigMap.
        contract: whether the file is to define the functions of CONTRACT; a script need not.
        with_data: the file must have data(), because no value such as data.train names the records.
        named: the file has functions of ElasticDL's contract under these names (model.functions).
    """
    if most is not None and len(source) > most:
        return [
            f"{name}: {len(source):,} characters; at most {most:,} fit into a ConfigMap. "
            "Put a large model, or one of several files, into an image or on a volume"
        ]
    if most is not None and (size := _size(source)) > MAX_BYTES:
        return [f"{name}: {size:,} bytes as JSON; at most {MAX_BYTES:,} fit into a ConfigMap"]
    if not source.strip("\ufeff \t\r\n"):
        what = " with model() and data(split)" if contract else ""
        return [f"{name}: is empty (expected a Python file{what})"]
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        return [f"{name}: line {source.count(chr(10), 0, error.start) + 1}: not UTF-8"]
    if wrong := _encoding(source):
        return [f"{name}: {wrong}"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker shows the warnings about the user's text
            text = source.removeprefix("\ufeff")
            tree = ast.parse(text, name)
            table = symtable.symtable(text, name, "exec")
            # Finds a `return` outside a function, and the like.
            compile(tree, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        line = f": {error.text.strip()[:80]}" if error.text and error.text.strip() else ""
        return [f"{name}: {where}{error.msg}{line}"]
    except ValueError as error:  # a zero byte
        return [f"{name}: not Python: {error}"]
    except (RecursionError, MemoryError):
        return [f"{name}: nested too deeply for Python to read"]
    if not contract:
        return []
    if wrong := _horovod(tree, name):
        return [f"{name}: {wrong}"]
    if named or is_elasticdl(source.encode("utf-8")):
        return [f"{name}: {line}" for line in _elasticdl(tree, table, with_data, named)]
    return [f"{name}: {line}" for line in _contract(tree, table, with_data)]


def line_of_fit(tree: ast.Module, own: Collection[str] = ()) -> int:
    """Return the line in which a script of Keras calls `fit`; 0 if it does not, or uses edl or Horovod.

    Args:
        own: modules that may use edl for the script.
    """
    imported = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                imported.add(module.partition(".")[0])
    if not imported & {"keras", "tensorflow", "tf_keras"} or imported & {"edl", "horovod", *own}:
        return 0
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    fits = [c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "fit"]
    return min(fits, default=0)


def _size(source: str) -> int:
    """Size in bytes of the text as written by Helm: JSON in UTF-8, where <, > and & take six bytes each."""
    written = json.dumps(source, ensure_ascii=False).encode("utf-8", "replace")
    return len(written) + 5 * sum(source.count(escaped) for escaped in "<>&")


def _encoding(source: str) -> str:
    """Check the encoding that the file declares: it must be UTF-8, in which the text is transferred."""
    for number, line in enumerate(source.splitlines()[:2], 1):
        found = re.match(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", line)
        if found and found[1].lower().replace("_", "-") not in SAFE_ENCODINGS:
            return f"line {number}: names the encoding {found[1]}; save the file as UTF-8"
    return ""


def _contract(tree: ast.Module, table: symtable.SymbolTable, with_data: bool) -> Iterator[str]:
    """List the violations of the contract in docs/models.md."""
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    functions = {node.name for node in tree.body if isinstance(node, Function)}
    if not functions & {*CONTRACT} and not _anything(tree, bound) and (line := line_of_fit(tree)):
        yield f"line {line}: calls fit(), as a training script does. {FROM_FIT}"
        return
    for name in ("model", "data") if with_data else ("model",):
        if name not in bound and not _anything(tree, bound):
            near = bound & {f"get_{name}", f"build_{name}", f"make_{name}", f"custom_{name}", name.title()}
            hint = f"; it has {min(near)}()" if near else ""
            yield f"has no function {name}(){hint}. A model file defines model() and data(split)" + (
                ", or the values name the records (data.train)" if name == "data" else ""
            )
    last: dict[str, ast.stmt] = {}
    for statement in _statements(tree.body):
        last |= dict.fromkeys(_names(statement), statement)
    for name, call in CONTRACT.items():
        if isinstance(function := last.get(name), Function):
            yield from _function(function, call)


def _horovod(tree: ast.Module, name: str) -> str:
    """Refuse a model file that uses Horovod itself. A file that tries whether it can be imported may."""
    names, lines, first = set[str](), set[int](), 0
    for node in _unconditional(tree):
        match node:
            case ast.Import(names=imported):
                found = [a for a in imported if a.name.partition(".")[0] == "horovod"]
                names |= {alias.asname or "horovod" for alias in found}
            case ast.ImportFrom(module=str(module), names=imported, level=0):
                found = imported if module.partition(".")[0] == "horovod" else []
                names |= {alias.asname or alias.name for alias in found}
            case _:
                continue
        if found:
            first = first or node.lineno
            lines.add(node.lineno)
    lines |= {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names}
    if not first:
        return ""
    *most, last = map(str, sorted(lines))
    listed = f"{', '.join(most)} and {last}" if most else last
    return (
        f"line {first}: imports Horovod, and edl makes the ring of workers and averages gradients itself: "
        f"remove what uses Horovod (line{'s' * bool(most)} {listed}). A training script that was written for "
        f"Horovod runs unchanged: edl horovod -np N {name}"
    )


def _unconditional(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module and its functions that are in no `if` and no `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not isinstance(child, ast.If | ast.Try):
            yield child
            yield from _unconditional(child)


def _elasticdl(
    tree: ast.Module, table: symtable.SymbolTable, with_data: bool, named: Collection[str]
) -> Iterator[str]:
    """List what a module of ElasticDL's contract lacks."""
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    for function in ELASTICDL:
        if function not in bound and function not in named and not _anything(tree, bound):
            yield f"has no function {function}(), which ElasticDL's contract needs"
    if with_data:
        yield "has ElasticDL's contract, so values name its records: data.train is empty"


def _anything(tree: ast.Module, bound: set[str]) -> bool:
    """Whether the module may define names that its text does not show."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]) | ast.Global():
                return True
            case ast.Name(id="globals" | "vars" | "locals" | "exec" | "setattr"):
                return True
    return "__getattr__" in bound


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, including those in `if`, `try` and loops."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(statement, Function | ast.ClassDef):
                yield from _statements(getattr(statement, part, []))
        for inner in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _statements(inner.body)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.split(".")[0] for alias in names)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


def _function(function: Function, call: str) -> Iterator[str]:
    """Report a function of the contract whose parameters do not fit its call."""
    if function.decorator_list:
        return  # a decorator may return anything
    found, given = function.args, 0 if function.name == "model" else 1
    names = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    most, least = len(names), len(names) - len(found.defaults)
    misplaced = False
    if function.name == "feed":  # by the same rule as in trainer/model/user_model.py
        takes_split = most > 1 and names[1] == "split"
        given += takes_split
        misplaced = not takes_split and "split" in (*names, *(argument.arg for argument in found.kwonlyargs))
    elif function.name == "data" and not most and not found.vararg:
        given = 0  # data() gives all records
    if least > given or None in found.kw_defaults or (most < given and not found.vararg) or misplaced:
        yield f"line {function.lineno}: {function.name}({ast.unparse(found)}) is called as {call}"
