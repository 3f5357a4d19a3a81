# SPDX-License-Identifier: Apache-2.0
"""Types of values: what a values file, or a flag of Helm, may contain for a number, a share, an object.

Each type accepts the same in pydantic and in the generated JSON schema that Helm reads. A text, list or map
that may be empty may also be absent or null, and is empty then.

Values for Kubernetes are passed through unchecked. Exceptions are those that the chart itself relies on, or
whose mistakes would show only when a pod is created: names, quantities of resources, the structure of values
that are merged into a pod.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import typing
from fractions import Fraction
from typing import Annotated, Any, Literal, Required

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
    with_config,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema
from typing_extensions import TypedDict, is_typeddict

MAX_SECONDS = 10**8  # three years: all timers and other programs can represent that
MAXIMUM = (1 << 31) - 1  # greatest count: the greatest integer of Kubernetes' int32 fields
DECIMAL = r"0*[0-9]{1,8}\.[0-9]+"


class Section(BaseModel):
    """A part of the values. Unknown keys are refused, and nothing is guessed from other types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {**said, **{k: copy.copy(e) for k, e in _empties(cls).items() if said.get(k) is None}}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["required"] = [key for key in schema["required"] if key not in _empties(cls)]
        for key in _empties(cls):
            schema["properties"][key]["nullable"] = True  # for scripts/dev/schema
        return schema


@functools.cache
def _empties(section: type[Section]) -> dict[str, Any]:
    """The empty values of those keys of a section that may be empty."""
    found: dict[str, Any] = {}
    for field in section.model_fields.values():
        kind = field.annotation
        kind = dict if is_typeddict(kind) else typing.get_origin(kind) or kind
        kind = str if kind is Literal and "" in typing.get_args(field.annotation) else kind
        if kind in (str, list, dict):
            try:
                kinds: Any = Annotated[field.annotation, None, *field.metadata]
                TypeAdapter(kinds).validate_python(kind())
            except ValidationError:
                continue
            found[str(field.alias)] = kind()
    return found


def prepare(section: type[Section]) -> None:
    """Fill the caches that the first validation would fill, so that forked processes inherit them."""
    _empties(section)
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            prepare(field.annotation)


def _whole(value: Any) -> Any:
    """Convert whole floats to int, because Helm turns integers into floats. Bools and strings stay as is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def number(value: Any) -> Any:
    """Convert a decimal text to a number: `--set a=0.5` is the text "0.5" to Helm. Others stay as is."""
    if isinstance(value, str) and re.fullmatch(DECIMAL, value, re.ASCII):
        return float(value)
    return value


class _AlsoAsText:
    """Allow a decimal as text in the schema, too. A pattern states the limits that a text can have."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"type": "string", "pattern": f"^({self.pattern})$"}]}


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(le=MAXIMUM), BeforeValidator(_whole)]
_ONE_OR_MORE = r"0*[1-9][0-9]{0,7}\.[0-9]+"
NotNegative = Annotated[float, Field(ge=0, le=MAX_SECONDS), BeforeValidator(number), _AlsoAsText(DECIMAL)]
Positive = Annotated[
    float,
    Field(gt=0, le=MAX_SECONDS),
    BeforeValidator(number),
    _AlsoAsText(rf"{_ONE_OR_MORE}|0+\.[0-9]*[1-9][0-9]*"),
]
LessThanOne = Annotated[
    float,
    Field(ge=0, lt=1),
    BeforeValidator(number),
    _AlsoAsText(r"0+\.[0-9]+"),
]
AtLeastHalf = Annotated[
    float,
    Field(ge=0.5, le=MAX_SECONDS),
    BeforeValidator(number),
    _AlsoAsText(rf"{_ONE_OR_MORE}|0+\.[5-9][0-9]*"),
]

# A number of workers, or a share of them.
Share = (
    Annotated[int, Field(ge=0, le=MAXIMUM), BeforeValidator(_whole)]
    | Annotated[str, Field(pattern=r"^([0-9]|[1-9][0-9]|100)%$")]
)


