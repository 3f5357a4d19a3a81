"""The kinds of values: what a values file, or a flag of Helm's, may say for a number, a share, an object.

Each kind means the same to pydantic and in the generated JSON schema that Helm reads.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

DECIMAL = r"[0-9]+\.[0-9]+"


class Section(BaseModel):
    """A part of the values. Unknown keys are refused, and nothing is guessed from other types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, allow_inf_nan=False
    )


def _whole(value: Any) -> Any:
    """Helm turns integers into floats: 4.0 is 4. A bool is not a number, nor is a string."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def number(value: Any) -> Any:
    """The number that a decimal text is: `--set a=0.5` is the text "0.5" to Helm. Else the value itself."""
    if isinstance(value, str) and re.fullmatch(DECIMAL, value, re.ASCII):
        return float(value)
    return value


class _AlsoAsText:
    """In the schema a decimal may be a text too, of the same limits (by a pattern: a text has no others)."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"type": "string", "pattern": f"^({self.pattern})$"}]}


Int = Annotated[int, BeforeValidator(_whole)]
_NONZERO = r"[0-9]*[1-9][0-9]*\.[0-9]+|[0-9]+\.[0-9]*[1-9][0-9]*"
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(number), _AlsoAsText(DECIMAL)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(number), _AlsoAsText(_NONZERO)]
AtLeastHalf = Annotated[
    float, Field(ge=0.5), BeforeValidator(number), _AlsoAsText(r"[0-9]*[1-9][0-9]*\.[0-9]+|0+\.[5-9][0-9]*")
]

# A number of workers, or a share of them.
Share = (
    Annotated[int, Field(ge=0), BeforeValidator(_whole)]
    | Annotated[str, Field(pattern=r"^([0-9]|[1-9][0-9]|100)%$")]
)

# What Kubernetes knows better than we do goes through as it is.
Object = dict[str, Any]
Objects = list[Object]
Labels = dict[str, str]
