# SPDX-License-Identifier: Apache-2.0
"""Fast JSON for frequent writes of the master, and for reading what it has written."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json


def encoded(value: Any) -> bytes:
    """Encode a value as compact JSON in UTF-8, five times as fast as `json`.

    Raises:
        TypeError: the value has a type that JSON lacks.
    """
    try:
        return to_json(value)
    except ValueError:  # a text that UTF-8 cannot encode, such as the name of a file: `json` escapes it
        return json.dumps(value, separators=(",", ":")).encode()


def decoded(text: bytes) -> Any:
    """Decode JSON in UTF-8, five times as fast as `json`.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return from_json(text)
    except ValueError:  # also half of a surrogate pair, which only `json` accepts
        return json.loads(text)
