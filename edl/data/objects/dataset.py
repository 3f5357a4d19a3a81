# SPDX-License-Identifier: Apache-2.0
"""Conversion of any result of `data(split)` to a reader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.base import CONVERT, DOCS, Reader
from edl.data.objects.batched import Batched
from edl.data.objects.in_memory import Arrays, as_in_fit
from edl.data.objects.indexed import Collated, Indexed
from edl.data.objects.selected import with_roles
from edl.data.objects.tables import by_column, is_column, is_table
from edl.errors import DataError


def dataset(
    data: Any,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
    *,
    source: str = "dataset",
) -> Reader:
    """A reader over any indexable data.

    Args:
        data: one of these.

            - a reader, which is returned unchanged
            - an array, a table (pandas, Polars, Arrow), or a tuple, list or dict of them, as in Keras' `fit`:
              features; (features, labels); (features, labels, weights). A list counts as a tuple. A table
              with only numbers is one matrix; other tables are dicts of their columns.
            - a `keras.utils.PyDataset`
            - an object with `__len__` and `__getitem__` whose items are records
            - a `torch.utils.data.DataLoader`
        features, label, weight: columns of a table, or keys of records, that are the features (by default all
            others), the labels and the weights of the records. Several numeric features are one matrix if
            each is a vector, like the columns of a table; otherwise they are a dict.
        source: a name for messages.

    Raises:
        DataError: records are not accessible by index, or a column is missing or cannot be an array.
    """
    has_roles = not (features is None and label is None and weight is None)
    records = (
        Arrays(by_column(data, source), source) if has_roles and is_table(data) else _reader(data, source)
    )
    return with_roles(records, features, label, weight, source)


def _reader(data: Any, source: str) -> Reader:
    if isinstance(data, Reader) and not is_a(data, "keras", "PyDataset"):
        return data
    if is_loader(data):
        _refuse(data.dataset, source)
        return Collated(data, source)
    _refuse(data, source)
    if is_a(data, "keras", "PyDataset"):
        return Batched(data, source)
    if is_a(data, "torch", "TensorDataset"):
        data = tuple(data.tensors)
    if (
        is_table(data)
        or is_column(data)
        or isinstance(data, np.ndarray | tuple | list | dict)
        or _is_tensor(data)
    ):
        return Arrays(as_in_fit(data, source), source)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Indexed(_exact(data), source)
    raise DataError(
        f"{source} is of type {_kind(data)}, without __len__ and __getitem__; expected arrays, a table, a "
        f"dataset that is indexed, or a reader ({DOCS})"
    )


def _refuse(data: Any, source: str) -> None:
    """Refuse common kinds of data that are not supported.

    Raises:
        DataError: the records of `data` are not accessible by index.
    """
    if data is None:
        raise DataError(f"{source} is None; expected arrays, a table, a dataset or a reader ({DOCS})")
    if isinstance(data, str | bytes | os.PathLike):
        raise DataError(
            f"{source} is the path {os.fsdecode(data)!r}; expected a reader of that file, such as "
            f"edl.csv(path), edl.parquet(path) or edl.npy(path) ({DOCS})"
        )
    if is_a(data, "tensorflow", "DatasetV2"):
        raise DataError(
            f"{source} is a tf.data.Dataset, whose records cannot be had by index: workers that come and go "
            f"read records by number. If it fits in memory, give edl.from_tf(dataset) ({DOCS}#tfdata); "
            f"otherwise write it to a file once: {CONVERT} ({DOCS}#streams)"
        )
    if is_a(data, "datasets", "DatasetDict") or is_a(data, "datasets", "IterableDatasetDict"):
        raise DataError(
            f"{source} is a {type(data).__name__} of the splits {', '.join(map(str, data))}; return one of "
            "them, such as splits[split]"
        )
    if is_stream(data):
        raise DataError(
            f"{source} is of type {_kind(data)}, which gives records in a row, not by index: workers that "
            "come and go read records by number. Give a dataset with __len__ and __getitem__, or arrays, or "
            f"write it to a file once: {CONVERT} ({DOCS}#streams)"
        )


def _exact(data: Any) -> Any:
    """A dataset of Hugging Face with a format that changes no value; other datasets as they are.

    The formats of NumPy, PyTorch, TensorFlow and JAX cut zero bytes off the end of text, and make rounded
    floats of whole numbers where one is missing. Such records are read as values of Python, as are those that
    have the format of a table.
    """
    if not is_a(data, "datasets", "Dataset"):
        return data
    kind, names = data.format["type"], data.format["columns"]
    if kind in ("pandas", "polars", "arrow") or (
        kind in ("numpy", "torch", "tensorflow", "jax") and any(_loses(data.data.column(n)) for n in names)
    ):
        return data.with_format(None, columns=names)
    return data


def _loses(column: Any) -> bool:
    """Whether a format of Hugging Face would change values of a pyarrow column: text, or one with nulls."""
    import pyarrow.compute as pc
    from pyarrow import types

    while types.is_list(column.type) or types.is_large_list(column.type):
        if column.null_count:
            return True
        column = pc.list_flatten(column)
    is_text = any(of(column.type) for of in (types.is_string, types.is_binary, types.is_large_string))
    return is_text or types.is_large_binary(column.type) or column.null_count > 0


def is_stream(data: Any) -> bool:
    """Whether `data` gives its elements in a row only: a generator, an iterator or an `IterableDataset`."""
    if is_a(data, "torch", "IterableDataset"):  # which inherits __getitem__, and may have __len__
        return True
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return not is_indexed and (hasattr(data, "__next__") or hasattr(data, "__iter__"))


def is_loader(data: Any) -> bool:
    """Whether `data` is a `torch.utils.data.DataLoader`."""
    return is_a(data, "torch", "DataLoader")


def is_a(data: Any, package: str, name: str) -> bool:
    """Whether `data` is an instance of a library's class; the library need not be imported for that."""
    return any(
        cls.__name__ == name and cls.__module__.partition(".")[0] == package for cls in type(data).__mro__
    )


def _is_tensor(data: Any) -> bool:
    return hasattr(data, "__array__") and hasattr(data, "shape") and hasattr(data, "dtype")


def _kind(data: Any) -> str:
    cls = type(data)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
