"""Finding a user's model: a zoo name, a dotted module, or the path of a Python file.

The contract is two plain functions and three optional ones:

    model()        a compiled Keras model
    data(split)    a reader for "train", and for "test" (or None: nothing is held out); for "validation"
                   where evaluation.split asks for it
    feed(records)  from what the reader gives to (features, labels[, weights]); feed(records, split) is also
                   given the split of the records
    callbacks()    Keras callbacks (trainer/callbacks.py)
    write(outputs, ids)  what is to be kept of predictions

The process has been started without the user's folders on Python's path (edl/contract/own_modules.py). They
are added here: the folder of the model's file, and the current folder. They come after the standard library
and after the product, so that a file of theirs replaces nothing of these, and before other packages, as for
a script that Python runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edl import scratch
from edl.contract.own_modules import PACKAGES
from edl.data import Reader
from edl.errors import ModelError

OPTIONAL = ("feed", "callbacks", "write")  # functions of the contract
_STDLIB = (sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}{os.sep}lib-dynload")
_models: set[str] = set()  # names of model files that this process has imported


@dataclass(frozen=True)
class UserModel:
    """A user's module, checked."""

    name: str
    model: Callable[[], Any]
    data: Callable[[str], Any]
    feed: Callable[..., Any] | None  # called through `feed_of`
    callbacks: Callable[[], Any] | None = None
    write: Callable[[Any, Any], Any] | None = None

    def reader(self, split: str) -> Reader | None:
        """The reader of `split`; only "train" must have one.

        Raises:
            ModelError: data(split) returned something that is no reader.
        """
        reader = self.data(split)
        if reader is None and split != "train":
            return None
        if not isinstance(reader, Reader):
            raise ModelError(
                f"{self.name}: data({split!r}) must return a reader (an object with __len__ and "
                f"read(start, stop), such as edl.arrays(x, y)), not {type(reader).__name__}"
            )
        try:
            len(reader)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{self.name}: __len__() of what data({split!r}) returns must give the number of records, an "
                f"integer of at least 0: {error}"
            ) from error
        return reader

    def feed_of(self, split: str) -> Callable[[Any], Any] | None:
        """The function that makes features, labels and weights of records of `split`; None without feed()."""
        feed = self.feed
        if feed is None or not _takes_split(feed, self.name):
            return feed
        return lambda records: feed(records, split)


def _takes_split(feed: Callable[..., Any], name: str) -> bool:
    """Whether feed() is called as feed(records, split): its second parameter is named `split`.
    edl/config/model_check.py checks the same without importing the module.

    Raises:
        ModelError: feed() can be called neither in this way nor as feed(records).
    """
    try:
        signature = inspect.signature(feed)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    positional = [
        p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes = len(positional) > 1 and positional[1].name == "split"
    try:
        signature.bind(*(("records", "split") if takes else ("records",)))
        if not takes and "split" in signature.parameters:
            raise TypeError("split is not the second positional parameter")
    except TypeError as error:
        raise ModelError(
            f"{name}: feed{signature} is called as feed(records) or feed(records, split): {error}"
        ) from error
    return takes


def load(name: str, source: str = "") -> UserModel:
    """Import the module that `name` means, or whose text `source` is. Errors of the user's own code pass as
    they are.

    Raises:
        ModelError: the module does not exist, or it lacks a function of the contract.
    """
    path: Path | None = None
    if source:
        # The run's own text, as the master has sent it: a volume could show a later one to a later worker.
        name = "model.source"
        path = scratch.of_this_process() / "model_source.py"
        path.write_text(source, encoding="utf-8")
    elif name.endswith(".py") or os.sep in name:
        path = Path(name)
    folders = [Path.cwd(), *([path.parent.resolve()] if path is not None else [])]
    _add_to_path(folders)
    try:
        module = _import_file(path) if path is not None else _import_module(name)
    except ImportError as error:
        if hidden := _hidden(error, folders):
            raise ModelError(f"{name}: {error}: {hidden}") from error
        raise
    functions: dict[str, Any] = {}
    for wanted in ("model", "data", *OPTIONAL):
        function = getattr(module, wanted, None)
        if isinstance(function, ModuleType):  # as after `from keras import callbacks`
            function = None
        if function is None and wanted in OPTIONAL:
            functions[wanted] = None
            continue
        if function is not None and not inspect.isroutine(function) and hasattr(function, "get_config"):
            kind = type(function).__name__
            raise ModelError(
                f"{name}: {wanted} is a {kind}, and must be a function that returns one. Write: "
                f"def {wanted}(): m = {kind}(...); m.compile(...); return m"
            )
        if not callable(function):
            raise ModelError(
                f"{name}: the module has no function {wanted}() (model() and data(split) are due)"
            )
        functions[wanted] = function
    if functions["feed"] is not None:
        _takes_split(functions["feed"], name)
    return UserModel(name, functions["model"], functions["data"], *(functions[name] for name in OPTIONAL))


def _add_to_path(folders: Sequence[Path]) -> None:
    """Let user code import modules of these folders; those of the last folder are found first."""
    for folder in map(str, folders):
        if folder not in sys.path:
            stdlib = [sys.path.index(path) for path in _STDLIB if path in sys.path]
            sys.path.insert(max(stdlib, default=-1) + 1, folder)
        # A project may have a package `trainer` of its own: those of its modules that ours lacks are found.
        for package in filter(None, map(sys.modules.get, PACKAGES)):
            own = os.path.join(folder, package.__name__)
            if os.path.isdir(own) and own not in package.__path__:
                package.__path__.append(own)


def _hidden(error: ImportError, folders: Sequence[Path]) -> str:
    """Which module of the user cannot be imported because another one has its name; empty: none."""
    if not error.name or (module := sys.modules.get(error.name)) is None:
        return ""
    origin = getattr(module, "__file__", None)
    for folder in folders:
        place = folder.joinpath(*error.name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file() and str(file) != origin:
                return f"{file} is hidden by {origin or 'a module that is built into Python'}; rename it"
    return ""


def _import_module(name: str) -> ModuleType:
    dotted = name if "." in name else f"model_zoo.{name}"
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not (dotted == error.name or dotted.startswith(f"{error.name}.")):
            raise  # the user's module exists and misses one of its own imports
        raise ModelError(f"model.module: there is no module {dotted!r} ({_known()})") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"model.module: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"model.module: {path} is not a Python file")
    if path.stem in sys.modules and path.stem not in _models:
        raise ModelError(
            f"model.module: {path} has the name of a module that edl uses ({path.stem}); rename the file"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that Keras can find the module's classes when it saves
    _models.add(path.stem)
    spec.loader.exec_module(module)
    return module


def _known() -> str:
    import model_zoo

    names = sorted(p.stem for p in Path(model_zoo.__path__[0]).glob("*.py") if p.stem != "__init__")
    return f"the zoo has {', '.join(names)}; a file is named by its path, e.g. ./my_model.py"
