# SPDX-License-Identifier: Apache-2.0
"""Requests as a server reads them: their large fields, ids and rows, are views of the bytes, not copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from edl.contract.bounds import violation
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import wire
from edl.contract.rows.wire import Bytes
from edl.ps.errors import Invalid
from edl.ps.table.table import Table

Message = TypeVar("Message")


@dataclass(frozen=True)
class Gradients:
    """The gradients or rows of one request, as views of its bytes."""

    raw: Bytes
    of: Mapping[int, tuple[np.ndarray, np.ndarray]]  # ids and values, by table


def tables_of(request: pb.Tables) -> list[Table]:
    """Create the tables that a request declares, without rows.

    Raises:
        Invalid: two tables have the same name, or a table is not valid.
    """
    names = [table.name for table in request.tables]
    if len(set(names)) != len(names):
        raise Invalid(f"tables {names}: expected each name once")
    return [Table(table, request.seed) for table in request.tables]


def read(parse: Callable[[bytes], Message], raw: Bytes, large: int) -> tuple[Message, list[memoryview]]:
    """Parse a request without its fields of number `large`, which are returned as views.

    Raises:
        Invalid: it is not a valid request.
    """
    try:
        rest, found = wire.without(raw, large)
        request = parse(rest)
    except (wire.NotAMessage, DecodeError) as error:
        raise Invalid(f"the request cannot be read: {error}") from error
    if outside := violation(request):
        raise Invalid(outside)
    return request, found


def read_push(raw: Bytes) -> tuple[pb.PushRequest, list[memoryview]]:
    """Parse a push; its gradients are views of `raw`, one for each table."""
    return read(pb.PushRequest.FromString, raw, pb.PushRequest.GRADIENTS_FIELD_NUMBER)


def read_begin(raw: Bytes) -> tuple[pb.BeginRequest, list[memoryview]]:
    """Parse a request with initial rows; the rows are views of `raw`, one for each table."""
    return read(pb.BeginRequest.FromString, raw, pb.BeginRequest.VALUES_FIELD_NUMBER)


def gradient_fields(one: memoryview) -> tuple[int, Bytes, Bytes]:
    """The table, ids and values of a pb.Gradients message, without copies.

    Raises:
        Invalid: the message is malformed.
    """
    try:
        found: dict[int, Any] = {number: held for number, held, _, _ in wire.fields(one)}
    except wire.NotAMessage as error:
        raise Invalid(f"gradients cannot be read: {error}") from error
    table, ids, values = found.get(_TABLE, 0), found.get(_IDS, b""), found.get(_VALUES, b"")
    if not isinstance(table, int) or isinstance(ids, int) or isinstance(values, int):
        raise Invalid("gradients: expected a table's number, ids and values")
    return table, ids, values


_TABLE, _IDS, _VALUES = (
    pb.Gradients.TABLE_FIELD_NUMBER,
    pb.Gradients.IDS_FIELD_NUMBER,
    pb.Gradients.VALUES_FIELD_NUMBER,
)


def ids_of(raw: Bytes) -> np.ndarray:
    """Read ids, int64 [n], from their bytes, without a copy.

    Raises:
        Invalid: the bytes are not a multiple of 8.
    """
    if len(raw) % 8:
        raise Invalid(f"{len(raw)} bytes of ids: expected a multiple of 8")
    return np.frombuffer(raw, np.int64)
