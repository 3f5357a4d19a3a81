"""JSON for what a master writes all the time."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import to_json


def encoded(value: Any) -> bytes:
    """Compact JSON in UTF-8, five times as fast as `json` makes it.

    Raises:
        TypeError: the value is not of what JSON has.
    """
    try:
        return to_json(value)
    except ValueError:  # a text that UTF-8 cannot hold, such as the name of a file: `json` escapes it
        return json.dumps(value, separators=(",", ":")).encode()
