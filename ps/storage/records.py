# SPDX-License-Identifier: Apache-2.0
"""Log records: their kinds, and their format, which is the same in both update modes.

A record is one byte, its kind; what the server has decided about the request, as JSON with its length before
it; and the request as received. A replay makes the same decision again, and so gives the same state.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple, TypeAlias

from edl.contract.rows.wire import Bytes

# The first records of a segment: the state without rows, and the tables.
HEAD, TABLES = b"H", b"T"
WAITS = b"W"  # mode=ps: a push that precedes the segment and is not in the rows yet
# Updates.
BEGIN = b"B"  # initial rows
PUSH = b"P"  # the gradients of a step
APPLY = b"C"  # the pushed gradients are applied, or dropped
DUPLICATE, RESCHEDULE, KEEP = b"U", b"R", b"K"  # mode=ps
# Rings and resharding.
GENERATION, ASSIGN = b"S", b"A"
FETCH, PAGE, FETCHED = b"f", b"p", b"w"

_LENGTH = struct.Struct("<I")
Pieces: TypeAlias = list[Bytes]


class Record(NamedTuple):
    """A log record, as it is read.

    Args:
        said: what the server decided.
        raw: the request; empty if the decision says it all.
    """

    kind: bytes
    said: dict[str, Any]
    raw: bytes


def record(kind: bytes, raw: Bytes = b"", **said: Any) -> Pieces:
    """Return the pieces of a record; the last one, the request, may be large."""
    text = json.dumps(said).encode() if said else b""
    return [kind, _LENGTH.pack(len(text)), text, raw]


def read_record(data: bytes) -> Record:
    """Read the data of a record.

    Raises:
        ValueError: it is not a record.
    """
    start = 1 + _LENGTH.size
    end = start + int.from_bytes(data[1:start], "little")
    text = data[start:end]
    return Record(data[:1], json.loads(text) if text else {}, data[end:])
