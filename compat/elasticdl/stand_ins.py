# SPDX-License-Identifier: Apache-2.0
"""The packages that modules of ElasticDL's zoo import: as much of them as a module needs in a worker of edl.

They can be imported only inside `importable()`, and are forgotten at its end: the user's environment has no
package of these names afterwards. A module or a name that has no stand-in is refused by its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from edl.compat.elasticdl import preprocessing
from edl.compat.elasticdl.operations import DenseFeatures, dispatched
from edl.data import Reader, open_files
from edl.errors import ModelError
from edl.layers import Embedding

PACKAGES = ("elasticdl", "elasticdl_preprocessing")


class Mode:
    """elasticdl.python.common.constants.Mode."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class MaxComputeConfig:
    """Names of environment variables for MaxCompute tables, which edl does not read."""

    PROJECT_NAME = "MAXCOMPUTE_PROJECT"
    ACCESS_ID = "MAXCOMPUTE_AK"
    ACCESS_KEY = "MAXCOMPUTE_SK"
    ENDPOINT = "MAXCOMPUTE_ENDPOINT"
    TUNNEL_ENDPOINT = "MAXCOMPUTE_TUNNEL_ENDPOINT"


class LearningRateScheduler(keras.callbacks.Callback):
    """A learning rate for each model version: the number of updates before this one.

    Args:
        schedule: a function from the version to a rate.
    """

    def __init__(self, schedule: Callable[[int], float]):
        super().__init__()
        self.schedule = schedule


class BasePredictionOutputsProcessor:
    """The base class of PredictionOutputsProcessor."""

    def process(self, predictions: Any, worker_id: int) -> None:
        raise NotImplementedError


class Metadata(NamedTuple):
    """Names and types of the columns of the records, for feed()."""

    column_names: Sequence[str] | None = None
    column_dtypes: Mapping[str, Any] | None = None


class AbstractDataReader:
    """The base class of the readers that custom_data_reader() returns."""

    def __init__(self, **options: Any):
        pass

    @property
    def records_output_types(self) -> Any:
        return tf.string

    @property
    def metadata(self) -> Any:
        return Metadata()


class _Files(AbstractDataReader):
    """A reader of ElasticDL's, over one of edl's: one shard with all records."""

    def __init__(self, reader: Reader, name: str):
        super().__init__()
        self._reader, self._name = reader, name

    def create_shards(self) -> list[tuple[str, int, int]]:
        return [(self._name, 0, len(self._reader))]

    def read_records(self, task: Any) -> Iterator[Any]:
        yield from np.asarray(self._reader.read(task.shard.start, task.shard.end), object)


class RecordIODataReader(_Files):
    """RecordIODataReader(data_dir=DIR)."""

    def __init__(self, **options: Any):
        super().__init__(open_files(options["data_dir"], "recordio", raw=True), options["data_dir"])


class TextDataReader(_Files):
    """TextDataReader(filename=FILE): each line is a record."""

    def __init__(self, filename: str, records_per_task: int | None = None, **options: Any):
        super().__init__(open_files(filename, "text"), filename)


def embedding(
    output_dim: int,
    input_dim: int | None = None,
    embeddings_initializer: Any = "uniform",
    mask_zero: bool = False,
    input_length: int | None = None,
    combiner: str | None = None,
    **others: Any,
) -> Embedding:
    """elasticdl.python.elasticdl.layers.embedding.Embedding, as the layer of edl."""
    return Embedding(
        output_dim,
        combiner=combiner,
        initializer=embeddings_initializer,
        input_dim=input_dim or None,
        mask_zero=mask_zero,
        float_ids=True,
        **others,
    )


