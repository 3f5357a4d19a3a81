# SPDX-License-Identifier: Apache-2.0
"""The service of a fresh process that loads an export, as its users will, and compares the outputs.

Nothing of the process that has trained the model is here, not even TensorFlow's settings.

A `.keras` file is loaded with Keras alone; and with the user's module, where the file's note says that it
needs custom objects. Where Keras cannot load it so (a warning says so before the training), the module builds
the model, which then loads the file's weights. SavedModel and ONNX are loaded with their own libraries alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from edl.layers import rows_to_be_loaded
from edl.trainer.export import samples, saved_file
from edl.trainer.export.samples import TOLERANCES, Outputs, Sample
from edl.trainer.export.saved_file import FAILURES
from edl.trainer.export.verification import Found
from edl.trainer.model import user_model
from edl.trainer.runtime.error_report import format_error

NO_MEMORY = (MemoryError, tf.errors.ResourceExhaustedError)
Module: TypeAlias = Mapping[str, Any] | None  # the arguments of user_model.load; None without a module
# Takes an export, the sample and the module, and returns what is wrong with the export.
Look: TypeAlias = Callable[[Path, Sample, Module], str]


class Verifier:
    """What the process answers (trainer/records/reader_process.py)."""

    def look(self, name: str, path: Path, sample: Sample, module: Module) -> Found:
        """Load an export in the format `name`, and compare its outputs.

        Raises:
            MemoryError, ResourceExhaustedError: the process has too little memory to do so.
        """
        why = _wrong(LOOKS[name], path, sample, module)
        by_code = why and name == "keras" and module is not None
        if by_code and not _wrong(_built, path, sample, module):
            return Found(needs_code=why)
        return Found(why)


def _wrong(look: Look, path: Path, sample: Sample, module: Module) -> str:
    try:
        return look(path, sample, module)
    except NO_MEMORY:
        raise
    except FAILURES as error:
        return f"{path.name} cannot be loaded and run: {format_error(error)}"


def _keras(path: Path, sample: Sample, module: Module) -> str:
    needs_names = module is not None and saved_file.note(path)
    return _as_in_memory(path, saved_file.load(path, _loaded(module).names if needs_names else {}), sample)


def _built(path: Path, sample: Sample, module: Module) -> str:
    return _as_in_memory(path, built(path, _loaded(module), sample.features), sample)


def _loaded(module: Module) -> user_model.UserModel:
    assert module is not None
    return user_model.load(**module, with_data=False)


def built(path: Path, module: user_model.UserModel, features: Any) -> Any:
    """The model in a file that Keras cannot load: built by its own code, with the weights of the file.

    Args:
        features: the features of some records; None without records.
    """
    with rows_to_be_loaded():
        model = module.model()
        if features is not None:
            samples.outputs_of(model, features)  # one of its own class has no variables before
    if features is None:
        saved_file.mark_built(model)
    model.load_weights(path)
    return model


def _as_in_memory(path: Path, model: Any, sample: Sample) -> str:
    if sample.features is None:
        same = saved_file.weights_digest(model) == sample.weights
        return "" if same else f"{path.name} holds other weights than the model in memory"
    return _compared("keras", path, sample, samples.outputs_of(model, sample.features))


def _saved_model(path: Path, sample: Sample, module: Module) -> str:
    loaded = tf.saved_model.load(str(path))
    if "serving_default" not in loaded.signatures:
        return f"{path.name} has no signature serving_default"
    if sample.features is None:
        return ""
    with tf.device("/CPU:0"):
        inputs = {_in_signature(name): tf.constant(array) for name, array in sample.inputs.items()}
        found = loaded.signatures["serving_default"](**inputs)
    # As Keras flattens them: by their numbers, or by their names.
    names = [f"output_{number}" for number in range(len(found))]
    ordered = [found[name] for name in (names if set(names) == set(found) else sorted(found))]
    return _compared("savedmodel", path, sample, samples.flattened(ordered))


def _in_signature(name: str) -> str:
    """The name of an input in a SavedModel's signature: TensorFlow allows letters, digits and `_` there."""
    name = "".join(c if c.isalnum() else "_" for c in name)
    return name if name[:1].isalpha() else f"arg_{name}"


def _onnx(path: Path, sample: Sample, module: Module) -> str:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    if sample.features is None:
        return ""
    inputs = {
        n: array.astype(object) if array.dtype.kind in "US" else array for n, array in sample.inputs.items()
    }
    return _compared("onnx", path, sample, samples.flattened(session.run(None, inputs)))


LOOKS: dict[str, Look] = {"keras": _keras, "savedmodel": _saved_model, "onnx": _onnx}


def _compared(name: str, path: Path, sample: Sample, found: Outputs) -> str:
    allowed, off = TOLERANCES[name] + sample.tolerance, samples.difference(sample.outputs, found)
    if off <= allowed:
        return ""
    if np.isinf(off):
        shapes = [list(o.shape) for o in sample.outputs], [list(f.shape) for f in found]
        return f"{path.name} gives outputs of the shapes {shapes[1]}, the model in memory {shapes[0]}"
    return (
        f"{path.name} gives other outputs than the model in memory: they differ by {off:.2g} of the largest "
        f"one ({allowed:.2g} is allowed)"
    )
