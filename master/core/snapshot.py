# SPDX-License-Identifier: Apache-2.0
"""Serialisation of a job's whole state as plain JSON, for the head of a journal's segment.

`dump` walks all objects of the state generically. So new fields of the core are included, and an object of an
unsupported class is refused by name. A loaded job behaves like the original: shared objects are shared again,
also in the core's indexes. `load` creates objects of the core's classes only.

    null, numbers, texts    as they are
    [1, 2]                  a list
    {"tuple": [..]}         a tuple, set or frozenset
    {"tuple": {"runs": ..}} the same, or a list, of integers in runs: [first, how many, step]
    {"map": [[k, v], ..]}   a dict ("counter": a Counter)
    {"Phase": "Training"}   a member of an enum
    {"Pool": {..}}          an object, without the fields that have their defaults
    {"Limits": [..]}        a named tuple
    {"same": 3}             the object of this number, in the order in which objects begin here, from 0
    {"given": "elastic"}    a part of the configuration, which is not kept here
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, TypeAlias

from pydantic import BaseModel

from edl.config import Config
from edl.contract import evaluation, heartbeats, layout, phases, ranges, reasons, steps
from edl.master import core
from edl.master.core.job import Job
from edl.master.core.work import RECORDS, Work

Json: TypeAlias = Any  # a value that `json` can encode

LONGEST = 1_000_000  # integers in a run: more than a job has workers
NOT_KEPT = ("effects", "work")  # a job's fields that are no state: of the event in hand, and given

_CORE = (info.name for info in pkgutil.iter_modules(core.__path__) if info.name not in ("snapshot", "view"))
_MODULES = (
    *(evaluation, heartbeats, layout, phases, ranges, reasons, steps),
    *(importlib.import_module(f"{core.__name__}.{name}") for name in _CORE),
)
_CLASSES: dict[str, type] = {
    name: cls
    for module in _MODULES
    for name, cls in vars(module).items()
    if isinstance(cls, type) and cls.__module__ == module.__name__
}
_MAPS: dict[str, type[dict[Any, Any]]] = {"map": dict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def dump(of: Job) -> Json:
    """Serialise the job's state, ready for JSON.

    Raises:
        TypeError: the state has a value that cannot be serialised; the text names it and its place.
    """
    return _Dump(_given(of.config)).value(of, "job")


def load(kept: Json, config: Config, work: Work = RECORDS) -> Job:
    """Create the job from its serialised state.

    Args:
        config: the job's configuration when it began.
        work: what its workers do.

    Raises:
        ValueError: this is not a valid state of a job.
    """
    try:
        found = _Load(_given(config), work).value(kept)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a job's state ({type(error).__name__}: {error})") from error
    if not isinstance(found, Job):
        raise ValueError(f"the state is of a {type(found).__name__}, not of a job")
    return found


def _given(config: Config) -> dict[str, BaseModel]:
    """Return the configuration and its sections by name."""
    sections = {
        name: part
        for name in type(config).model_fields
        if isinstance(part := getattr(config, name), BaseModel)
    }
    return {"config": config, **sections}


class _Dump:
    def __init__(self, given: dict[str, BaseModel]) -> None:
        self._given = {id(part): name for name, part in given.items()}
        self._numbers: dict[int, int] = {}  # numbers of the objects so far, by identity
        self._containers: dict[int, Any] = {}  # kept alive, so that their identities are not reused

    def value(self, value: Any, where: str) -> Json:
        """Convert a value to JSON.

        Args:
            where: the path to the value, for errors.

        Raises:
            TypeError: one container is in two places, and would be loaded as two.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Enum):
            return {_name(kind, where): value.value}
        if (name := self._given.get(id(value))) is not None:
            return {"given": name}
        if kind in (list, set, *_MAPS.values()):
            if id(value) in self._containers:
                raise TypeError(f"{where}: the same {kind.__name__} is in two places; it would become two")
            self._containers[id(value)] = value
        for name, cls in _MAPS.items():
            if kind is cls:
                items = value.items()
                return {name: [[self.value(k, where), self.value(v, f"{where}[{k!r}]")] for k, v in items]}
        if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
            return self._sequence(kind.__name__, value, where)
        return self._object(value, where)

    def _sequence(self, kind: str, value: Iterable[Any], where: str) -> Json:
        items = list(value)
        whole = bool(items) and all(type(item) is int for item in items)
        if kind in ("set", "frozenset"):
            items = sorted(items) if whole else sorted(items, key=repr)
        if whole and 3 * len(runs := _runs(items)) < len(items):
            return {kind: {"runs": runs}}
        told = [self.value(item, f"{where}[{n}]") for n, item in enumerate(items)]
        return told if kind == "list" else {kind: told}

    def _object(self, value: Any, where: str) -> Json:
        name = _name(type(value), where)
        if isinstance(value, tuple):
            return {name: [self.value(item, f"{where}[{n}]") for n, item in enumerate(value)]}
        if not _frozen(value):
            if id(value) in self._numbers:
                return {"same": self._numbers[id(value)]}
            self._numbers[id(value)] = len(self._numbers)
        return {name: {key: self.value(field, f"{where}.{key}") for key, field in _fields(value)}}


