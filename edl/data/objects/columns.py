# SPDX-License-Identifier: Apache-2.0
"""Conversion of pyarrow columns to NumPy arrays. Values do not change, or the column is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edl.errors import DataError

Types = Mapping[str, Any]  # by column: an argument of np.dtype()
Fills = Mapping[str, Any]  # by column: the value in place of null

_STORED = ("arrow.uuid", "arrow.json", "arrow.bool8", "arrow.fixed_shape_tensor")  # storages that are values


def for_columns(option: Any, columns: Sequence[str], besides: Sequence[str | None] = ()) -> dict[str, Any]:
    """An option by column: of a single value, the same one for all columns but those `besides`."""
    if option is None:
        return {}
    if isinstance(option, Mapping):
        return dict(option)
    return {name: option for name in columns if name not in besides}


def index_columns(schema: Any) -> list[str]:
    """The columns in which pandas keeps the index of a frame: labels of its rows, and no columns there."""
    described = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    return [name for name in described.get("index_columns", ()) if isinstance(name, str)]


@dataclass(frozen=True)
class Wanted:
    """A user's requirements on a file's columns.

    Args:
        types: NumPy types by column; other columns have the types of the file.
        fill: values for nulls, by column; nulls in other columns are refused.
        source: name of the file or the table, for messages.
        in_memory: the columns are those of a table, whose user has no options of a reader.

    Raises:
        DataError: a column cannot have the requested type.
    """

    source: str
    types: Types = field(default_factory=dict)
    fill: Fills = field(default_factory=dict)
    in_memory: bool = False

    def __post_init__(self) -> None:
        for name in self.types:
            self.arrow_type(name)

    def arrow_type(self, name: str) -> Any:
        """The requested pyarrow type; None for the type of the file.

        Raises:
            DataError: `dtype` names no type that pyarrow has.
        """
        import pyarrow

        if name not in self.types:
            return None
        try:
            kind = self.types[name]
            return pyarrow.from_numpy_dtype(np.dtype("O" if kind is None else kind))
        except (TypeError, pyarrow.ArrowNotImplementedError):
            raise DataError(
                f"{self.source}: dtype: column {name!r}: {self.types[name]!r} is no type of numbers, text or "
                "times (expected what np.dtype takes, e.g. 'int64', 'float32', str or 'datetime64[s]')"
            ) from None

    def refuse_missing(self, columns: Sequence[str], names: Sequence[str]) -> None:
        """Check that the file has all named columns.

        Raises:
            DataError: the file lacks a named column, or has two columns of one name.
        """
        for argument, named in (("names", names), ("dtype", self.types), ("fill", self.fill)):
            for name in named:
                if name not in columns:
                    where = "" if argument == "names" else f"{argument}: "
                    known = ", ".join(c if c == c.strip() else repr(c) for c in columns)
                    raise DataError(f"{self.source}: {where}column {name!r} is missing; there are {known}")
        for name in names or columns:
            if columns.count(name) > 1:
                raise DataError(
                    f"{self.source}: {columns.count(name)} columns have the name {name!r}; rename one, or "
                    "leave them out with names=[...]"
                )

    def array(self, name: str, column: Any, place: Callable[[int], str]) -> np.ndarray:
        """Convert a column to an array: [records], or [records, n, ...] for a column of lists.

        Args:
            column: a pyarrow.Array or pyarrow.ChunkedArray.
            place: returns the name of a record in messages, given its index in the column.

        Raises:
            DataError: a value is missing, a list differs in length, or the type has no NumPy equivalent.
        """
        import pyarrow
        import pyarrow.compute as pc
        from pyarrow import types

        shape = [len(column)]

        def place_of(value: int) -> str:
            return place(value // max(int(np.prod(shape[1:])), 1))

        while True:
            kind = column.type
            if types.is_dictionary(kind):
                column = _decoded(column)
            elif isinstance(kind, pyarrow.BaseExtensionType):
                column = self._storage(name, column)
                if hasattr(kind, "permutation"):  # a tensor of a fixed shape
                    self._refuse_no_list(name, column, place_of)
                    column = pc.list_flatten(column)
                    shape += kind.shape
            elif not is_list(kind):
                break
            else:
                self._refuse_no_list(name, column, place_of)
                lengths = np.asarray(pc.list_value_length(column))
                length = int(lengths[0]) if len(lengths) else max(getattr(kind, "list_size", 0), 0)
                if (lengths != length).any():
                    other = int((lengths != length).argmax())
                    raise DataError(
                        f"{place_of(other)}: column {name!r} has lists of lengths "
                        f"{sorted({length, int(lengths[other])})}; all must be of one length"
                    )
                column = pc.list_flatten(column)
                shape.append(length)
        column = self._cast(name, column)
        if column.null_count:
            column = self._filled(name, column, place_of, "has a null in a list" if shape[1:] else "is empty")
        self._refuse_objects(name, column.type)
        options = {} if hasattr(column, "chunks") else {"zero_copy_only": False}
        return np.asarray(column.to_numpy(**options)).reshape(shape)

    @staticmethod
    def _refuse_no_list(name: str, column: Any, place: Callable[[int], str]) -> None:
        if column.null_count:
            where = place(_first(column.is_null()))
            raise DataError(f"{where}: column {name!r} has no list; a list is needed")

    def _storage(self, name: str, column: Any) -> Any:
        """The storage of a column of an extension type, if it has the values.

        Raises:
            DataError: the storage has something else than the values.
        """
        kind = column.type
        order = list(getattr(kind, "permutation", None) or ())
        if kind.extension_name not in _STORED or order != sorted(order):
            raise DataError(
                f"{self.source}: column {name!r} has the extension type {kind.extension_name!r}, which has "
                "no array type; leave it out with names=[...], or write its storage"
            )
        return column.cast(kind.storage_type)

    def _cast(self, name: str, column: Any) -> Any:
        import pyarrow

        wanted = self.arrow_type(name)
        if wanted is None and pyarrow.types.is_null(column.type) and name in self.fill:
            wanted = pyarrow.scalar(self.fill[name]).type
        if wanted is None or wanted == column.type:
            return column
        try:
            found = column.cast(wanted)
            _refuse_lost(column, found)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise DataError(
                f"{self.source}: column {name!r} is {column.type} and not {wanted}, as dtype says: {error}"
            ) from error
        return found

    def _filled(self, name: str, column: Any, place: Callable[[int], str], what: str) -> Any:
        import pyarrow
        import pyarrow.compute as pc

        if name not in self.fill:
            how = "fill it before" if self.in_memory else f"fill={{{name!r}: VALUE}} fills it"
            raise DataError(
                f"{place(_first(column.is_null()))}: column {name!r} {what}; a value is needed ({how})"
            )
        value = self.fill[name]
        try:
            scalar = pyarrow.scalar(value, column.type)
            if scalar.as_py() != value and value == value:  # such as 0.5 as int64; NaN differs from itself
                raise ValueError
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
            raise DataError(
                f"{self.source}: fill: column {name!r} is {column.type}, which cannot have the value "
                f"{value!r}"
            ) from None
        return pc.fill_null(column, scalar)

    def _refuse_objects(self, name: str, kind: Any) -> None:
        from pyarrow import types

        if types.is_decimal(kind) or types.is_time(kind):
            advice = f"dtype={{{name!r}: str}} reads it as text"
            if types.is_decimal(kind):
                advice = f"dtype={{{name!r}: 'float64'}} reads it as numbers, {advice}"
        elif any(of(kind) for of in (types.is_struct, types.is_map, types.is_union, types.is_interval)):
            advice = "leave it out with names=[...]"
        else:
            return
        if self.in_memory:
            advice = "convert it to numbers or text, or leave it out"
        raise DataError(f"{self.source}: column {name!r} is {kind}, which has no array type; {advice}")


def _decoded(column: Any) -> Any:
    """Decode a dictionary-encoded column (categories)."""
    import pyarrow

    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()  # only an Array can be decoded
    values = column.dictionary
    if pyarrow.types.is_string_view(values.type):  # from Polars; pyarrow cannot index these
        values = values.cast(pyarrow.large_string())
        column = pyarrow.DictionaryArray.from_arrays(column.indices, values)
    return column.dictionary_decode()


def _refuse_lost(column: Any, found: Any) -> None:
    """Check what pyarrow's safe cast lets pass: overflow to infinity, times of a day, truth of numbers.

    Raises:
        pyarrow.ArrowInvalid: a value has changed by more than the rounding of a float.
    """
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_floating(found.type):
        changed = pc.is_inf(found)
        if types.is_floating(column.type):
            changed = pc.and_not(changed, pc.is_inf(column))
        elif _is_text(column.type):
            changed = pc.and_(changed, pc.match_substring_regex(column, "[0-9]"))
    elif (types.is_boolean(found.type) and not _is_text(column.type)) or types.is_date(found.type):
        changed = pc.not_equal(found.cast(column.type), column)
    else:
        return
    if pc.any(changed).as_py():
        value = column[_first(changed.fill_null(False))].as_py()
        raise pyarrow.ArrowInvalid(f"{value!r} would change")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return any(of(kind) for of in (types.is_string, types.is_large_string, types.is_string_view))


def is_list(kind: Any) -> bool:
    """Whether a column of this pyarrow type has lists."""
    from pyarrow import types

    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    return any(of(kind) for of in (*lists, types.is_list_view, types.is_large_list_view))


def _first(truth: Any) -> int:
    return int(np.asarray(truth).argmax())