# The number of reader processes of a worker.
Readers = Literal["auto"] | Annotated[int, Field(ge=0, le=64), BeforeValidator(_whole)]

# The share of a GPU that a worker takes.
GpuShare = (
    Literal["auto"]
    | Annotated[
        float,
        Field(ge=0, le=1),
        BeforeValidator(number),
        _AlsoAsText(r"0+\.[0-9]+|0*1\.0+"),
    ]
)

# --- texts


def _text(pattern: str, allowed: str, max_length: int | None = None) -> Any:
    return Field(pattern=f"^({pattern})$", max_length=max_length, json_schema_extra={"allowed": allowed})


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DnsLabel = Annotated[
    str, _text(_LABEL, "a name of a-z, 0-9 and '-', at most 63 characters, not empty", max_length=63)
]
# Name of an object; empty: no object.
ObjectName = Annotated[
    str,
    _text(
        rf"({_LABEL}(\.{_LABEL})*)?", "a name of a-z, 0-9, '-' and '.', or an empty string", max_length=253
    ),
]
Prefix = Annotated[
    str,
    _text("([a-z]([-a-z0-9]*[a-z0-9])?)?", "at most 40 of a-z, 0-9 and '-', a letter first", max_length=40),
]
Suffix = Annotated[str, _text("([-a-z0-9]*[a-z0-9])?", "at most 40 of a-z, 0-9 and '-'", max_length=40)]
_PART = r"[\[\]A-Za-z0-9._:-]+"
_IMAGE = f"{_PART}(/{_PART})*/?"
Registry = Annotated[str, _text(f"({_IMAGE})?", "a host and a path, without spaces or a scheme (http://)")]
Repository = Annotated[str, _text(_IMAGE, "a name without spaces, not empty")]
Tag = Annotated[
    str, _text("([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?", "a string of letters, digits, '_', '.' and '-'")
]
SecretKey = Annotated[str, _text("[-._A-Za-z0-9]+", "a key of letters, digits, '-', '_' and '.', not empty")]
Interval = Annotated[str, _text("([0-9]+(ms|[smhdwy]))+", "a duration such as 15s")]
LabelValue = Annotated[
    str,
    _text(
        "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?",
        "a string of at most 63 letters, digits, '-', '_' and '.'",
        max_length=63,
    ),
]
Labels = dict[str, LabelValue]


def _as_text(value: Any) -> Any:
    """Convert an integer to text: `--set runId=2` is an integer to Helm."""
    value = _whole(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_NAME = "([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
RunName = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=f"^({_NAME})$", max_length=63),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^({_NAME})$", "maxLength": 63},
                {"type": "integer", "minimum": 0},
            ],
            "allowed": "a string of at most 63 letters, digits, '-', '_' and '.', or an integer",
        }
    ),
]
Annotations = dict[str, str]

# --- Kubernetes' amounts

_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {f"{unit}i": 1 << (10 * n) for n, unit in enumerate("KMGTPE", 1)}
QUANTITY = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,3})?"
Size = Annotated[str, _text(f"({QUANTITY})?", "a string such as 5Gi")]


def amount(quantity: Any) -> Fraction | None:
    """The number that a quantity such as 500m or 2Gi stands for; None: not a quantity."""
    if isinstance(quantity, int | float) and not isinstance(quantity, bool) and quantity >= 0:
        return Fraction(quantity)
    found = re.fullmatch(QUANTITY, quantity, re.ASCII) if isinstance(quantity, str) else None
    if found is None:
        return None
    number, unit = found[1], found[3] or ""
    if unit in _BINARY:
        return Fraction(number) * _BINARY[unit]
    return Fraction(number) * Fraction(10) ** (_UNITS[unit] if unit in _UNITS else int(unit[1:]))


def _quantity(value: Any) -> Any:
    if value is not None and amount(value) is None:
        raise ValueError("not a quantity")
    return value


