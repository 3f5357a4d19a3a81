# SPDX-License-Identifier: Apache-2.0
"""A few real records and what a model makes of them: with these, what was exported is compared.

They travel to another process as plain bytes (`packed`), with neither files nor pickled objects.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.trainer.export import saved_file
from edl.trainer.model.records import Records
from edl.trainer.model.user_model import UserModel
from edl.trainer.runtime.watchdog import Watch, unwatched

RECORDS = 8
KERAS_TOLERANCE, OTHER_TOLERANCE = 1e-5, 1e-4  # of the largest value of an output
EPSILONS = 8.0  # of the type that the model computes in: what reordered sums may differ by
HALF = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Sample:
    """Features, and the outputs of the model in memory for them.

    Args:
        features: the features from `feed`; None if no outputs can be compared, for the reason `why`.
        outputs: each flattened output of the model.
        weights: a digest of each of its variables.
        tolerance: how far outputs may be off, beyond the format's own tolerance.
    """

    features: Any
    outputs: tuple[np.ndarray, ...]
    weights: tuple[str, ...]
    why: str = ""
    tolerance: float = 0.0


def features_of(module: UserModel, watch: Watch = unwatched) -> Any:
    """Features of the first good held-out records, else of training records; None without any records.

    Args:
        watch: wraps each call of the user's code that reads.
    """
    for split in ("test", "train"):
        reader = module.reader(split)
        if reader is not None and len(reader):
            feed, transform = module.feed_of(split), module.transform_of(split)
            records = Records(reader, feed, module.name, watch, lenient=True, transform=transform)
            return records.these(records.first(RECORDS)).x
    return None


def of(model: keras.Model, features: Any, why: str = "") -> Sample:
    """Return the model's outputs for the features of some records.

    Args:
        features: the features; None if no records are available, for the reason `why`.
    """
    weights = digests(model)
    half = max((HALF.get(p, 0.0) for p in _computes_in(model)), default=0.0)
    if features is None:
        return Sample(None, (), weights, why, half * EPSILONS)
    try:
        _pack(features, [])
    except TypeError as error:
        return Sample(None, (), weights, str(error))
    try:
        outputs, again = outputs_of(model, features), outputs_of(model, features)
    except NotImplementedError as error:  # a model that is only trained, by its own step
        return Sample(None, (), weights, f"the model cannot be called: {error or 'it has no call()'}")
    sample = Sample(features, outputs, weights, "", half * EPSILONS)
    if difference(sample.outputs, again) > KERAS_TOLERANCE + sample.tolerance:
        return Sample(None, (), weights, "the model gives other outputs each time it is called")
    return sample


def outputs_of(model: Any, features: Any) -> tuple[np.ndarray, ...]:
    """Return each output of the model in inference, flattened.

    They are computed on the CPU, where results are the same everywhere.
    """
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(lambda a: None if a is None else tf.convert_to_tensor(a), features)
        return flattened(model(tensors, training=False))


def flattened(outputs: Any) -> tuple[np.ndarray, ...]:
    """Flatten a structure of outputs into arrays; None is left out."""
    return tuple(_plain(o) for o in keras.tree.flatten(outputs) if o is not None)


def _plain(output: Any) -> np.ndarray:
    array = np.asarray(keras.ops.convert_to_numpy(output) if not isinstance(output, np.ndarray) else output)
    return array.astype(np.float64) if array.dtype.kind not in "USObi" else array


def difference(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> float:
    """The largest difference, in proportion to the largest value of its output; inf: they are not alike."""
    if [o.shape for o in ours] != [t.shape for t in theirs]:
        return float("inf")
    return max((_difference(o, t) for o, t in zip(ours, theirs, strict=True)), default=0.0)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.dtype.kind in "USO":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    off = np.abs(a - b)[~same]
    finite = np.abs(a[np.isfinite(a)])
    largest = float(finite.max()) if finite.size else 0.0
    found = float(off.max() / max(largest, 1e-30))
    return found if np.isfinite(found) else float("inf")


def digests(model: Any) -> tuple[str, ...]:
    """The digest of each variable of the model, in its order."""
    return tuple(_digest(np.asarray(keras.ops.convert_to_numpy(v))) for v in saved_file.weights(model))


def _digest(array: np.ndarray) -> str:
    about = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(about + np.ascontiguousarray(array).tobytes()).hexdigest()


def _computes_in(model: keras.Model) -> set[str]:
    return {str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers()}


# --- on the way to another process


def packed(sample: Sample, about: dict[str, Any]) -> bytes:
    """The sample and a JSON map as one block of bytes.

    Args:
        about: further values that the other process needs.
    """
    found: list[np.ndarray] = []
    structure = _pack(sample.features, found)
    head = {
        **about,
        "features": structure,
        "leaves": len(found),
        "weights": sample.weights,
        "why": sample.why,
        "tolerance": sample.tolerance,
    }
    buffer = io.BytesIO()
    np.savez(buffer, np.frombuffer(json.dumps(head).encode(), np.uint8), *found, *sample.outputs)
    return buffer.getvalue()


def unpacked(data: bytes) -> tuple[Sample, dict[str, Any]]:
    """Read what `packed` has written: the sample, and all entries of its head."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        head_bytes, *found = (archive[f"arr_{i}"] for i in range(len(archive.files)))
    head = json.loads(head_bytes.tobytes())
    count = head["leaves"]
    features = _unpack(head["features"], found[:count])
    outputs, weights = tuple(found[count:]), tuple(head["weights"])
    return Sample(features, outputs, weights, head["why"], head["tolerance"]), head


def _pack(value: Any, found: list[np.ndarray]) -> Any:
    """The structure of nested features as JSON; their arrays are added to `found`.

    Raises:
        TypeError: one is neither dense nor text.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {"map": [[key, _pack(inner, found)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(inner, found) for inner in value]}
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(f"its features are {type(value).__name__}s, which cannot be kept as a sample")
    array = np.asarray(value)
    if array.dtype == object:  # text, as TensorFlow gives it
        array = array.astype(np.bytes_)
    elif array.dtype.kind == "V":  # bfloat16, which no file of NumPy's knows
        array = array.astype(np.float32)
    found.append(array)
    return {"leaf": len(found) - 1}


def _unpack(structure: Any, found: list[np.ndarray]) -> Any:
    if structure is None:
        return None
    ((kind, inner),) = structure.items()
    match kind:
        case "map":
            return {key: _unpack(each, found) for key, each in inner}
        case "list":
            return [_unpack(each, found) for each in inner]
        case "tuple":
            return tuple(_unpack(each, found) for each in inner)
        case _:
            return found[inner]
