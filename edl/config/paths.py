# SPDX-License-Identifier: Apache-2.0
"""The dotted keys of a typed section of the values, such as training.batchSize."""

from __future__ import annotations

import typing

from pydantic import BaseModel
from typing_extensions import is_typeddict


def keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys of all values below `section`."""
    found: list[str] = []
    for key, inner in known(section).items():
        found += keys(inner, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def known(section: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The keys of a section, each with its own section, if it is one."""
    found: dict[str, type[BaseModel] | None] = {}
    for field in section.model_fields.values():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found[str(field.alias)] = typing.cast(type[BaseModel], inner) if is_section else None
    return found


def open_maps(section: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted keys whose value is a map with arbitrary keys."""
    found: set[str] = set()
    for field in section.model_fields.values():
        key, inner = f"{prefix}{field.alias}", field.annotation
        if typing.get_origin(inner) is dict or is_typeddict(inner):
            found.add(key)
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= open_maps(inner, f"{key}.")
    return found
