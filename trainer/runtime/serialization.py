# SPDX-License-Identifier: Apache-2.0
"""Serialization of plain values: None, numbers, strings, bytes, NumPy arrays, and collections of them.

Promise: decoding runs no code, unlike unpickling. The decoded value equals the encoded one in type and value;
its arrays are new and writable.

Not msgpack: tuples, sets, deques, arrays, and integers of more than 64 bits (states of random generators have
some) would each need an extension type.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import ml_dtypes  # noqa: F401  so that NumPy knows bfloat16 by its name
import numpy as np

LENGTH = 8  # bytes of the JSON's length, which come first; the arrays' bytes follow the JSON
KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlain(Exception):
    """The value, or one of its entries, has a type that cannot be encoded."""


def encode(value: Any) -> bytes:
    """Return the value as bytes.

    Raises:
        NotPlain: the value, or one of its entries, has a different type.
    """
    pieces: list[bytes] = []
    try:
        tree = json.dumps(_tree(value, pieces)).encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise NotPlain(str(error)) from error
    return b"".join([len(tree).to_bytes(LENGTH, "little"), tree, *pieces])


def decode(data: bytes | memoryview) -> Any:
    """Return the value that `encode` has turned into these bytes."""
    view = memoryview(data)
    start = LENGTH + int.from_bytes(view[:LENGTH], "little")
    return _value(json.loads(bytes(view[LENGTH:start])), [view[start:]])


def _tree(value: Any, pieces: list[bytes]) -> Any:
    """Return the value as JSON; the bytes of arrays are appended to `pieces`, in their order.

    Raises:
        NotPlain: the value or a part of it is of a type that cannot be encoded.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__name__ in KINDS and KINDS[kind.__name__] is kind:
        return {kind.__name__: [_tree(inner, pieces) for inner in value]}
    if kind is dict:
        return {"dict": [[_tree(k, pieces), _tree(v, pieces)] for k, v in value.items()]}
    if kind is deque:
        return {"deque": [_tree(inner, pieces) for inner in value], "most": value.maxlen}
    if kind is bytes:
        pieces.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.generic) or kind is np.ndarray:
        if value.dtype.hasobject or value.dtype.names:
            raise NotPlain(f"an array of {value.dtype}")
        pieces.append(np.ascontiguousarray(value).tobytes())
        dtype = value.dtype.str if np.dtype(value.dtype.str) == value.dtype else value.dtype.name  # bfloat16
        return {"array" if kind is np.ndarray else "number": dtype, "shape": list(value.shape)}
    raise NotPlain(f"a {kind.__name__}")


def _value(tree: Any, rest: list[memoryview]) -> Any:
    """Return the value of this JSON. `rest` has one entry, the bytes of the arrays that are not read yet."""
    match tree:
        case {"dict": pairs}:
            return {_value(k, rest): _value(v, rest) for k, v in pairs}
        case {"deque": inner, "most": most}:
            return deque((_value(entry, rest) for entry in inner), most)
        case {"bytes": length}:
            return bytes(_next(length, rest))
        case {"array": name, "shape": shape}:
            return _array(name, shape, rest)
        case {"number": name, "shape": shape}:
            return _array(name, shape, rest)[()]
        case dict():
            ((kind, inner),) = tree.items()
            return KINDS[kind](_value(entry, rest) for entry in inner)
        case _:
            return tree


def _array(name: str, shape: list[int], rest: list[memoryview]) -> np.ndarray:
    dtype = np.dtype(name)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(bytes(_next(count * dtype.itemsize, rest)), dtype).reshape(shape).copy()


def _next(length: int, rest: list[memoryview]) -> memoryview:
    piece, rest[0] = rest[0][:length], rest[0][length:]
    return piece
