"""Finding a user's model: a zoo name, a dotted module, or the path of a Python file.

The contract is two plain functions and three optional ones:

    model()        a compiled Keras model
    data(split)    a reader, or what `edl.dataset` takes, for "train", and for "test" (or None: nothing is
    held
                   out); for "validation" where evaluation.split asks for it
    feed(records)  from what the reader gives to (features, labels[, weights]); feed(records, split) is also
                   given the split of the records
    callbacks()    Keras callbacks (trainer/callbacks/callbacks.py)
    write(outputs, ids)  what is to be kept of predictions
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edl import scratch
from edl.data import Reader, dataset
from edl.errors import DataError, ModelError
from edl.trainer.model import user_import

OPTIONAL = ("feed", "callbacks", "write")  # functions of the contract


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
            ModelError: the records of what data(split) returned cannot be had by index.
        """
        data = self.data(split)
        if data is None and split != "train":
            return None
        try:
            reader = dataset(data, source=f"data({split!r})")
        except DataError as error:
            raise ModelError(f"{self.name}: {error}") from error
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
    """Import the module named `name`, or the module whose text is `source`. Errors of the user's code are not
    changed.

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
    module = user_import.import_file(path) if path is not None else user_import.import_module(name)
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
