# SPDX-License-Identifier: Apache-2.0
"""Serialized `tf.train.Example` records as arrays, parsed by TensorFlow."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from edl.data.base import Reader
from edl.data.files.joined import Joined
from edl.data.objects.selected import with_roles
from edl.data.objects.structure import STRUCTURE, Structure
from edl.errors import DataError

Features = Mapping[str, Any] | Sequence[str] | str | None
_PARSED = {"float32", "int64", "bytes", "str", "string"}  # the types that an example has
_VALUES = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}


class Source(Protocol):
    """Serialized records of one file."""

    name: str

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return the records [start, stop)."""
        ...

    def take(self, indices: np.ndarray) -> list[bytes]:
        """Return the records at `indices`."""
        ...


def serialized(
    sources: Sequence[Source],
    features: Features,
    label: str | None,
    weight: str | None,
    raw: bool,
    is_near: bool,
    records_per_read: int = 1,
) -> Reader:
    """A reader over files of serialized records.

    Args:
        features, label, weight, raw: see `tfrecord`.
        is_near: whether single records can be read.
        records_per_read: see `Reader`.

    Raises:
        DataError: the first record is no example, or lacks a feature.
    """
    name = sources[0].name
    if raw:
        if not (features is None and label is None and weight is None):
            raise DataError(f"{name}: raw records have no features, label or weight; leave them to feed()")
        return _joined(
            sources, lambda source, records, numbers: _as_bytes(records), is_near, records_per_read
        )
    parser = _Parser(_spec(features, (label, weight), sources), takes_all=features is None)
    if features is None and label is None and weight is None and (written := _written(sources)) is not None:
        return _joined(sources, lambda *given: written.restore(parser(*given)), is_near, records_per_read)
    records = _joined(sources, parser, is_near, records_per_read)
    if isinstance(features, Mapping):
        features = None
    return with_roles(records, features, label, weight, name)


def _joined(sources: Sequence[Source], parse: Any, is_near: bool, records_per_read: int) -> Joined:
    def read(nth: int, start: int, stop: int) -> Any:
        return parse(sources[nth], sources[nth].read(start, stop), range(start, stop))

    def take(nth: int, indices: np.ndarray) -> Any:
        return parse(sources[nth], sources[nth].take(indices), indices.tolist())

    counts, names = [len(source) for source in sources], [source.name for source in sources]
    return Joined(counts, read, take if is_near else None, records_per_read, names=names)


def _as_bytes(records: Sequence[bytes]) -> np.ndarray:
    found = np.empty(len(records), object)
    found[:] = records
    return found


def feature_names(sources: Sequence[Source]) -> list[str]:
    """The features of the first record, with or without values.

    Raises:
        DataError: the first record is no example.
    """
    first = next((source for source in sources if len(source)), None)
    return [] if first is None else list(_example(first.read(0, 1)[0], first.name).features.feature)


