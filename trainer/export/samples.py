# SPDX-License-Identifier: Apache-2.0
"""A few real records and the model's outputs for them: exports are compared with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from edl.trainer.export import formats, saved_file
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.records import Records
from edl.trainer.runtime.watchdog import Watch, unwatched

RECORDS = 8
TOLERANCES = {"keras": 1e-5, "savedmodel": 1e-4, "onnx": 1e-4}  # of the largest value of an output
EPSILONS = 8.0  # of the type that the model computes in: what reordered sums may differ by
SPECIAL = (tf.RaggedTensor, tf.SparseTensor)
HALF = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
Outputs: TypeAlias = Sequence[np.ndarray]


@dataclass(frozen=True)
class Sample:
    """Features, and the outputs of the model in memory for them; or its weights, if those can't be compared.

    Args:
        features: nested NumPy arrays; None if no outputs can be compared, for the reason `why`.
        inputs: the same features by the names that exports give to the model's inputs.
        outputs: each flattened output of the model.
        tolerance: how far outputs may be off, beyond the format's own tolerance.
        weights: the digest of the model's variables, if there are no features.
    """

    features: Any = None
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    outputs: Outputs = ()
    tolerance: float = 0.0
    weights: str = ""
    why: str = ""


def features_of(module: UserModel, watch: Watch = unwatched) -> Any:
    """Features of the first good held-out records, else of training records; None without any records.

    Args:
        watch: wraps each call of the user's code that reads.
    """
    for split in (module.validation, "train"):
        reader = module.reader(split)
        if reader is not None and len(reader):
            feed, transform = module.feed_of(split), module.transform_of(split)
            records = Records(reader, feed, module.name, watch, lenient=True, transform=transform)
            return records.batch_at(records.first(RECORDS)).x
    return None


def of(model: keras.Model, features: Any) -> Sample:
    """Return the model's outputs for the features of some records; None: there are no records."""
    types = {str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers()}
    tolerance = EPSILONS * max((HALF.get(name, 0.0) for name in types), default=0.0)
    if features is None:
        why = "there are no records"
    elif special := [f for f in keras.tree.flatten(features) if isinstance(f, SPECIAL)]:
        why = f"its features are {type(special[0]).__name__}s, which exports are not given"
    else:
        try:
            features = keras.tree.map_structure(lambda f: None if f is None else _array(f), features)
            outputs, again = outputs_of(model, features), outputs_of(model, features)
            if difference(outputs, again) <= TOLERANCES["keras"] + tolerance:
                return Sample(features, formats.inputs(model, features), outputs, tolerance)
            why = "the model gives other outputs each time it is called"
        except NotImplementedError as error:  # a model that is only trained, by its own step
            why = f"the model cannot be called: {error or 'it has no call()'}"
    return Sample(weights=saved_file.weights_digest(model), why=why)


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.bytes_) if array.dtype == object else array  # text, as TensorFlow gives it


def outputs_of(model: Any, features: Any) -> Outputs:
    """Return each output of the model in inference, flattened.

    They are computed on the CPU, where results are the same everywhere.
    """
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(lambda a: None if a is None else tf.convert_to_tensor(a), features)
        return flattened(model(tensors, training=False))


def flattened(outputs: Any) -> Outputs:
    """Flatten a structure of outputs into arrays; None is left out."""
    return [_array(keras.ops.convert_to_numpy(o)) for o in keras.tree.flatten(outputs) if o is not None]


def difference(ours: Outputs, theirs: Outputs) -> float:
    """The largest difference, in proportion to the largest value of its output; inf: they are not alike."""
    if [o.shape for o in ours] != [t.shape for t in theirs]:
        return float("inf")
    return max(map(_difference, ours, theirs), default=0.0)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.dtype.kind in "US":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    off = np.abs(a[differ] - b[differ])
    largest = np.abs(a).max(where=np.isfinite(a), initial=1e-30)
    found = off.max(initial=0.0) / largest
    return float(found) if np.isfinite(found) else float("inf")
