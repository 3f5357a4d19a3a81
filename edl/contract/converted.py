# SPDX-License-Identifier: Apache-2.0
"""Dataclasses from messages, and messages from dataclasses: fields of one name have one meaning in both.

A message's field is converted by the type of the dataclass's field. JSON has only finite numbers, so a number
that is not finite is None where the dataclass allows None, and so is an optional value with such a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from edl.contract.ranges import RangeSet

T = TypeVar("T")


def written(kind: Callable[..., T], value: Any) -> T:
    """Create a message from the fields of a dataclass that have the same names.

    Args:
        kind: the class of the message.
    """
    names = kind.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]  # of a class that protoc writes
    return kind(**{name: getattr(value, name) for name in names if hasattr(value, name)})


def converted(kind: Callable[..., T], message: Any, **given: Any) -> T:
    """Create a dataclass from the fields of a message that have the same names.

    Args:
        kind: the dataclass. Fields that neither the message nor `given` has keep their defaults.
        given: values in place of the message's. Names that the dataclass lacks are ignored.
    """
    known = message.DESCRIPTOR.fields_by_name
    return kind(
        **{
            name: given[name] if name in given else read(message)
            for name, read in _readers(kind).items()
            if name in given or name in known
        }
    )


@functools.cache
def _readers(kind: Callable[..., Any]) -> dict[str, Callable[[Any], Any]]:
    """Return a function for each field of a dataclass that reads it from a message."""
    return {name: _reader(name, hint) for name, hint in get_type_hints(kind).items()}


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    value, of = attrgetter(name), get_args(hint)
    if hint is RangeSet:
        return lambda message: RangeSet.of((r.start, r.stop) for r in value(message))
    if get_origin(hint) is dict:
        if NoneType in get_args(of[1]):
            return lambda message: {key: finite(number) for key, number in value(message).items()}
        return lambda message: dict(value(message))
    if get_origin(hint) is tuple:
        if is_dataclass(of[0]):
            return lambda message: tuple(converted(of[0], part) for part in value(message))
        return lambda message: tuple(value(message))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda message: converted(hint, value(message))
    if NoneType in of:
        if is_dataclass(of[0]):
            return lambda message: _whole(of[0], value(message)) if message.HasField(name) else None
        return lambda message: finite(value(message)) if message.HasField(name) else None
    return value


def _whole(kind: Callable[..., T], message: Any) -> T | None:
    """Convert an optional value; None if one of its numbers is not finite."""
    found = converted(kind, message)
    numbers = (getattr(found, name) for name in _readers(kind))
    return found if all(math.isfinite(n) for n in numbers if isinstance(n, float)) else None


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None
