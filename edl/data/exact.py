# SPDX-License-Identifier: Apache-2.0
"""Conversion of values in memory to NumPy arrays: exact, or refused with the reason.

NumPy converts nearly everything, and changes some values in silence: it cuts zero bytes off the end of text,
ignores masks, makes text of numbers beside text, rounds whole numbers beside floats, and lets dates overflow
that it converts to another unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

EXACT = 2**53  # whole numbers up to this are exact as float64
TEXT = frozenset("OSUT")  # kinds of arrays that hold text


def to_array(value: Any) -> np.ndarray:
    """Convert a number, text, an array, a tensor or a list of numbers or text to an array.

    Text becomes an array of objects, because NumPy's own types cut zero bytes off its end.

    Raises:
        ValueError: NumPy makes no array of the value, or would change it.
    """
    if isinstance(value, np.ma.MaskedArray):
        refuse_masked(value)
    if isinstance(value, str | bytes):
        return np.array(value, object)
    _refuse_palette(value)
    if hasattr(value, "columns") and len(set(map(str, getattr(value, "dtypes", ())))) > 1:
        raise ValueError("a table with columns of several types; give a dict of its columns")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of PyTorch with gradients
        raise ValueError(f"NumPy makes no array of a {type(value).__name__}: {error}") from error
    is_sequence = isinstance(value, Sequence) and not hasattr(value, "dtype")
    return _of_list(list(value), array) if is_sequence and array.ndim else array


def refuse_masked(array: Any) -> None:
    """Refuse a masked array, unless none of its values is masked.

    Raises:
        ValueError: a value is masked.
    """
    masked = np.ma.getmaskarray(array)
    if masked.any():
        raise ValueError(
            f"{int(masked.sum())} of {masked.size} values are masked; fill them, as with array.filled(0), or "
            "leave their records out"
        )


def stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Stack arrays of one shape along a new first axis.

    Raises:
        ValueError: they differ in shape or kind, or have objects that are no text.
    """
    for array in arrays:
        if array.dtype == object:
            for value in array.flat:
                if value is None:
                    raise ValueError("None, so a value is missing; fill it, or leave the record out")
                if not isinstance(value, str | bytes):
                    kind = type(value).__name__
                    raise ValueError(f"a {kind}, which is not a number, text or array of these")
        if array.shape != arrays[0].shape:
            raise ValueError(f"shapes {arrays[0].shape} and {array.shape}")
    refuse_mixed(arrays)
    return np.stack(arrays)


def concatenated(*arrays: np.ndarray) -> np.ndarray:
    """Join arrays along their first axis.

    Raises:
        ValueError: they differ in kind or in the shape of an entry.
    """
    refuse_mixed(array for array in arrays if len(array))
    return np.concatenate(arrays)


def refuse_mixed(arrays: Iterable[np.ndarray]) -> None:
    """Refuse arrays of different kinds, which would change values if one array were made of them.

    Raises:
        ValueError: they differ in kind.
    """
    kinds = {_kind(array): array.dtype for array in arrays}
    if len(kinds) > 1:
        raise ValueError(f"arrays of {' and '.join(sorted(map(str, kinds.values())))}")


def _kind(array: np.ndarray) -> Any:
    """Equal for arrays that can be joined without a change of values."""
    if array.dtype.kind in TEXT:
        return "text"
    return array.dtype if array.dtype.kind in "mMV" else array.dtype.kind


def _refuse_palette(value: Any) -> None:
    """Refuse an image of Pillow with a palette, whose array would have the numbers of colours.

    Raises:
        ValueError: the value is one.
    """
    if getattr(value, "mode", None) in ("P", "PA") and hasattr(value, "getpalette"):
        raise ValueError('an image with a palette; convert it with image.convert("RGB")')


def _of_list(value: list[Any], array: np.ndarray) -> np.ndarray:
    """The array of a list, which NumPy has converted to `array`.

    Raises:
        ValueError: values have changed.
    """
    if value and hasattr(value[0], "mode"):
        for image in value:
            _refuse_palette(image)
    if array.dtype.kind in TEXT:
        array = np.array(value, object)
        if any(v is None for v in array.flat):
            raise ValueError("a list with None, so a value is missing; fill it, or leave the record out")
        kinds = {type(v).__name__ for v in array.flat if not isinstance(v, str | bytes)}
        if kinds and any(isinstance(v, str | bytes) for v in array.flat):
            raise ValueError(f"a list with text and values of type {' and '.join(sorted(kinds))}")
        return array
    if (
        array.dtype.kind in "mM"
        and len({getattr(v, "dtype", None) for v in np.array(value, object).flat}) > 1
    ):
        raise ValueError(
            "a list of dates with different units; convert them to one: .astype('datetime64[s]')"
        )
    if array.dtype.kind not in "fc":
        return array
    if np.isnan(array).any() and any(v is np.ma.masked for v in np.array(value, object).flat):
        raise ValueError("a list with a masked value; fill it, or leave the record out")
    if (np.abs(array) >= EXACT).any():
        given = np.array(value, object)
        for one, rounded in zip(given.flat, array.real.flat, strict=True):
            if isinstance(one, int | np.integer) and one != int(rounded):
                raise ValueError(
                    f"NumPy makes floats of a list with {one}, which rounds it to {int(rounded)}; give an "
                    "array with a type, e.g. np.array(values, np.uint64)"
                )
    return array
