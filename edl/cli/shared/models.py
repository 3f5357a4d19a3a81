# SPDX-License-Identifier: Apache-2.0
"""The models that can be trained, found without importing them: TensorFlow takes seconds to import.

Promise: models that are refused here cannot be trained on this machine. All other models are checked by the
workers, which import them.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from edl.config import model_check
from edl.config.job import Model
from edl.errors import EdlError, ModelError

ZOO = "edl.zoo"


def zoo() -> dict[str, str]:
    """The models of the zoo, each with the first line of its docstring; empty if no zoo is installed."""
    found = importlib.util.find_spec(ZOO)
    folders = [Path(folder) for folder in (found.submodule_search_locations or [] if found else [])]
    files = sorted(path for folder in folders for path in folder.glob("*.py") if path.stem != "__init__")
    return {path.stem: _summary(path) for path in files}


def check(module: str, with_data: bool = True, named: Collection[str] = ()) -> None:
    """Refuse a model.module that does not exist.

    Args:
        module: a name of the zoo, a dotted module, or the path of a Python file; as in
            `edl.trainer.model.user_model`.
        with_data: a file must have data(), because no value names the records.
        named: functions of ElasticDL's contract to which a value gives a name (model.functions).

    Raises:
        ModelError: the module does not exist, or the file is not a model.
    """
    if module.endswith(".py") or os.sep in module:
        _check_file(Path(module), with_data, named)
    elif "." in module:
        if not find(module):
            raise ModelError(
                f"model.module: module {module!r} not found on the Python path; "
                f"{_hint(module) or 'a file is given by its path, such as ./my_model.py'}"
            )
    elif module not in (known := zoo()):
        names = f"the zoo has {', '.join(known)}" if known else "no model zoo is installed"
        hint = _hint(module) or "a file is given by its path, such as ./my_model.py"
        raise ModelError(f"model.module: unknown model {module!r}; {hint} ({names})")


def check_script(model: Model, uses_integration: bool = False) -> None:
    """Refuse a model.script that is no file of Python, or that trains with Keras' fit() alone.

    Args:
        uses_integration: it is for a different system (`edl.integrations`), and may call fit() alone.

    Raises:
        ModelError: the file does not exist, it is not Python, or it does not use edl.
    """
    if model.has_script_text:
        return  # checked with the other values
    if not _is_file(path := Path(model.script)):
        raise ModelError(f"model.script: file {path} not found")
    text = read(path)
    if wrong := model_check.check(text, str(path), most=None, contract=False):
        raise ModelError("\n".join(wrong))
    beside = {found.stem for found in path.resolve().parent.iterdir()}
    if uses_integration:
        return
    if line := model_check.line_of_fit(ast.parse(text.removeprefix("\ufeff")), beside):
        raise ModelError(
            f"{path}: line {line}: calls fit() and no edl.join(): each worker would train alone. "
            f"{model_check.FROM_FIT}. A training loop of your own calls edl.join() (docs/custom-loops.md)"
        )


def read(path: Path) -> str:
    """Read the text of a Python file. `model_check.check` reports parts that are not UTF-8.

    Raises:
        EdlError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise EdlError(f"{path}: cannot read: {error.strerror}") from error


def _check_file(path: Path, with_data: bool, named: Collection[str]) -> None:
    if not _is_file(path):
        raise ModelError(f"model.module: file {path} not found")
    if wrong := model_check.check(read(path), str(path), None, with_data=with_data, named=named):
        raise ModelError("\n".join(wrong))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long for a file
        return False


def _hint(module: str) -> str:
    """Suggest a file in the current folder, or a similar name of the zoo."""
    near = difflib.get_close_matches(module, zoo(), 1)
    if (name := module.removeprefix("model_zoo.")) != module and name in zoo():
        near = [f"{ZOO}.{name}"]
    file = Path(f"{module.replace('.', os.sep)}.py")
    meant = [f".{os.sep}{file}"] if _is_file(file) else near
    return f"did you mean {meant[0]}?" if meant else ""


def find(module: str) -> ModuleSpec | None:
    """The spec of a module that a worker could import; None if it could not.

    importlib's own find_spec would import its packages.
    """
    top, *rest = module.split(".")
    # Workers add the current folder to Python's path before they import the module
    # (trainer/model/user_model.py).
    found: ModuleSpec | None = PathFinder.find_spec(top, [os.getcwd()]) or _find_top(top)
    name = top
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    return found


def _find_top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec has been imported already
        return sys.modules[name].__spec__


def _summary(path: Path) -> str:
    """The first line of a module's docstring."""
    try:
        text = ast.get_docstring(ast.parse(read(path)))
    except (SyntaxError, ValueError):
        return "cannot be parsed"
    return text.splitlines()[0] if text else ""
