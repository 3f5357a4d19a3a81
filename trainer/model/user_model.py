# SPDX-License-Identifier: Apache-2.0
"""Finding a user's model: a zoo name, a dotted module, or the path of a Python file.

The contract is two plain functions and four optional ones:

    model()        a compiled Keras model
    data(split)    a reader, or what `edl.dataset` takes, for "train", and for "validation" and "test" (or
                   None: nothing is held out). data() without a split gives all records. Not needed if
                   values name the records (trainer/records/splits.py)
    feed(records)  from what the reader gives to (features, labels[, weights]); feed(records, split) is also
                   given the split of the records
    transform(features, label)  one record to one record, traced by TensorFlow (trainer/records/transform.py)
    callbacks()    Keras callbacks (trainer/callbacks/callbacks.py)
    write(outputs, ids)  what is to be kept of predictions

A module of ElasticDL's contract has custom_model() or CustomModel instead (`edl.integrations.MODELS`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from edl import integrations, scratch
from edl.config import model_check
from edl.config.job import Config, Data
from edl.contract.evaluation import FINAL, PREDICTED, VALIDATION
from edl.data import Reader, dataset
from edl.data.formats.image_files import classes_of, number_as
from edl.data.same import KnownSplits
from edl.errors import DataError, ModelError
from edl.trainer.model import user_import
from edl.trainer.records.splits import Splits, are_same
from edl.trainer.records.transform import Transform, parameters

OPTIONAL = ("feed", "callbacks", "write", "transform")
CONTRACT = ("model", "data", *OPTIONAL)  # the functions of the contract


@dataclass
class Labels:
    """The numbers of the classes in a training's labels.

    Args:
        classes: their names by number; None: not known yet; empty: labels are numbers already.
    """

    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class UserModel:
    """A user's module, checked.

    Args:
        data: gives the records of a split, or None; `Splits` if the module was loaded.
        feed: called through `feed_of`.
        transform: called through `transform_of`.
        functions: names of functions of ElasticDL's contract, as in the values (model.functions).
        module_names: the module's names; None: those of the file that defines `model`.
        labels: the numbers of the classes, which are those of the training in every split.
        known: what is known of the splits that were opened.
        validation: the split that the model is evaluated on while it is trained.
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[str], Any]
    feed: Callable[..., Any] | None
    callbacks: Callable[[], Any] | None = None
    write: Callable[[Any, Any], Any] | None = None
    transform: Callable[..., Any] | None = None
    functions: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, Any] | None = None
    labels: Labels = field(default_factory=Labels)
    known: KnownSplits = field(default_factory=KnownSplits)
    validation: str = VALIDATION

    @property
    def names(self) -> Mapping[str, Any]:
        """The names that the module defines, for loading a model that was saved with its classes."""
        return getattr(self.model, "__globals__", {}) if self.module_names is None else self.module_names

    def reader(self, split: str) -> Reader | None:
        """The reader of `split`; only "train" must have one.

        Raises:
            ModelError: the records of what data(split) returned cannot be had by index.
            DataError: a record has a class that the training has not, the records have changed, or another
                split numbers the same classes differently.
        """
        reader = self._reader(split)
        if split == "train" and self.labels.classes is None:
            self.labels.classes = classes_of(reader)
        elif split != PREDICTED and classes_of(reader):  # the labels of a prediction are not used
            if self.labels.classes is None:
                self.labels.classes = classes_of(self._reader("train"))
            if self.labels.classes:
                number_as(reader, self.labels.classes, self.source(split))
        return reader

    def held_out(self) -> dict[str, Reader]:
        """The readers that a training evaluates the model on, by split; the last one gives the final results.

        `test` is one of them if it has records of its own: many a data() returns its held-out records for
        every split other than "train".

        Raises:
            ModelError, DataError: see reader().
        """
        found: dict[str, Reader] = {}
        for split in dict.fromkeys((self.validation, FINAL)):
            reader = self.reader(split)
            if reader is not None and not any(are_same(reader, other) for other in found.values()):
                found[split] = reader
        return found

    @property
    def advice(self) -> str:
        """A warning if the data are from before the split "validation" had its name; empty if not."""
        advice = getattr(self.data, "advice", None)  # of Splits
        return f"{self.name}: {told}" if advice is not None and (told := advice()) else ""

    def _reader(self, split: str) -> Reader | None:
        data = self.data(split)
        if data is None and split != "train":
            return None
        try:
            reader = dataset(data, source=self.source(split))
        except DataError as error:
            raise ModelError(f"{self.name}: {error}") from error
        try:
            len(reader)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{self.name}: __len__() of what {self.source(split)} returns must give the number of "
                f"records, an integer of at least 0: {error}"
            ) from error
        self.known.check(split, reader, f"{self.name}: {self.source(split)}")
        return reader

    def source(self, split: str) -> str:
        """Where the records of `split` come from, for people."""
        source = getattr(self.data, "source", None)  # of Splits
        return source(split) if source is not None else f"data({split!r})"

    def feed_of(self, split: str) -> Callable[[Any], Any] | None:
        """The function that makes features, labels and weights of records of `split`; None without feed()."""
        feed = self.feed
        if feed is None or not _takes_split(feed, self.name):
            return feed
        name = self._name_of(split)
        return lambda records: feed(records, name)

    def transform_of(self, split: str) -> Transform | None:
        """The transformation of the records of `split`: of those of the training, unless it takes a split."""
        if self.transform is None:
            return None
        if split != "train" and "split" not in parameters(self.transform, self.name)[1]:
            return None
        return Transform(self.transform, self._name_of(split), self.name)

    def _name_of(self, split: str) -> str:
        """The name by which the module knows a split."""
        name_of = getattr(self.data, "name_of", None)  # of Splits
        return split if name_of is None else str(name_of(split))


