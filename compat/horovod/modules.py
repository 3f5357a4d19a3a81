# SPDX-License-Identifier: Apache-2.0
"""Installs the modules that a script imports as Horovod's.

`horovod.tensorflow` stays Horovod's own, with some names replaced. The modules that Horovod's wheel lacks
here, or that do not work on Keras 3, are made of this package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from edl.compat.horovod import callbacks, elastic, keras3, member, objects, optimizer, sync_batch_norm

PLACES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
MISSING = {  # horovod.run and horovod.runner are in the wheel, and refuse themselves (scripts/dev/horovodrun)
    "horovod.spark": "is not part of edl: it starts workers by Spark. Use `edl horovod -np N script.py`",
    "horovod.ray": "is not part of edl: it starts workers by Ray. Use `edl horovod -np N script.py`",
    "horovod.torch": "is not part of edl: its Horovod is built for TensorFlow",
    "horovod.mxnet": "is not part of edl: its Horovod is built for TensorFlow",
}


class _Refusing(MetaPathFinder):
    """Names the reason for which a module of Horovod cannot be imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if why := MISSING.get(name):
            raise ImportError(f"{name} {why}", name=name)
        return None


def install() -> None:
    """Install the modules. Call `member.become` first: they use the worker's ring."""
    if "horovod.keras" in sys.modules:
        return
    sys.meta_path.insert(0, _Refusing())
    made: dict[str, Any] = {}
    if not optimizer.is_keras2():
        keras3.install(optimizer.refuse_compile)
        made["SyncBatchNormalization"] = sync_batch_norm.SyncBatchNormalization
    made |= {
        "init": _init,
        "shutdown": lambda: None,  # the worker leaves its ring when its process ends
        **{name: _planned(name) for name in PLACES},
        **{f"{name}_op": _operation(_planned(name)) for name in ("local_rank", "local_size")},
        "broadcast_object": objects.broadcast_object,
        "allgather_object": objects.allgather_object,
        "broadcast_variables": broadcast_variables(hvd.broadcast_variables),
        "DistributedOptimizer": optimizer.distributed_optimizer,
        "elastic": elastic,
        **{name: _without_sets(name) for name in ("add_process_set", "remove_process_set")},
    }
    for name, value in made.items():
        setattr(hvd, name, value)
    sys.modules["horovod.tensorflow.elastic"] = elastic
    for name in ("horovod.tensorflow.keras", "horovod.keras"):
        module = types.ModuleType(name, "Horovod's interface to Keras, by edl.")
        module.__path__ = []
        parts = {"callbacks": callbacks, "elastic": elastic}
        shared = {known: value for known, value in vars(hvd).items() if not known.startswith("_")}
        module.__dict__.update(shared | parts | _KERAS)
        sys.modules[name] = module
        sys.modules |= {f"{name}.{part}": found for part, found in parts.items()}
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)


def _planned(name: str) -> Any:
    """A function that returns this worker's place in its next or present ring."""

    def place() -> int:
        return member.current().place(name)

    place.__name__ = name
    return place


def _operation(place: Callable[[], int]) -> Any:
    """An operation of TensorFlow with this value, where that of Horovod's own knows one worker only."""

    def operation(name: str | None = None) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda: np.int32(place()), [], tf.int32, name=name), [])

    return operation


def _init(comm: Any = None, process_sets: Any = None) -> None:
    """Form the ring, as hvd.init.

    Raises:
        ValueError: the script passes a communicator or process sets.
    """
    if comm is not None or process_sets:
        raise ValueError("hvd.init(comm=, process_sets=): not supported, because a ring can change")
    member.current().init()


def _without_sets(name: str) -> Any:
    """A function that refuses process sets, where Horovod names a variable that would not help."""

    def refuse(process_set: Any) -> None:
        raise ValueError(f"hvd.{name}: process sets are not supported, because a ring can change")

    return refuse


def broadcast_variables(engines: Any) -> Any:
    """hvd.broadcast_variables for variables of Keras 3 and of TensorFlow."""

    def broadcast(variables: Any, root_rank: int, **options: Any) -> Any:
        held = [v._value if isinstance(v, keras.Variable) else v for v in variables]
        if held and (options or not tf.executing_eagerly()):
            return engines(held, root_rank, **options)
        # Horovod traces a graph in each process, and the running workers wait for that of a new one.
        return member.current().broadcast(held, root_rank)

    return broadcast


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a Keras model, and distribute its optimizer."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    model.optimizer = optimizer.distributed_optimizer(model.optimizer, compression=compression)
    return model


def _collective(name: str, *arguments: str) -> Any:
    """A collective that takes and returns NumPy arrays or numbers, as Keras' interface has it.

    Args:
        arguments: the names of its arguments after the value, in the order of Keras' interface.
    """

    def call(value: Any, *given: Any, **options: Any) -> Any:
        options |= zip(arguments, given, strict=False)
        if options.pop("average", None) is False:
            options["op"] = hvd.Sum
        result = getattr(hvd, name)(tf.convert_to_tensor(value), **options)
        return result.numpy() if tf.executing_eagerly() else result

    return call


_KERAS = {
    "PartialDistributedOptimizer": optimizer.partial_distributed_optimizer,
    "load_model": load_model,
    "allreduce": _collective("allreduce", "name", "average"),
    "allgather": _collective("allgather", "name"),
    "broadcast": _collective("broadcast", "root_rank", "name"),
    "reducescatter": _collective("reducescatter", "name"),
}
