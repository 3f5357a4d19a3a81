"""Messages of ps.proto that carry much, read and made without a copy of what they carry: protobuf makes one
when it reads a field of bytes, one when it gives it away, and as many on the way out.

What is read here is what protobuf would read, and what is made here is what it would make.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

Bytes: TypeAlias = bytes | memoryview
Pieces: TypeAlias = list[Any]  # of a message: one after the other, each with the protocol of buffers

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # how a field is written


class NotAMessage(ValueError):
    """These bytes are none."""


def fields(data: Bytes) -> Iterator[tuple[int, Any, int, int]]:
    """Of a message: each field's number, what it holds (an int, or a view of its bytes), and where it begins
    and ends.

    Raises:
        NotAMessage: they are not a message's.
    """
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
    """A message without its fields of this number, which are bytes or messages; and what these hold.

    Raises:
        NotAMessage: it is none.
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
    """
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
    """The pieces of a field of bytes, or of a message, that holds these pieces."""
    return [varint(number << 3 | BYTES) + varint(nbytes(pieces)), *pieces]


def nbytes(pieces: Pieces) -> int:
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
