# SPDX-License-Identifier: Apache-2.0
"""The functions of a module of ElasticDL's model zoo, as the functions that edl calls.

custom_model() or CustomModel, loss, optimizer,    model()
eval_metrics_fn, LearningRateScheduler
feed(dataset, mode, metadata)                      feed(records, split)
custom_data_reader                                 the reader of an address in `data`
callbacks                                          callbacks(), without LearningRateScheduler
PredictionOutputsProcessor                         write(outputs, ids)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from edl.compat.elasticdl.model import ByVersion, overridden
from edl.compat.elasticdl.records import Feed, Shards, raw_records, shards_of
from edl.compat.elasticdl.stand_ins import LearningRateScheduler, Metadata, importable, know_zoo
from edl.data import Reader
from edl.errors import ModelError

REQUIRED = ("loss", "optimizer", "feed", "eval_metrics_fn")
OPTIONAL = ("callbacks", "custom_data_reader")
PROCESSOR = "prediction_outputs_processor"
WORKER = 0  # the worker's id for process(): each record is processed once, whichever worker does it


class Contract:
    """A module of ElasticDL's contract.

    Args:
        module: the imported module.
        name: its name, for messages.
        functions: names of functions that differ from ElasticDL's, by the names of ElasticDL's flags:
            model, loss, optimizer, feed, eval_metrics_fn, callbacks, custom_data_reader and
            prediction_outputs_processor. A dotted name is one of a different module of the zoo.

    Raises:
        ModelError: a function is missing.
    """

    def __init__(self, module: ModuleType, name: str, functions: Mapping[str, str]):
        self._name, self.names = name, vars(module)
        self._functions: dict[str, Any] = {}
        for key in (*REQUIRED, *OPTIONAL):
            self._functions[key] = _found(module, name, functions.get(key, key), key, key in REQUIRED)
        # A module may have both: then custom_model() makes a CustomModel, which takes arguments.
        custom = functions.get("model") or (
            "CustomModel"
            if hasattr(module, "CustomModel") and not hasattr(module, "custom_model")
            else "custom_model"
        )
        self._functions["model"] = _found(module, name, custom, "model", True)
        processor = functions.get(PROCESSOR, "PredictionOutputsProcessor")
        self._processor = _found(module, name, processor, PROCESSOR, PROCESSOR in functions)
        self.feed = Feed(self._functions["feed"], lambda: self._metadata)
        self.write: Callable[[Any, Any], None] | None = self._write if self._processor is not None else None
        self.callbacks = self._callbacks if self._functions["callbacks"] is not None else None
        self._metadata: Any = Metadata()

    def model(self) -> keras.Model:
        """Return the user's model, compiled with the user's optimizer, loss and metrics.

        Raises:
            ModelError: the model, or a metric, is not one of Keras.
        """
        with importable():
            optimizer = self._functions["optimizer"]()
            for callback in self._all_callbacks():
                if isinstance(callback, LearningRateScheduler):
                    # A new optimizer: one whose learning rate was replaced cannot be saved as a SavedModel.
                    schedule = {"learning_rate": ByVersion(callback.schedule)}
                    optimizer = type(optimizer).from_config(optimizer.get_config() | schedule)
            model = self._functions["model"]()
            model = overridden(
                model, self._functions["loss"], self._functions["eval_metrics_fn"](), self._name
            )
            model.compile(optimizer=optimizer)
        return model

    def open(self, address: str, format: str, options: Mapping[str, Any]) -> Reader:
        """Return the undecoded records at an address, for feed().

        Args:
            address, format, options: as in `data`.

        Raises:
            DataError: the records cannot be read.
            ModelError: custom_data_reader() cannot be called.
        """
        custom = self._functions["custom_data_reader"]
        if custom is None:
            return raw_records(address, format, options)
        with importable():
            shards: Shards = shards_of(custom, address, options, self._name)
        self._metadata = shards.metadata
        return shards

    def _all_callbacks(self) -> list[Any]:
        function = self._functions["callbacks"]
        return list(function()) if function is not None else []

    def _callbacks(self) -> list[Any]:
        with importable():
            return [one for one in self._all_callbacks() if not isinstance(one, LearningRateScheduler)]

    def _write(self, outputs: Any, ids: Any) -> None:
        if isinstance(self._processor, type):
            self._processor = self._processor()
        self._processor.process(keras.tree.map_structure(tf.constant, outputs), WORKER)


def load(
    imported: Callable[[], ModuleType],
    name: str,
    path: Path | None = None,
    functions: Mapping[str, str] | None = None,
) -> Contract:
    """Import a module of ElasticDL's contract. Other errors of its import are not changed.

    Args:
        imported: imports it.
        path: its file, which may import others of its zoo; None if it is imported by its name.
        name, functions: see Contract.

    Raises:
        ModelError: it imports what edl has no stand-in for, or a function is missing.
    """  # noqa: DOC501 (raised again)
    if path is not None:
        know_zoo(path)
    with importable():
        try:
            module = imported()
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] in NEVER:
                raise ModelError(
                    f"{name}: imports {error.name}: {NEVER[error.name.partition('.')[0]]}"
                ) from error
            raise
        return Contract(module, name, functions or {})


NEVER = {
    "deepctr": "it works with Keras 2 only, and edl trains models of Keras 3",
    "odps": "edl does not read MaxCompute tables; export them to files",
}


def _found(module: ModuleType, name: str, function: str, key: str, required: bool) -> Any:
    """The function, or None if it is missing and not required.

    Raises:
        ModelError: it is missing and required, or it is not a function.
    """
    where, _, last = function.rpartition(".")
    found = getattr(importlib.import_module(where) if where else module, last, None)
    if isinstance(found, ModuleType):  # as after `from tensorflow.keras import callbacks`
        found = None
    if found is None and required:
        raise ModelError(
            f"{name}: the module has no {function}, which ElasticDL's contract needs (a different name "
            f"is given by "
            f"model.functions.{key})"
        )
    if found is not None and not callable(found) and key != PROCESSOR:
        raise ModelError(f"{name}: {function} is a {type(found).__name__} (expected a function)")
    return found