class _Load:
    def __init__(self, given: dict[str, BaseModel], work: Work) -> None:
        self._given, self._work = given, work
        self._objects: list[Any] = []

    def value(self, kept: Json) -> Any:
        """Convert JSON back to the value."""
        if isinstance(kept, list):
            return [self.value(item) for item in kept]
        if not isinstance(kept, dict):
            return kept
        ((kind, inner),) = kept.items()
        if kind in _MAPS:
            return _MAPS[kind]({self.value(k): self.value(v) for k, v in inner})
        if kind in _SEQUENCES:
            runs = isinstance(inner, dict)
            return _SEQUENCES[kind](_of_runs(inner["runs"]) if runs else map(self.value, inner))
        if kind == "same":
            return self._objects[inner]
        if kind == "given":
            return self._given[inner]
        cls = _CLASSES[kind]
        if issubclass(cls, tuple):
            return cls(*map(self.value, inner))
        return cls(inner) if issubclass(cls, Enum) else self._object(cls, inner)

    def _object(self, cls: type, fields: dict[str, Json]) -> Any:
        made: Any = object.__new__(cls)
        if cls is Job:
            made.work = self._work
        if not _frozen(made):
            self._objects.append(made)
        for key, default in _defaults(cls).items():
            if key not in fields:
                object.__setattr__(made, key, default())
        for key, kept in fields.items():
            object.__setattr__(made, key, self.value(kept))
        if cls is Job:
            made.effects = []
        return made


def _name(cls: type, where: str) -> str:
    if _CLASSES.get(cls.__name__) is not cls:
        raise TypeError(f"{where} is a {cls.__module__}.{cls.__name__}, which no snapshot can hold")
    return cls.__name__


def _frozen(value: Any) -> bool:
    """True if the value is a frozen dataclass, whose identity does not matter."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    kind: type = type(value)
    if not dataclasses.is_dataclass(value):
        slots = (key for cls in kind.__mro__ for key in getattr(cls, "__slots__", ()))
        has = {key: getattr(value, key) for key in slots if hasattr(value, key)} | getattr(
            value, "__dict__", {}
        )
        yield from ((key, field) for key, field in has.items() if key not in NOT_KEPT)
        return
    defaults = _defaults(kind)
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        default = defaults.get(field.name)
        if default is None or (expected := default()) != found or type(expected) is not type(found):
            yield field.name, found


@functools.cache
def _defaults(cls: Any) -> dict[str, Callable[[], Any]]:
    """Return factories of the defaults of a dataclass, by field."""
    found: dict[str, Callable[[], Any]] = {}
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for field in fields:
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory
        elif field.default is not dataclasses.MISSING:
            found[field.name] = functools.partial(_same, field.default)
    return found


def _same(value: Any) -> Any:
    return value


def _runs(numbers: list[int]) -> list[list[int]]:
    """Split numbers into runs that are constant or count up by one: [first, how many, 0 or 1]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs:
            run = runs[-1]
            first, count, step = run
            if count == 1 and number - first in (0, 1):
                run[1:] = 2, number - first
                continue
            if count > 1 and number == first + count * step:
                run[1] += 1
                continue
        runs.append([number, 1, 1])
    return runs


def _of_runs(runs: list[list[int]]) -> Iterator[int]:
    for first, count, step in runs:
        if count > LONGEST:
            raise ValueError(f"a run of {count}")
        yield from (first + n * step for n in range(count))
