# SPDX-License-Identifier: Apache-2.0
"""Tensors in a file: the format of safetensors, written and read without a copy of the state.

Eight bytes with the length of a header, the header as JSON, and the tensors' bytes one after the other
(little-endian). safetensors and all that builds on it read these files.

Promise: only pieces of the given arrays pass through here. A header is checked before any memory is allocated
for the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edl.errors import CheckpointDamaged, CheckpointError

PIECE = 4 << 20  # bytes that are written, read and hashed at once: they fit into the processor's cache
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

# By the name in NumPy and TensorFlow: the name in safetensors, and the bytes of one value.
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# For dtypes with infinities: NumPy's dtype of the bits of a value, and the mask of its exponent.
_EXPONENT = {
    "float64": ("<u8", 0x7FF << 52),
    "float32": ("<u4", 0x7F800000),
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of any dtype, by its bytes.

    Args:
        dtype: its name in NumPy and TensorFlow. Values of dtypes that safetensors lacks are kept as bytes.
        data: little-endian, in C order. Not copied: it must not change while it is written.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        data = memoryview(self.data).cast("B")
        object.__setattr__(self, "data", data)
        if wrong := misfit(self.dtype, self.shape, len(data)):
            raise ValueError(wrong)

    @staticmethod
    def of(array: Any) -> Tensor:
        """The value of a NumPy array, without a copy if its memory is contiguous."""
        return Tensor(array.dtype.name, tuple(array.shape), array.reshape(-1).view("uint8").data)


def misfit(dtype: str, shape: tuple[int, ...], nbytes: int) -> str:
    """Why a value of this type does not take `nbytes` bytes; empty: it does, or the type is unknown."""
    expected = math.prod(shape) * DTYPES[dtype][1] if dtype in DTYPES else nbytes
    return f"{dtype} {list(shape)} takes {expected} bytes, not {nbytes}" if expected != nbytes else ""


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file of these tensors, and the order of their bytes."""
    # Largest values first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: -DTYPES.get(tensors[name].dtype, ("", 1))[1])
    entries: dict[str, Any] = {}
    start = 0
    for name in names:
        tensor = tensors[name]
        stop = start + len(tensor.data)
        kept, shape = (
            (DTYPES[tensor.dtype][0], list(tensor.shape))
            if tensor.dtype in DTYPES
            else ("U8", [stop - start])
        )
        entries[name] = {"dtype": kept, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def pieces(tensors: Mapping[str, Tensor], finite: Collection[str] = ()) -> Iterator[memoryview]:
    """The whole file, piece by piece.

    Args:
        finite: names of tensors whose values must be finite.

    Raises:
        CheckpointError: a value of these tensors is not finite.
    """
    head, names = header(tensors)
    yield memoryview(head)
    for name in names:
        data, dtype = tensors[name].data, tensors[name].dtype if name in finite else ""
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            if dtype in _EXPONENT and not _is_finite(piece, *_EXPONENT[dtype]):
                raise CheckpointError(f"variable {name!r} is not finite: a state with it is not kept")
            yield piece


def _is_finite(piece: memoryview, kind: str, exponent: int) -> bool:
    """Whether none of the values has all bits of its exponent set, which is how infinity and NaN look."""
    import numpy as np  # imported here because the master, which only reads, has no NumPy

    bits = np.frombuffer(piece, kind)
    return not ((bits & exponent) == exponent).any()


def layout(head: bytes, size: int) -> dict[str, int]:
    """The tensors of a file in their order in the file, each with its number of bytes.

    Args:
        head: the header, without the length before it.
        size: number of bytes that follow the header.

    Raises:
        CheckpointDamaged: `head` is not the header of a file of tensors with this size.
    """  # noqa: DOC501 (caught below)
    try:
        entries = json.loads(head.decode("utf-8"))
        entries.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        found, end = {}, 0
        for start, stop, name in spans:
            if type(start) is not int or type(stop) is not int or start != end or stop < start:
                raise ValueError(f"{name!r} does not begin where the tensor before it ends")
            found[name], end = stop - start, stop
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"not a file of tensors: {error}") from error
    if end != size:
        raise CheckpointDamaged(f"its tensors take {end} bytes, {size} bytes follow the header")
    return found