Quantity = Annotated[
    Any,
    AfterValidator(_quantity),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": f"^({QUANTITY})$"},
                {"type": "null"},
            ],
            "allowed": "a quantity such as 500m or 2Gi",
        }
    ),
]


MEMORY = r"0*[1-9][0-9]{0,5}(\.[0-9]+)?[MGT]i?"


def _memory(unit: int, value: Any) -> Any:
    """Convert a quantity of memory or disk to a number of `unit` bytes, which a plain number is already."""
    text = isinstance(value, str) and re.fullmatch(MEMORY, value, re.ASCII)
    return math.ceil(amount(value) / unit) if text else _whole(value)  # type: ignore[operator]


def _at_least(least: int, unit: str) -> Any:
    said = f"a quantity such as 128Mi, or an integer ({unit}), at least {least}"
    return Field(ge=least, le=1 << 60, json_schema_extra={"allowed": said})


_OF_MIB = BeforeValidator(functools.partial(_memory, 1 << 20))
Bytes = Annotated[
    int, _at_least(10**6, "bytes"), BeforeValidator(functools.partial(_memory, 1)), _AlsoAsText(MEMORY)
]
Mebibytes = Annotated[int, _at_least(1, "MiB"), _OF_MIB, _AlsoAsText(MEMORY)]
MebibytesOrNone = Annotated[int, _at_least(0, "MiB"), _OF_MIB, _AlsoAsText(MEMORY)]
# How much of a GPU's memory a worker may take.
GpuMemory = Literal["growth", "all"] | Mebibytes

# --- parts of a pod

Object = dict[str, Any]
Objects = list[Object]


@with_config(ConfigDict(extra="forbid", strict=True))
class Resources(TypedDict, total=False):
    """Kubernetes' ResourceRequirements: amounts are checked, and claims only for their type."""

    limits: dict[str, Quantity] | None
    requests: dict[str, Quantity] | None
    claims: Objects


@with_config(ConfigDict(extra="allow", strict=True))
class Variable(TypedDict, total=False):
    """Kubernetes' EnvVar; only the name is checked."""

    name: Required[Annotated[str, _text("[^=]+", "a variable's name, not empty")]]


@with_config(ConfigDict(extra="allow", strict=True))
class Mount(TypedDict, total=False):
    """Kubernetes' VolumeMount; only the name and the path are checked."""

    name: Required[DnsLabel]
    mountPath: Required[Annotated[str, _text("[^:]+", "a path without ':', not empty")]]


@with_config(ConfigDict(extra="allow", strict=True))
class Named(TypedDict, total=False):
    """An object of Kubernetes in a list that is keyed by name, such as a volume."""

    name: Required[DnsLabel]


@with_config(ConfigDict(extra="allow", strict=True))
class PullSecret(TypedDict, total=False):
    """Kubernetes' reference to a Secret for pulling images."""

    name: Required[ObjectName]


@with_config(ConfigDict(extra="allow", strict=True))
class Container(TypedDict, total=False):
    """Kubernetes' Container; only the fields that the master merges are checked."""

    name: Required[DnsLabel]
    env: list[Variable] | None
    volumeMounts: list[Mount] | None
    resources: Resources | None


@with_config(ConfigDict(extra="allow", strict=True))
class PodSpec(TypedDict, total=False):
    """Kubernetes' PodSpec; only the fields that the master merges are checked."""

    containers: list[Container] | None
    initContainers: list[Container] | None
    volumes: list[Named] | None


@with_config(ConfigDict(extra="allow", strict=True))
class PodMetadata(TypedDict, total=False):
    """The labels and annotations of a pod."""

    labels: Labels | None
    annotations: Annotations | None


@with_config(ConfigDict(extra="forbid", strict=True))
class PodTemplate(TypedDict, total=False):
    """A partial pod."""

    metadata: PodMetadata | None
    spec: PodSpec | None
