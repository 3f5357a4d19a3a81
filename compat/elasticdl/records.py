# SPDX-License-Identifier: Apache-2.0
"""The records that a module's feed() parses, and feed() itself, as a function of a batch of records."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.compat.elasticdl.stand_ins import Metadata
from edl.data import Reader, open_files
from edl.data.exact import to_array
from edl.errors import DataError, ModelError

MODES = {"train": "training", "predict": "prediction"}  # by split; every other one: evaluation
MAX_RECORDS = 1 << 24  # no batch has more
CREATED_WITH = 64 * 8  # records_per_task that a reader is created with: ElasticDL's defaults


def raw_records(address: str, format: str, options: Mapping[str, Any]) -> Reader:
    """A reader over undecoded records: examples of RecordIO or TFRecord files, or lines of CSV files.

    Args:
        address: as in data.train.
        format: data.format; empty: by the name of the file. Other names are RecordIO's, as in ElasticDL.
        options: data.options.

    Raises:
        DataError: the files cannot be read, or have a different format.
    """
    lower = address.lower()
    if not format:
        named = {".csv": "csv", ".txt": "csv", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord"}
        format = next((kind for ending, kind in named.items() if lower.endswith(ending)), "recordio")
    if format in ("tfrecord", "recordio"):
        return open_files(address, format, raw=True, **options)
    if format in ("csv", "text"):
        return open_files(address, "text", **options)
    return open_files(address, format, **options)


class Shards:
    """The records of a custom_data_reader(): those of its shards, one after the other.

    Args:
        reader: an object with create_shards() and read_records(task).
        name: its address, for messages.

    Raises:
        DataError: create_shards() returned something else than (name, start, count) for each shard.
    """

    def __init__(self, reader: Any, name: str):
        self._reader, self._name = reader, name
        shards = reader.create_shards()
        if isinstance(shards, Mapping):  # of the time before 2020-12
            shards = [(shard, *place) for shard, place in shards.items()]
        try:
            self._shards = [(str(shard), int(start), int(count)) for shard, start, count in shards]
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name}: create_shards() must return a tuple (name, start, count) for each shard: {error}"
            ) from error
        self._ends = np.cumsum([0, *(count for _, _, count in self._shards)]).tolist()
        self._types = getattr(reader, "records_output_types", None) or tf.string
        self.metadata = getattr(reader, "metadata", Metadata())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop), in the structure of records_output_types.

        Raises:
            DataError: read_records() gives fewer records than asked for.
        """
        found: list[Any] = []
        for (name, first, count), begin in zip(self._shards, self._ends[:-1], strict=True):
            low, high = max(start, begin), min(stop, begin + count)
            if low >= high:
                continue
            shard = SimpleNamespace(
                name=name, start=first + low - begin, end=first + high - begin, indices=None
            )
            records = [*self._reader.read_records(SimpleNamespace(shard=shard, shard_name=name))]
            if len(records) != high - low:
                raise DataError(
                    f"{self._name}: read_records() gave {len(records)} records of shard {name!r}, and "
                    f"{high - low} were asked for ({shard.start} to {shard.end - 1})"
                )
            found += records
        return _columns(self._types, found)


def _columns(kind: Any, records: Sequence[Any]) -> Any:
    """The records as arrays [n, ...], in the structure of `kind`: a type, or a tuple or dict of types."""
    if isinstance(kind, Mapping):
        return {key: _columns(part, [record[key] for record in records]) for key, part in kind.items()}
    if isinstance(kind, list | tuple):
        return tuple(_columns(part, [record[n] for record in records]) for n, part in enumerate(kind))
    return _column(records, kind)


def _column(values: Sequence[Any], kind: Any) -> np.ndarray:
    if tf.as_dtype(kind) != tf.string:
        return np.array(values, tf.as_dtype(kind).as_numpy_dtype)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def shards_of(function: Callable[..., Any], address: str, options: Mapping[str, Any], name: str) -> Shards:
    """The records of a custom_data_reader(), at an address.

    Raises:
        ModelError: it takes none of these arguments.
    """
    try:
        inspect.signature(function).bind(data_origin=address, records_per_task=CREATED_WITH, **options)
    except TypeError as error:
        raise ModelError(
            f"{name}: custom_data_reader is called with data_origin, records_per_task"
            f"{''.join(f', {key}' for key in options)} (data.options): {error}"
        ) from error
    return Shards(function(data_origin=address, records_per_task=CREATED_WITH, **options), address)


class Feed:
    """ElasticDL's feed(dataset, mode, metadata) as a function of a batch of records.

    It is traced once for each mode: a pipeline that is made for each batch would trace the user's functions
    each time. `shuffle` in it has no effect, because edl has shuffled the records before.
    """

    def __init__(self, feed: Callable[..., Any], metadata: Callable[[], Any]):
        self._feed, self._metadata = feed, metadata
        self._traced: dict[tuple[str, Any], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, records: Any, split: str) -> Any:
        """Return (features, labels), or features if the mode is prediction.

        Args:
            records: raw records: arrays [n, ...].
            split: the split of these records.
        """
        mode = MODES.get(split, "evaluation")
        leaves = [_tensor(leaf) for leaf in keras.tree.flatten(records)]
        key = mode, tuple((leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves)
        with self._lock:
            if key not in self._traced:
                self._traced[key] = self._trace(mode, records, leaves)
        found = self._traced[key](*leaves)
        return keras.tree.map_structure(_plain, found)

    def _trace(self, mode: str, like: Any, leaves: Sequence[Any]) -> Callable[..., Any]:
        signature = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]

        @tf.function(input_signature=signature, autograph=False)
        def traced(*leaves: Any) -> Any:
            records = keras.tree.pack_sequence_as(like, [*leaves])
            dataset = self._feed(tf.data.Dataset.from_tensor_slices(records), mode, self._metadata())
            return dataset.batch(MAX_RECORDS).get_single_element()

        with _in_order():
            traced.get_concrete_function()
        return traced


@contextmanager
def _in_order() -> Iterator[None]:
    """Inside this context, the records of a dataset keep their order."""
    shuffle = tf.data.Dataset.shuffle
    tf.data.Dataset.shuffle = lambda dataset, *args, **named: dataset
    try:
        yield
    finally:
        tf.data.Dataset.shuffle = shuffle


def _tensor(leaf: Any) -> Any:
    leaf = to_array(leaf)
    return tf.constant(leaf.tolist(), tf.string) if leaf.dtype == object else tf.constant(leaf)


def _plain(value: Any) -> Any:
    return value if isinstance(value, tf.RaggedTensor | tf.SparseTensor) else value.numpy()