def _spec(
    features: Features, others: Sequence[str | None], sources: Sequence[Source]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and shape of each feature.

    Raises:
        DataError: a feature has no fixed shape, or the first record is no example or lacks it.
    """
    name = sources[0].name
    if isinstance(features, Mapping):
        spec = {key: _kind(key, value, name) for key, value in features.items()}
        more = [key for key in others if key is not None and key not in spec]
    else:
        spec = {}
        names = [features] if isinstance(features, str) else list(features or ())
        more = list(dict.fromkeys([*names, *(key for key in others if key is not None)])) if names else []
    if spec and not more:
        return spec
    first = next((source for source in sources if len(source)), None)
    if first is None:
        raise DataError(f"{name}: has no records, so their features are unknown; give features as a dict")
    name, found = first.name, _inferred(first.read(0, 1)[0], first.name, more)
    for key in more or found:
        if key not in found:
            raise DataError(
                f"{name}: record 0: feature {key!r} is missing; there are {', '.join(found) or 'none'}"
            )
        spec[key] = found[key]
    for other in others:
        if other is not None and other not in spec:
            raise DataError(f"{name}: record 0: feature {other!r} is missing; there are {', '.join(found)}")
    return spec


def _kind(key: str, value: Any, name: str) -> tuple[str, tuple[int, ...]]:
    dtype: Any
    shape: tuple[int, ...]
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "default_value"):
        dtype, shape = value.dtype.name, tuple(int(n) for n in value.shape)
    elif isinstance(value, str | type):
        dtype, shape = value, ()
    elif isinstance(value, tuple | list) and len(value) == 2:
        dtype = value[0]
        shape = tuple(int(n) for n in (value[1] if isinstance(value[1], tuple | list) else (value[1],)))
    else:
        raise DataError(
            f"{name}: features: {key!r} is {value!r}; expected a type such as 'int64', a type with a shape "
            "such as ('float32', (28, 28)), or a tf.io.FixedLenFeature: records must have one shape"
        )
    if dtype in (str, bytes) or str(dtype) in ("str", "bytes", "string"):
        return "string", shape
    try:
        return np.dtype(dtype).name, shape
    except TypeError:
        raise DataError(f"{name}: features: {key!r}: {dtype!r} is no type of NumPy") from None


def _written(sources: Sequence[Source]) -> Structure | None:
    """The structure of records that `edl data convert` has written; None for others.

    Raises:
        DataError: the first record is no example, or its structure is damaged.
    """
    first = next((source for source in sources if len(source)), None)
    if first is None:
        return None
    return _structure(_example(first.read(0, 1)[0], first.name), first.name)


def _structure(example: Any, name: str) -> Structure | None:
    if STRUCTURE not in example.features.feature:
        return None
    try:
        return Structure.from_json(example.features.feature[STRUCTURE].bytes_list.value[0])
    except (ValueError, IndexError) as error:
        raise DataError(f"{name}: record 0: feature {STRUCTURE!r}: {error}") from error


def _example(record: bytes, name: str) -> Any:
    train = _tensorflow().train
    try:
        return train.Example.FromString(record)
    except Exception as error:  # google.protobuf.message.DecodeError
        raise DataError(
            f"{name}: record 0 is no tf.train.Example: {error}; raw=True returns the records as bytes, for "
            "feed()"
        ) from error


def _inferred(first: bytes, name: str, wanted: Collection[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and shape of the features of a record.

    Args:
        wanted: the features that must have a type; empty: all.

    Raises:
        DataError: the record is no example, or a wanted feature has no values.
    """
    example = _example(first, name)
    if (written := _structure(example, name)) is not None:
        return written.columns
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key in sorted(example.features.feature):
        feature = example.features.feature[key]
        kind = feature.WhichOneof("kind")
        if kind is None and wanted and key not in wanted:
            continue
        if kind is None:
            raise DataError(
                f"{name}: record 0: feature {key!r} has no values, so its type is unknown; give features as "
                "a dict, or name those that are wanted"
            )
        count = len(getattr(feature, kind).value)
        found[key] = _VALUES[kind], () if count == 1 else (count,)
    if not found:
        raise DataError(
            f"{name}: record 0 has no features of a tf.train.Example; raw=True returns the records as bytes"
        )
    return found


class _Parser:
    """Parses records of a specification.

    Args:
        takes_all: no feature may be left out.
    """

    def __init__(self, spec: Mapping[str, tuple[str, tuple[int, ...]]], takes_all: bool = False):
        self._spec, self._takes_all = dict(spec), takes_all

    def __call__(self, source: Source, records: Sequence[bytes], numbers: Sequence[int]) -> Any:
        """Return the arrays of the records by feature.

        Raises:
            DataError: a record is no example, or a feature of it is missing or has another type or size.
        """
        tf = _tensorflow()
        wanted = {
            key: tf.io.FixedLenFeature(
                shape if kind in _PARSED else (), kind if kind in _PARSED else "string"
            )
            for key, (kind, shape) in self._spec.items()
        }
        try:
            with tf.device("CPU"):
                parsed = tf.io.parse_example(tf.constant(list(records), tf.string, [len(records)]), wanted)
        except tf.errors.OpError as error:
            if len(records) > 1:  # find the record
                for record, number in zip(records, numbers, strict=True):
                    self(source, [record], [number])
            raise DataError(
                f"{source.name}: record {numbers[0]} is not as features says: {_explained(error, self._spec)}"
            ) from error
        if self._takes_all:
            for record, number in zip(records, numbers, strict=True):
                self._refuse_more(record, f"{source.name}: record {number}")
        arrays = {key: parsed[key].numpy() for key in self._spec}
        for key, (kind, shape) in self._spec.items():
            if kind not in _PARSED:
                arrays[key] = _decoded(arrays[key], key, np.dtype(kind), shape, source.name, numbers)
        return arrays

    def _refuse_more(self, record: bytes, where: str) -> None:
        """Refuse a record with more than the specification, which TensorFlow's parser would drop.

        Raises:
            DataError: the record has other features, or is a SequenceExample.
        """
        found = _tensorflow().train.SequenceExample.FromString(record)  # an Example is one without sequences
        if sequences := sorted(found.feature_lists.feature_list):
            raise DataError(
                f"{where} is a tf.train.SequenceExample: its sequences {', '.join(sequences)} are no "
                "features of a tf.train.Example and would be dropped; name features of its context, or read "
                "the records with raw=True and parse them in feed() (tf.io.parse_sequence_example)"
            )
        for key in found.context.feature:
            if key not in self._spec and key != STRUCTURE:
                raise DataError(
                    f"{where}: has the feature {key!r}, which record 0 lacks; name the features that are "
                    "wanted"
                )


def _decoded(
    values: np.ndarray, key: str, kind: np.dtype, shape: tuple[int, ...], name: str, numbers: Sequence[int]
) -> np.ndarray:
    size = int(np.prod(shape)) * kind.itemsize
    for value, number in zip(values, numbers, strict=True):
        if len(value) != size:
            raise DataError(
                f"{name}: record {number}: feature {key!r} has {len(value)} bytes; expected {size} for "
                f"{kind} {list(shape)}"
            )
    return np.frombuffer(b"".join(values), kind).reshape(len(values), *shape)


def _explained(error: Any, spec: Mapping[str, Any]) -> str:
    """TensorFlow's message without its internal names, and the specification of the feature in question."""
    what = re.sub(r"\{\{.*?\}\} |Name: <unknown>, |Index: 0\.\s*|\s*\[Op:.*", "", str(error.message)).strip()
    key = re.search(r"(?:Key|Feature): (.+?)(?:\.  |,|\(| \(|$)", what)
    if key is None or key[1] not in spec:
        return what
    kind, shape = spec[key[1]]
    return f"{what} (feature {key[1]!r}: {kind} {list(shape)})"


def _tensorflow() -> Any:
    """TensorFlow, imported on first use: processes that read other formats do without it."""
    return importlib.import_module("tensorflow")
