"""A mistake in the values, in our words: the key, the value found, and what is allowed there.

`whole` is the section that a whole values file is.
"""

from __future__ import annotations

import difflib
import json
import typing
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from edl.config.paths import keys, known

LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "maxLength": "at most {} characters",
}
KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
}


def in_words(detail: ErrorDetails, whole: type[BaseModel]) -> str:
    """One mistake in our words: the key, the value found, what is allowed."""
    path, section, rest = _place(detail["loc"], whole)
    if not path:
        return f"values: {shown(detail['input'])} is not allowed; allowed: a map of keys"
    key = ".".join(path + rest)
    if detail["type"] == "extra_forbidden":
        where = f" under {'.'.join(path[:-1])}" if path[:-1] else ""
        return f"{key}: there is no such key{where}; {_hint(path, section, whole)}"
    found = "a value is needed (null removes the default)"
    if detail["type"] != "missing":
        found = f"{shown(detail['input'])} is not allowed"
    return f"{key}: {found}; allowed: {allowed('.'.join(path), whole, len(rest))}"


def _place(
    loc: tuple[int | str, ...], whole: type[BaseModel]
) -> tuple[list[str], type[BaseModel], list[str]]:
    """Where a mistake is: the path of the key, the section that holds it, and the place within its value."""
    section = whole
    for n, part in enumerate(loc):
        inner = known(section).get(str(part))
        if inner and n + 1 < len(loc):
            section = inner
            continue
        path, rest = [str(part) for part in loc[: n + 1]], [str(part) for part in loc[n + 1 :]]
        # A value that may be of several kinds is blamed once for each: what follows is the kind, no place.
        field = next((f for f in section.model_fields.values() if f.alias == part), None)
        return path, section, rest if field and typing.get_origin(field.annotation) in (dict, list) else []
    return [], section, []


def _hint(path: list[str], section: type[BaseModel], whole: type[BaseModel]) -> str:
    """The key that was meant: one of this name elsewhere, else a similar one here, else all that are here."""
    *parents, last = path
    elsewhere = [key for key in keys(whole) if key.rsplit(".", 1)[-1] == last]
    near = difflib.get_close_matches(last, known(section), 1, cutoff=0.5)
    if meant := elsewhere[:2] or [".".join([*parents, name]) for name in near]:
        return f"did you mean {' or '.join(meant)}?"
    return f"known: {', '.join(known(section))}"


def shown(value: Any) -> str:
    """A value as it would stand in a values file, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def allowed(key: str, whole: type[BaseModel], depth: int = 0) -> str:
    """What is allowed, in words, for a dotted key; or so deep within its value."""
    *parents, last = key.split(".")
    section = whole
    for part in parents:
        section = known(section)[part] or section
    schema = section.model_json_schema(by_alias=True)["properties"].get(last, {})
    for _ in range(depth):
        schema = schema.get("items") or schema.get("additionalProperties") or {}
        schema = schema if isinstance(schema, dict) else {}
    if "allowed" in schema:
        return str(schema["allowed"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "anyOf" in schema:  # a decimal may be a text to Helm, which is nobody's concern
        schema = schema["anyOf"][0]
    limits = [words.format(schema[name]) for name, words in LIMITS.items() if name in schema]
    if schema.get("minLength"):
        limits.append("not empty")
    return ", ".join([KINDS.get(schema.get("type", ""), "a map of keys"), *limits])
