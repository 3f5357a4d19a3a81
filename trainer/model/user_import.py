# SPDX-License-Identifier: Apache-2.0
"""Imports a user's module under a name that no other module has, with its folder on Python's path.

Processes of edl start without the user's folders on Python's path (edl/contract/own_modules.py). The folder
of the model's file and the current folder are added here, after the standard library and before installed
packages, as for a script that Python runs: a file of theirs replaces no module of Python itself.

A file keeps its own name: `mine.py` is imported as `mine`, and in a package as `package.mine`. So relative
imports work, and helpers that import the model get the same module. If that name belongs to another module
(a model called keras.py, random.py or edl.py; a second model of one name), the file is imported as
`edl_user_mine` instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import edl
from edl.errors import ModelError

PRIVATE = "edl_user_"  # begins the name of a module whose own name is taken
_STDLIB = (sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}{os.sep}lib-dynload")


def import_file(path: Path) -> ModuleType:
    """Import a Python file; a second call with the same file runs it again, unless it is part of a package.

    Raises:
        ModelError: the file does not exist, is not Python, or imports a module that a module in use hides.
    """  # noqa: DOC501 (what _explained makes)
    if not path.is_file():
        raise ModelError(f"model.module: there is no file {path}")
    path = path.parent.resolve() / path.name  # not the target of a link: Kubernetes' folders for these change
    name, root = _own_name(path)
    folders = list(dict.fromkeys([Path.cwd(), root, path.parent]))
    _add_to_path(folders)
    try:
        if _is_free(name, path if root == path.parent else root / name.partition(".")[0], folders):
            if root != path.parent:
                return importlib.import_module(name)
            return _run(name, path)
        if root != path.parent:
            package, _, rest = name.partition(".")
            private = _private_name(package, root / package)
            if private not in sys.modules:
                _run(private, root / package / "__init__.py")
            return importlib.import_module(f"{private}.{rest}") if rest else sys.modules[private]
        return _run(_private_name(name, path), path)
    except (ImportError, AttributeError) as error:
        raise _explained(error, str(path), folders) from error


def import_module(name: str) -> ModuleType:
    """Import a dotted module of the user's, or `edl.zoo.NAME`.

    Raises:
        ModelError: the module does not exist, or imports a module that a module in use hides.
    """  # noqa: DOC501 (what _explained makes)
    folders = [Path.cwd()]
    _add_to_path(folders)
    dotted = name if "." in name else f"edl.zoo.{name}"
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not (dotted == error.name or dotted.startswith(f"{error.name}.")):
            raise _explained(
                error, name, folders
            ) from error  # the module exists and misses one of its imports
        raise ModelError(f"model.module: there is no module {dotted!r} ({_known()})") from error
    except (ImportError, AttributeError) as error:
        raise _explained(error, name, folders) from error


def _own_name(path: Path) -> tuple[str, Path]:
    """The dotted name of a file, and the folder from which Python finds it by this name."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts), root


def _is_free(name: str, place: Path, folders: Sequence[Path]) -> bool:
    """Whether the first part of `name` can only mean `place`: a file, or a package's folder."""
    top = name.partition(".")[0]
    if (loaded := sys.modules.get(top)) is not None:
        return _is_at(loaded.__spec__, place)
    if top in sys.builtin_module_names:
        return False
    own = set(map(str, folders))
    found = PathFinder.find_spec(top, [folder for folder in sys.path if os.path.abspath(folder) not in own])
    # Python prefers a file or a package in any folder to a folder without an __init__.py.
    return found is None or found.origin is None or _is_at(found, place)


def _is_at(spec: ModuleSpec | None, place: Path) -> bool:
    return spec is not None and spec.origin in (str(place), str(place / "__init__.py"))


def _private_name(name: str, place: Path) -> str:
    private, number = f"{PRIVATE}{name}", 1
    while (loaded := sys.modules.get(private)) is not None and not _is_at(loaded.__spec__, place):
        number += 1
        private = f"{PRIVATE}{name}_{number}"
    return private


def _run(name: str, path: Path) -> ModuleType:
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ModelError(f"model.module: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that Keras can find the module's classes when it saves
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folders: Sequence[Path]) -> None:
    """Let user code import modules of these folders; those of the last folder are found first."""
    for folder in map(str, folders):
        if folder not in sys.path:
            stdlib = [sys.path.index(path) for path in _STDLIB if path in sys.path]
            sys.path.insert(max(stdlib, default=-1) + 1, folder)
        # A project may have a folder `edl` of its own: modules in it that ours lacks are found.
        own = os.path.join(folder, "edl")
        if os.path.isdir(own) and own not in edl.__path__:
            edl.__path__.append(own)


def _explained(error: ImportError | AttributeError, what: str, folders: Sequence[Path]) -> Exception:
    """The error, or one that says which module hides the module that the user meant."""
    if isinstance(error, ImportError):
        name = error.name or ""
    else:
        name = error.obj.__name__ if isinstance(error.obj, ModuleType) else ""
    if name.partition(".")[0] == "model_zoo":
        return ModelError(f"{what}: {error}: the models of edl's zoo are imported as edl.zoo, not model_zoo")
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    for folder in folders if module is not None else ():
        place = folder.joinpath(*name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file() and str(file) != origin:
                hidden_by = origin or "a module that is built into Python"
                return ModelError(f"{what}: {error}: {file} is hidden by {hidden_by}; rename it")
    return error


def _known() -> str:
    spec = importlib.util.find_spec("edl.zoo")  # an image may have no zoo
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    names = sorted(p.stem for folder in folders for p in Path(folder).glob("*.py") if p.stem != "__init__")
    return f"the zoo has {', '.join(names)}; a file is named by its path, e.g. ./my_model.py"
