# SPDX-License-Identifier: Apache-2.0
"""Bounds of the numbers in protocol messages, checked where a message arrives.

A number outside its bounds would do harm later and elsewhere. For example, a generation of 2^63 - 1 is a
legal int64, but the next generation is not: each worker that receives it dies of an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]

from edl.contract.modes import MAX_SERVERS

# Counts of steps, records, bytes and generations. JSON has no greater exact integer, and the sum of a
# thousand of them is still an int64.
MAXIMUM = 1 << 53
ANY = -(1 << 63), (1 << 63) - 1
# Fields that are not counts, by the name of their message and their own.
BOUNDS: dict[str, tuple[int, int]] = {
    "Hello.worker": (-1, MAXIMUM),  # -1: any vacant id
    "Predecessor.code": ANY,  # exit code of a process
    "Answer.code": (0, 16),  # a gRPC status code
    "ListRequest.after": ANY,  # an id is any int64
    "Steps.bounds": (0, 1 << 62),  # the greatest is the end of an unbounded range
    "Tables.seed": (0, (1 << 31) - 1),
    # A server lists the servers of an assignment: 2^31 of them would take all memory of its machine.
    "ShardAssignment.servers": (0, MAX_SERVERS),
    "ShardAssignment.replicas": (0, MAX_SERVERS),
    "ShardAssignment.out": (0, MAX_SERVERS - 1),
}
_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_REAL = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}
# Numbers of a model may be infinite or not a number; durations, speeds and tolerances may not.
_MEASURED = ("seconds", "rate", "speed", "median", "tolerance")


def violation(message: Message) -> str:
    """Describe the first field that is out of bounds: its value and the bounds; "" if all are within bounds.

    Nested messages are checked, too.
    """
    checks = _checks(message.DESCRIPTOR)
    for field, held in message.ListFields():
        if (check := checks.get(field.number)) is None:
            continue
        values = held.values() if _is_map(field) else held if field.is_repeated else (held,)
        for value in values:
            if found := check(value):
                return found
    return ""


@cache
def _checks(kind: Descriptor) -> dict[int, Callable[[Any], str]]:
    """The check of each field that has bounds, by the field's number."""
    found: dict[int, Callable[[Any], str]] = {}
    for field in kind.fields:
        of = field.message_type.fields_by_name["value"] if _is_map(field) else field
        name = f"{kind.name}.{field.name}"
        if of.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            found[field.number] = violation
        elif of.cpp_type in _WHOLE:
            found[field.number] = partial(_outside, name, *BOUNDS.get(name, (0, MAXIMUM)))
        elif of.cpp_type in _REAL and field.name.endswith(_MEASURED):
            found[field.number] = partial(_not_measured, name)
    return found


def _outside(name: str, low: int, high: int, value: int) -> str:
    return "" if low <= value <= high else f"{name} is {value}: expected {low} to {high}"


def _not_measured(name: str, value: float) -> str:
    return "" if 0 <= value < math.inf else f"{name} is {value}: expected a finite number, at least 0"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
