# SPDX-License-Identifier: Apache-2.0
"""Messages about invalid values: the key, the value found, and the expected value.

`whole` is the section type of a whole values file.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from edl.config.paths import keys, known
from edl.config.renamed import advice, word_advice

LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "maxLength": "at most {} characters",
}
KINDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "array": "a list",
}


def in_words(detail: ErrorDetails, whole: type[BaseModel]) -> str:
    """Describe one mistake in one line: the key, the value found, the expected value."""
    path, section, rest = _place(detail["loc"], whole)
    if not path:
        return f"values: invalid value {shown(detail['input'])} (expected a map)"
    key = ".".join(path + rest)
    if detail["type"] == "extra_forbidden":
        hint = _keys_of(path, rest[:-1], whole) if rest else _hint(path, section, whole)
        return f"{key}: {advice(key) or f'unknown key; {hint}'}"
    undecoded = detail["type"] == "string_unicode"  # such as the name of a file whose bytes are not UTF-8
    expected = "text in UTF-8" if undecoded else allowed(".".join(path), whole, rest)
    if detail["type"] == "missing":
        return f"{key}: missing value (null removes the default; expected {expected})"
    text = f"{key}: invalid value {shown(detail['input'])} (expected {expected})"
    if renamed := word_advice(key, detail["input"]):
        return f"{text}: {renamed}"
    meant = "" if rest else _meant(path, detail["input"], section, whole)
    return f"{text}; did you mean {meant}?" if meant else text


def _place(
    loc: tuple[int | str, ...], whole: type[BaseModel]
) -> tuple[list[str], type[BaseModel], list[str]]:
    """Locate a mistake: the path of the key, the section that holds it, and the path within its value."""
    section = whole
    for n, part in enumerate(loc):
        inner = known(section).get(str(part))
        if inner and n + 1 < len(loc):
            section = inner
            continue
        path, rest = [str(part) for part in loc[: n + 1]], [str(part) for part in loc[n + 1 :]]
        # pydantic reports a value of a union once for each of its types: the rest of `loc` is then a type.
        field = next((f for f in section.model_fields.values() if f.alias == part), None)
        return path, section, rest if field and _has_places(field.annotation) else []
    return [], section, []


def _has_places(kind: Any) -> bool:
    return typing.get_origin(kind) in (dict, list) or is_typeddict(kind)


def unknown(key: str, whole: type[BaseModel]) -> str:
    """Describe an unknown key: its new name, else similar keys."""
    path, section, rest = _place(tuple(key.split(".")), whole)
    return (
        advice(key)
        or f"unknown key; {_keys_of(path, rest[:-1], whole) if rest else _hint(path, section, whole)}"
    )


def _keys_of(path: list[str], rest: list[str], whole: type[BaseModel]) -> str:
    """All keys of a map within a value."""
    known_there = _schema(".".join(path), whole, rest).get("properties", {})
    return f"keys of {'.'.join(path + rest)}: {', '.join(known_there)}"


def _hint(path: list[str], section: type[BaseModel], whole: type[BaseModel]) -> str:
    """Suggest keys: the same name elsewhere, else a similar name in this section, else all keys of it."""
    *parents, last = path
    named = {key: key.rsplit(".", 1)[-1] for key in keys(whole)}
    elsewhere = [key for key, name in named.items() if name == last]
    typed, near = (
        [".".join([*parents, name]) for name in difflib.get_close_matches(last, known(section), 1, cutoff)]
        for cutoff in (0.8, 0.5)
    )
    # `gpus` begins gpusPerWorker, though it is nearer to `ps`.
    begun = [key for key, name in named.items() if len(last) >= 3 and name.startswith(last)]
    if meant := elsewhere[:2] or typed or begun[:3] or near:
        return f"did you mean {' or '.join(meant)}?"
    where = f"keys of {'.'.join(parents)}" if parents else "keys"
    return f"{where}: {', '.join(known(section))}"


def _meant(path: list[str], found: Any, section: type[BaseModel], whole: type[BaseModel]) -> str:
    """Suggest a key for a section that was given a plain value, or a plain value that was given a map.

    `worker=3` means `workers=3`, and `workers.env=...` means `worker.env`.
    """
    *parents, last = path
    inside = known(section)
    if inside.get(last) is not None:
        near = difflib.get_close_matches(last, [key for key, inner in inside.items() if inner is None], 1)
        return ".".join([*parents, near[0]]) if near else ""
    if isinstance(found, dict) and len(found) == 1:
        below = next(iter(found))
        sections = [key for key, inner in inside.items() if inner is not None and below in known(inner)]
        near = difflib.get_close_matches(last, sections, 1)
        return ".".join([*parents, near[0], str(below)]) if near else ""
    return ""


def shown(value: Any) -> str:
    """Format a value as in a values file, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def allowed(key: str, whole: type[BaseModel], rest: Sequence[str] = ()) -> str:
    """Describe the allowed values of a dotted key, or of a path within its value."""
    schema = _schema(key, whole, rest)
    if "allowed" in schema:
        return str(schema["allowed"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    limits = [words.format(schema[name]) for name, words in LIMITS.items() if name in schema]
    if schema.get("minLength"):
        limits.append("not empty")
    return ", ".join([KINDS.get(schema.get("type", ""), "a map"), *limits])


def _schema(key: str, whole: type[BaseModel], rest: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a key, or of a path within its value; empty if any value is allowed."""
    *parents, last = key.split(".")
    section = whole
    for part in parents:
        section = known(section)[part] or section
    generated = section.model_json_schema(by_alias=True)
    defined = generated.get("$defs", {})

    def plain(schema: Any) -> dict[str, Any]:
        schema = schema if isinstance(schema, dict) else {}
        if "$ref" in schema:
            return plain(defined[schema["$ref"].rsplit("/", 1)[-1]])
        if "anyOf" in schema and "allowed" not in schema:
            # Helm passes a decimal as a string, and null means absent: messages mention neither.
            return plain(schema["anyOf"][0])
        return dict(schema)

    schema = plain(generated["properties"].get(last))
    for part in rest:
        inside = schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        schema = plain(schema.get("items") or inside)
    return schema
