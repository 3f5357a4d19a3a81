"""The typed configuration of a job: its types and limits. Defaults live in chart/values.yaml.

`parse` turns a values mapping into a frozen `Config`, or refuses it with every mistake named
by its dotted key, the value found, and what is allowed.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

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
    model: Model
    training: Training
    data: Data
    elastic: Elastic
    log_level: Literal["debug", "info", "warning", "error"] = Field(json_schema_extra=LIVE)
    local: Local

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.min_workers > self.max_workers:
            raise _impossible(
                f"minWorkers is {self.min_workers} and maxWorkers is {self.max_workers}: "
                "minWorkers must not be larger"
            )
        if self.workers > self.max_workers:
            raise _impossible(
                f"workers is {self.workers} and maxWorkers is {self.max_workers}: workers must not be larger"
            )
        if 0 < self.workers < self.min_workers:
            raise _impossible(
                f"workers is {self.workers} and minWorkers is {self.min_workers}: "
                "such a job could never train (workers is 0 or at least minWorkers)"
            )
        return self


def _impossible(text: str) -> PydanticCustomError:
    return PydanticCustomError("impossible", "{text}", {"text": text})


def parse(values: Mapping[str, Any]) -> Config:
    """The typed configuration that `values` mean.

    Raises:
        ConfigError: one line for each mistake.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = sorted({_in_words(detail) for detail in error.errors()})
        raise ConfigError("\n".join(lines)) from None


def frozen_changes(old: Config, new: Config) -> list[str]:
    """The dotted keys that differ and cannot change while a job runs."""
    before, after = _flat(old), _flat(new)
    live = {f.alias for f in Config.model_fields.values() if f.json_schema_extra == LIVE}
    return sorted(key for key in before if before[key] != after[key] and key not in live)


def _flat(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        key = f"{prefix}{field.alias}"
        flat |= _flat(value, f"{key}.") if isinstance(value, BaseModel) else {key: value}
    return flat


def _in_words(detail: ErrorDetails) -> str:
    """One mistake in our words: the key, the value found, what is allowed."""
    if detail["type"] == "impossible":
        return str(detail["ctx"]["text"])
    path = [str(part) for part in detail["loc"]]
    key, found = ".".join(path), detail["input"]
    section = _section(path[:-1])
    if detail["type"] == "extra_forbidden":
        known = [str(f.alias) for f in section.model_fields.values()]
        near = difflib.get_close_matches(path[-1], known, 1, cutoff=0.5)
        prefix = ".".join(path[:-1])
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"known: {', '.join(known)}"
        where = f" under {prefix}" if prefix else ""
        return f"{key}: there is no such key{where}; {hint}"
    if detail["type"] == "missing":
        return f"{key}: a value is needed (null removes the default); {_allowed(section, path[-1])}"
    return f"{key}: {found!r} is not allowed; {_allowed(section, path[-1])}"


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
        f"{word} {schema[name]:g}"
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
