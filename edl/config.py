"""The typed configuration of a job: its types and limits. Defaults live in chart/values.yaml.

`parse` turns a values mapping into a frozen `Config`, or refuses it with every mistake named
by its dotted key, the value found, and what is allowed: all of them at once.
"""

from __future__ import annotations

import difflib
import json
import operator
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails, PydanticCustomError

from edl.errors import ConfigError


def _whole(value: Any) -> Any:
    """Helm turns integers into floats: 4.0 is 4. A bool is not a number, nor is a string."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_whole)]
LIVE: dict[str, JsonValue] = {"live": True}


class _Values(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, allow_inf_nan=False
    )


class Model(_Values):
    module: str = Field(min_length=1)


class Training(_Values):
    epochs: Int = Field(ge=1)
    batch_size: Int = Field(ge=1, lt=1 << 24)
    seed: Int = Field(ge=0, lt=1 << 31)
    non_finite: Literal["stop", "skip"]


class Data(_Values):
    shuffle: bool
    block_records: Int = Field(ge=1)


class Elastic(_Values):
    silence_seconds: float = Field(ge=0.5)
    start_seconds: float = Field(gt=0)
    join_seconds: float = Field(ge=0)
    grace_seconds: float = Field(ge=0)
    master_seconds: float = Field(ge=0)
    lease_batches: Int = Field(ge=1)
    max_failures: Int = Field(ge=0)


class Local(_Values):
    start: Literal["spawn", "fork"]
    threads: Int = Field(ge=0)


class Config(_Values):
    """All of a job's values."""

    workers: Int = Field(ge=0, json_schema_extra=LIVE)
    min_workers: Int = Field(ge=1, json_schema_extra=LIVE)
    max_workers: Int = Field(ge=1, json_schema_extra=LIVE)
    paused: bool = Field(json_schema_extra=LIVE)
    model: Model
    training: Training
    data: Data
    elastic: Elastic
    log_level: Literal["debug", "info", "warning", "error"] = Field(json_schema_extra=LIVE)
    local: Local

    @model_validator(mode="after")
    def _possible(self) -> Config:
        # Also when a Config is made without `parse`, an impossible one does not come into being.
        if broken := impossible(flat(self)):
            raise PydanticCustomError("impossible", "{text}", {"text": "\n".join(broken)})
        return self


class Rule(NamedTuple):
    """Keys that each may have such a value, but not together."""

    keys: tuple[str, ...]
    broken: Callable[..., bool]
    words: str


RULES = [
    Rule(("minWorkers", "maxWorkers"), operator.gt, "minWorkers must not be larger"),
    Rule(("workers", "maxWorkers"), operator.gt, "workers must not be larger"),
    Rule(
        ("workers", "minWorkers"),
        lambda workers, least: 0 < workers < least,
        "such a job could never train (workers is 0 or at least minWorkers)",
    ),
    Rule(
        ("elastic.joinSeconds", "elastic.startSeconds"),
        operator.ge,
        "joinSeconds must be smaller: waiting for company longer than a start may take is a mix-up",
    ),
]


def parse(values: Mapping[str, Any]) -> Config:
    """The typed configuration that `values` mean.

    Raises:
        ConfigError: one line for each mistake.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    # pydantic judges the whole only when every part is right. We want all mistakes in one go, so the
    # combinations are judged here as well, over the keys that nothing else is wrong with.
    wrong = {".".join(map(str, detail["loc"])) for detail in details}
    sound = {k: v for k, v in flat(values).items() if k not in wrong} if isinstance(values, Mapping) else {}
    lines = {_in_words(detail) for detail in details if detail["type"] != "impossible"}
    raise ConfigError("\n".join(sorted(lines | set(impossible(sound)))))


def impossible(flat_values: Mapping[str, Any]) -> list[str]:
    """What cannot be together, in words. A rule is judged only if all its keys are there."""
    return [
        f"{' and '.join(f'{key} is {_shown(flat_values[key])}' for key in rule.keys)}: {rule.words}"
        for rule in RULES
        if all(key in flat_values for key in rule.keys)
        and rule.broken(*(flat_values[key] for key in rule.keys))
    ]


def frozen_changes(old: Config, new: Config) -> list[str]:
    """The dotted keys that differ and cannot change while a job runs."""
    before, after = flat(old), flat(new)
    live = {f.alias for f in Config.model_fields.values() if f.json_schema_extra == LIVE}
    return sorted(key for key in before if before[key] != after[key] and key not in live)


def flat(values: BaseModel | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values by dotted key."""
    if isinstance(values, BaseModel):
        items = [(str(f.alias), getattr(values, name)) for name, f in type(values).model_fields.items()]
    else:
        items = list(values.items())
    found: dict[str, Any] = {}
    for key, value in items:
        nested = isinstance(value, (BaseModel, Mapping))
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """The dotted keys of all values."""
    found: list[str] = []
    for field in section.model_fields.values():
        inner, key = field.annotation, f"{prefix}{field.alias}"
        nested = isinstance(inner, type) and issubclass(inner, BaseModel)
        found += keys(typing.cast(type[BaseModel], inner), f"{key}.") if nested else [key]
    return found


def _in_words(detail: ErrorDetails) -> str:
    """One mistake in our words: the key, the value found, what is allowed."""
    path = [str(part) for part in detail["loc"]]
    if not path:
        return f"values: {_shown(detail['input'])} is not allowed; allowed: a map of keys"
    key, section = ".".join(path), _section(path[:-1])
    if detail["type"] == "extra_forbidden":
        where = f" under {'.'.join(path[:-1])}" if path[:-1] else ""
        return f"{key}: there is no such key{where}; {_hint(path, section)}"
    if detail["type"] == "missing":
        return f"{key}: a value is needed (null removes the default); {_allowed(section, path[-1])}"
    return f"{key}: {_shown(detail['input'])} is not allowed; {_allowed(section, path[-1])}"


def _hint(path: list[str], section: type[BaseModel]) -> str:
    """The key that was meant: one of this name elsewhere, else a similar one here, else all that are here."""
    *parents, last = path
    elsewhere = [key for key in keys() if key.rsplit(".", 1)[-1] == last]
    known = [str(field.alias) for field in section.model_fields.values()]
    near = difflib.get_close_matches(last, known, 1, cutoff=0.5)
    if meant := [*elsewhere, *(".".join([*parents, name]) for name in near)]:
        return f"did you mean {meant[0]}?"
    return f"known: {', '.join(known)}"


def _shown(value: Any) -> str:
    """A value as it would stand in a values file, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _section(path: list[str]) -> type[BaseModel]:
    """The model that holds the last key of a path."""
    section: type[BaseModel] = Config
    for part in path:
        field = next(f for f in section.model_fields.values() if f.alias == part)
        section = typing.cast(type[BaseModel], field.annotation)
    return section


def _allowed(section: type[BaseModel], key: str) -> str:
    schema = section.model_json_schema(by_alias=True)["properties"].get(key, {})
    if "enum" in schema:
        return f"allowed: {', '.join(schema['enum'])}"
    kind = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    text = kind.get(schema.get("type", ""), "a map of keys")
    limits = [
        f"{word} {schema[name]}"
        for name, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "more than"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "less than"),
        )
        if name in schema
    ]
    if schema.get("minLength"):
        limits.append("not empty")
    return f"allowed: {text}" + (f", {', '.join(limits)}" if limits else "")