def _takes_split(feed: Callable[..., Any], name: str) -> bool:
    """True if feed() is called as feed(records, split): its second parameter is named `split`.

    edl/config/model_check.py checks the same without importing the module.

    Raises:
        ModelError: feed() can be called neither in this way nor as feed(records).
    """  # noqa: DOC501 (caught below)
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


def of_job(config: Config) -> UserModel:
    """Import the module of a job.

    Raises:
        ModelError: see load().
    """
    model = config.model
    found = load(model.module, model.source, config.data, config.training.seed, functions=model.functions)
    return replace(found, validation=config.evaluation.split)


def load(
    name: str,
    source: str = "",
    values: Data | None = None,
    seed: int = 0,
    with_data: bool = True,
    functions: Mapping[str, str] | None = None,
) -> UserModel:
    """Import the module named `name`, or the module whose text is `source`.

    Errors of the user's code are not changed.

    Args:
        values: the job's values in `data`, which may name records and say how many are held out.
        seed: training.seed, with which records are drawn that are held out.
        with_data: the module needs a data() if no value names records.
        functions: names of functions of ElasticDL's contract; the module has that contract if there are any.

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

    def imported() -> ModuleType:
        return user_import.import_file(path) if path is not None else user_import.import_module(name)

    if functions or (path is not None and path.is_file() and model_check.is_elasticdl(path.read_bytes())):
        return _of_elasticdl(imported, name, path, values, seed, functions or {})
    module = imported()
    named = values is not None and bool(values.addresses)
    optional = (*OPTIONAL, "data") if named or not with_data else OPTIONAL
    own = {wanted: _function(module, name, wanted, wanted in optional) for wanted in CONTRACT}
    if own["feed"] is not None:
        _takes_split(own["feed"], name)
    if own["transform"] is not None:
        parameters(own["transform"], name)
    data = Splits(name, own["data"], values, seed)
    return UserModel(name, own["model"], data, *(own[name] for name in OPTIONAL))


def _function(module: ModuleType, name: str, wanted: str, optional: bool) -> Any:
    """Return a function of the contract; None if the module does not have it, and it is optional.

    Raises:
        ModelError: the module lacks it, or has a model in its place.
    """
    function = getattr(module, wanted, None)
    if isinstance(function, ModuleType):  # as after `from keras import callbacks`
        function = None
    if function is None and optional:
        return None
    if function is not None and not inspect.isroutine(function) and hasattr(function, "get_config"):
        kind = type(function).__name__
        raise ModelError(
            f"{name}: {wanted} is a {kind}, and must be a function that returns one. Write: "
            f"def {wanted}(): m = {kind}(...); m.compile(...); return m"
        )
    if not callable(function):
        raise ModelError(
            f"{name}: the module has no function {wanted}() (model() is needed, and data(split) unless "
            "values such as data.train name the records)"
        )
    return function


def _of_elasticdl(
    imported: Callable[[], ModuleType],
    name: str,
    path: Path | None,
    values: Data | None,
    seed: int,
    functions: Mapping[str, str],
) -> UserModel:
    """Import a module of ElasticDL's contract.

    Raises:
        ModelError: the module lacks a function of that contract, or imports what edl has no stand-in for.
    """
    load_module = integrations.load(integrations.MODELS["elasticdl"], name)
    found = load_module(imported, name, path, functions)
    data = Splits(name, None, values, seed, found.open)
    return UserModel(
        name,
        found.model,
        data,
        found.feed,
        found.callbacks,
        found.write,
        functions=functions,
        module_names=found.names,
    )