def embedding_column(
    categorical_column: Any,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> Any:
    """ElasticDL's embedding_column, whose rows are a variable of the model here."""
    return tf.feature_column.embedding_column(
        categorical_column, dimension, combiner, initializer, max_norm=max_norm, trainable=trainable
    )


def declare_model_inputs(*names: str) -> Callable[[type], type]:
    """elasticdl_preprocessing.utils.decorators.declare_model_inputs: only a note for SQLFlow."""
    return lambda kind: kind


class ODPSWriter:
    """A writer of MaxCompute tables, which edl does not have.

    Raises:
        ModelError: always.
    """

    def __init__(self, *args: Any, **named: Any):
        raise ModelError("ODPSWriter: edl does not write MaxCompute tables; write files in process()")


def is_odps_configured() -> bool:
    """False: edl does not use MaxCompute."""
    return False


_PYTHON = "elasticdl.python"
MODULES: dict[str, dict[str, Any]] = {
    f"{_PYTHON}.common.constants": {"Mode": Mode, "MaxComputeConfig": MaxComputeConfig},
    f"{_PYTHON}.common.log_utils": {"default_logger": logging.getLogger("elasticdl")},
    f"{_PYTHON}.elasticdl.callbacks": {"LearningRateScheduler": LearningRateScheduler},
    f"{_PYTHON}.elasticdl.layers.embedding": {"Embedding": embedding},
    f"{_PYTHON}.elasticdl.feature_column.feature_column": {"embedding_column": embedding_column},
    f"{_PYTHON}.worker.prediction_outputs_processor": {
        "BasePredictionOutputsProcessor": BasePredictionOutputsProcessor
    },
    f"{_PYTHON}.data.odps_io": {"ODPSWriter": ODPSWriter, "is_odps_configured": is_odps_configured},
    f"{_PYTHON}.data.reader.data_reader": {
        "AbstractDataReader": AbstractDataReader,
        "Metadata": Metadata,
    },
    f"{_PYTHON}.data.reader.recordio_reader": {"RecordIODataReader": RecordIODataReader},
    f"{_PYTHON}.data.reader.text_reader": {"TextDataReader": TextDataReader},
    "elasticdl_preprocessing.utils.decorators": {"declare_model_inputs": declare_model_inputs},
    **preprocessing.MODULES,
}


# TensorFlow's private copy of Keras 2, and the modules that a module of the zoo imports in place of its own.
# A model of Keras 3 would not train layers of Keras 2: it does not find the variables in them.
_PRIVATE = "tensorflow.python.keras"
KERAS = {
    "backend": tf.keras.backend,
    "constraints": keras.constraints,
    "initializers": keras.initializers,
    "layers": keras.layers,
    "models": keras.models,
    "regularizers": keras.regularizers,
}


class _Module(ModuleType):
    """A stand-in: a name that it lacks is refused, unless Python itself asks for it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(self, "__path__"):  # of a package: it may be a module in it
            raise AttributeError(name)
        known = ", ".join(MODULES[self.__name__])
        raise ModelError(
            f"{self.__name__}.{name}: edl has no stand-in for this name of ElasticDL (it has {known})"
        )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in PACKAGES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        if not is_package and fullname not in MODULES:
            raise ModelError(
                f"{fullname}: edl has no stand-in for this module of ElasticDL; a model can import "
                f"{', '.join(name for name in MODULES if name.startswith(f'{package}.'))}"
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES.get(module.__name__, {}))


_FINDER = _Finder()
_lock = threading.RLock()


@contextmanager
def importable() -> Iterator[None]:
    """Inside this context, the stand-ins can be imported, and Keras is as a module of the zoo expects it."""
    with _lock, dispatched():
        nested = _FINDER in sys.meta_path
        if nested:
            yield
            return
        layers = [module.layers for module in (keras, tf.keras, sys.modules.get("tensorflow.keras", keras))]
        private = importlib.import_module(_PRIVATE)
        modules = {name: importlib.import_module(f"{_PRIVATE}.{name}") for name in KERAS}
        sys.meta_path.insert(0, _FINDER)
        for module in layers:
            module.DenseFeatures = DenseFeatures
        _set(private, KERAS)
        try:
            yield
        finally:
            _set(private, modules)
            sys.meta_path.remove(_FINDER)
            for module in layers:
                vars(module).pop("DenseFeatures", None)
            for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
                del sys.modules[name]


def _set(package: ModuleType, modules: Mapping[str, ModuleType]) -> None:
    """Let these modules be imported as those of the package."""
    for name, module in modules.items():
        setattr(package, name, module)
        sys.modules[f"{package.__name__}.{name}"] = module


def know_zoo(path: Path) -> None:
    """Let the module in this file import others of its zoo, as `model_zoo.FOLDER.MODULE`.

    The zoo is the nearest folder above that is called model_zoo; without one, the folder above the module's.
    """
    folder = path.absolute().parent
    zoo = next((above for above in (folder, *folder.parents) if above.name == "model_zoo"), None)
    # A folder beside its zoo would hide it where the module is called as its folder.
    places = [folder.parent, folder] if zoo is None else [zoo]
    origin = str(places[0] / "__init__.py")
    known = sys.modules.get("model_zoo")
    if known is None or known.__spec__ is None or known.__spec__.origin != origin:
        spec = importlib.machinery.ModuleSpec("model_zoo", None, origin=origin, is_package=True)
        spec.submodule_search_locations = [*map(str, places)]
        sys.modules["model_zoo"] = importlib.util.module_from_spec(spec)
