# SPDX-License-Identifier: Apache-2.0
"""A reader over datasets that are indexed by record: PyTorch (map-style), Hugging Face, Grain, or custom."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from edl.data.base import CONVERT, DOCS
from edl.data.exact import stacked, to_array
from edl.data.nest import is_leaf_list, leaves, map_leaves
from edl.errors import DataError

SAMPLERS = "SequentialSampler", "RandomSampler"  # those of shuffle=False and shuffle=True


class Indexed:
    """A reader over an object with `__len__` and `__getitem__` whose items are records.

    A record is a number, text, an array or a list of numbers, or a tuple or dict of these. If the object has
    `__getitems__(indices)`, as defined by PyTorch and Hugging Face, this is called once for all records of a
    batch.

    Args:
        items: the dataset.
        source: its name, for messages.

    Attributes:
        classes_by_column: the names of classes by number, where the dataset has them.

    Raises:
        DataError: the number of records is not known.
    """

    def __init__(self, items: Any, source: str):
        self._items, self._source = items, source
        self.classes_by_column = _classes(items)
        try:
            self._length = len(items)
        except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
            raise DataError(f"{source}: the dataset does not know its length: {error}") from error
        if self._length == sys.maxsize:  # of Grain's MapDataset
            raise DataError(f"{source}: the dataset has no end (repeat()); give it without repeat")

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop), stacked: each array is [stop - start, ...].

        Raises:
            DataError: the records do not have the same structure and shapes.
        """
        return self.take(np.arange(start, stop))

    def take(self, indices: np.ndarray) -> Any:
        """Return the records at `indices`, stacked: each array is [len(indices), ...].

        Raises:
            DataError: the records do not have the same structure and shapes.
            ValueError: arrays cannot be stacked for another reason than their structure or shapes.
        """
        numbers = indices.tolist()
        records = self._records(numbers)
        try:
            return map_leaves(_stack, *map(with_arrays, records))
        except ValueError:
            self._refuse_first(numbers, records)
            raise

    def _records(self, numbers: list[int]) -> list[Any]:
        if hasattr(self._items, "__getitems__"):
            records = list(self._items.__getitems__(numbers))
            if len(records) != len(numbers):
                raise DataError(
                    f"{self._source}: __getitems__() gave {len(records)} records, not {len(numbers)}"
                )
            return records
        return [self._items[number] for number in numbers]

    def _refuse_first(self, numbers: list[int], records: list[Any]) -> None:
        """Raise an error for the first record that does not match.

        Raises:
            DataError: a record differs from the first in structure, shape or type.
        """
        for number, record in zip(numbers, records, strict=True):
            if record is None:
                raise DataError(
                    f"{self._source}: record {number} is None: a filter of Grain's MapDataset leaves records "
                    "without a value, which have no place in a batch; filter the data before, or write what "
                    f"is left to a file: {CONVERT} ({DOCS}#streams)"
                )
            where = f"{self._source}: record {number}"
            try:
                record = with_arrays(record)
            except ValueError as error:
                raise DataError(f"{where}: {error}") from error
            for path, value in leaves(record):
                try:
                    _stack(value)
                except ValueError as error:
                    raise DataError(f"{where}{_column(path)}: {error}") from error
            try:
                map_leaves(_stack, with_arrays(records[0]), record)
            except ValueError as error:
                raise DataError(
                    f"{where} does not go with record {numbers[0]}: {error}; all records must have the same "
                    "structure and shapes (pad or crop them in the dataset)"
                ) from error


class Collated(Indexed):
    """A reader over a `torch.utils.data.DataLoader`: its dataset, and its function that makes batches.

    The job decides which records a worker reads, in which order and how many at a time. So the loader's
    workers, its seed and `drop_last` have no effect.

    Args:
        loader: the loader.
        source: its name, for messages.

    Raises:
        DataError: the loader makes no batches, or has a sampler of its own.
    """

    def __init__(self, loader: Any, source: str):
        if loader.batch_size is None or type(loader.sampler).__name__ not in SAMPLERS:
            own = (
                "batch_size=None"
                if loader.batch_size is None
                else f"the sampler {type(loader.sampler).__name__}"
            )
            raise DataError(
                f"{source}: the DataLoader has {own}; the job decides which records a worker reads: give it "
                "batch_size= and shuffle= only"
            )
        self._collate = loader.collate_fn
        super().__init__(loader.dataset, source)

    def take(self, indices: np.ndarray) -> Any:
        """Return the records at `indices`, as the loader's `collate_fn` makes a batch of them.

        Raises:
            DataError: the batch has values that are no arrays.
        """
        batch = self._collate(self._records(indices.tolist()))
        try:
            return map_leaves(to_array, with_arrays(_plain(batch)))
        except ValueError as error:
            raise DataError(f"{self._source}: collate_fn: {error}") from error


def _plain(batch: Any) -> Any:
    """The batch with dicts in the place of other mappings, such as those of tokenizers."""
    return {key: _plain(value) for key, value in batch.items()} if isinstance(batch, Mapping) else batch


def with_arrays(record: Any) -> Any:
    """Convert each list of numbers in a record to an array. Hugging Face returns vectors as lists.

    Raises:
        ValueError: NumPy would change a value of a list.
    """
    if isinstance(record, dict):
        found = {}
        for key, value in record.items():
            try:
                found[key] = with_arrays(value)
            except ValueError as error:
                raise ValueError(f"column {key!r}: {error}") from error
        return found
    if isinstance(record, list) and (not record or is_leaf_list(record)):
        return to_array(record)
    if isinstance(record, tuple) and not hasattr(record, "_fields"):
        return tuple(map(with_arrays, record))
    return record


def _stack(*values: Any) -> np.ndarray:
    return stacked(list(map(to_array, values)))


def _classes(items: Any) -> dict[str, tuple[str, ...]]:
    """The names of the classes by number, by column: of Hugging Face and of torchvision's folders."""
    numbers = getattr(items, "class_to_idx", None)
    if isinstance(numbers, dict):
        return {"labels": tuple(map(str, sorted(numbers, key=lambda name: int(numbers[name]))))}
    features = getattr(items, "features", None)
    named = features.items() if isinstance(features, dict) else ()
    return {str(column): tuple(f.names) for column, f in named if isinstance(getattr(f, "names", None), list)}


def _column(path: str) -> str:
    """The place of a value in a record, for messages: ", column 'age'"."""
    named = re.fullmatch(r"\['([^']*)'\]", path)
    return f", column {named[1]!r}" if named else f", {path}" if path else ""
