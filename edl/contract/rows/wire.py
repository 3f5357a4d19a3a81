# SPDX-License-Identifier: Apache-2.0
"""Large messages of ps.proto, parsed and serialized without copying their payload.

Protobuf copies a bytes field when it parses it, again when the field is accessed, and as often when it
serializes a message. The results here are equal to protobuf's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

Bytes: TypeAlias = bytes | memoryview
Pieces: TypeAlias = list[Any]  # consecutive pieces of a message; all support the buffer protocol

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # protobuf's wire types


class NotAMessage(ValueError):
    """These bytes are not a message."""


def fields(data: Bytes) -> Iterator[tuple[int, Any, int, int]]:
    """Iterate over the fields of a message: number, value (an int, or a view of its bytes), start and end.

    Raises:
        NotAMessage: the bytes are not a message.
    """  # noqa: DOC501 (caught below)
    view = memoryview(data)
    at, end = 0, len(view)
    try:
        while at < end:
            start = at
            key = view[at]
            at += 1
            if key > 127:
                key, at = _varint(view, start)
            kind = key & 7
            if kind in (VARINT, BYTES):
                value = view[at]
                at += 1
                if value > 127:
                    value, at = _varint(view, at - 1)
            elif kind in (EIGHT, FOUR):
                value = 8 if kind == EIGHT else 4
            else:
                raise NotAMessage(f"the field at byte {start} is of unknown kind {kind}")
            held: Any = value
            if kind != VARINT:
                at += value
                held = view[at - value : at]
            if at > end:
                raise IndexError
            yield key >> 3, held, start, at
    except IndexError:
        raise NotAMessage(f"the field at byte {start} ends beyond the message") from None


def without(data: Bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Remove the fields with this number, which are bytes or messages. Return the rest and their values.

    Raises:
        NotAMessage: the bytes are not a message.
    """
    view = memoryview(data)
    rest: list[memoryview] = []
    found: list[memoryview] = []
    since = 0
    for its, held, start, end in fields(view):
        if its == number:
            if isinstance(held, int):
                raise NotAMessage(f"field {number} is a number")
            if start > since:
                rest.append(view[since:start])
            found.append(held)
            since = end
    rest.append(view[since:])
    return b"".join(rest), found


def varint(value: int) -> bytes:
    """Encode a number as a varint.

    Args:
        value: 0 or more.
    """
    if value < 128:
        return bytes((value,))
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def carried(number: int, pieces: Pieces) -> Pieces:
    """The pieces of a bytes field or message field whose value is `pieces`."""
    return [varint(number << 3 | BYTES) + varint(nbytes(pieces)), *pieces]


def nbytes(pieces: Pieces) -> int:
    """Return the total size of the pieces in bytes; a piece is bytes or an array."""
    return sum(piece.nbytes if hasattr(piece, "nbytes") else len(piece) for piece in pieces)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise NotAMessage(f"the number at byte {at} is too long")
