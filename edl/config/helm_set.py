# SPDX-License-Identifier: Apache-2.0
"""Parser of `--set`, `--set-string` and `--set-file` flags that follows Helm 3.

One deliberate difference, tested in tests/unit/config/test_values.py: `--set a=0.5` is a number here. Helm
makes it the text "0.5", which no schema accepts as a number; Helm's way to set it is --set-json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from edl.errors import ConfigError

MAX_INDEX = 65536  # Helm's limit: a larger list index is a mistake
MAX_LEVELS = 30  # Helm's limit: a key of more levels is a mistake

Values = dict[str, Any]


def parse_set(
    text: str, into: Values, strings: bool = False, read: Callable[[str], str] | None = None
) -> None:
    """Parse one `--set` flag and merge it into `into`.

    Args:
        strings: parse the flag as `--set-string`: all values are strings.
        read: parse the flag as `--set-file`: the value is the name of a file, and `read` returns its text.

    Raises:
        ConfigError: the flag is malformed, or sets a key below a value that is not a map or list. The
            message quotes the flag; `into` may then hold a part of it.
    """
    _SetParser(text, strings, read).read(into)


class _SetParser:
    """A parser of `key=value,...` that reads one character at a time, like Helm's pkg/strvals."""

    def __init__(self, text: str, strings: bool, read_file: Callable[[str], str] | None):
        self._text, self._strings, self._read_file, self._at = text, strings, read_file, 0

    def read(self, into: Values) -> None:
        while self._at < len(self._text):
            self._pair(into, 0)

    def _fail(self, why: str) -> ConfigError:
        flag = "--set-file" if self._read_file else "--set-string" if self._strings else "--set"
        example = (
            "key=PATH, e.g. model.source=my_model.py"
            if self._read_file
            else ("key=value, e.g. training.epochs=3")
        )
        return ConfigError(f"{flag} {self._text!r}: {why} (expected {example})")

    def _until(self, stops: str) -> tuple[str, str]:
        """Return the unescaped text up to one of `stops`, and the stop ("" at the end)."""
        out: list[str] = []
        while self._at < len(self._text):
            c = self._text[self._at]
            self._at += 1
            if c in stops:
                return "".join(out), c
            if c == "\\":
                c = self._text[self._at : self._at + 1]
                self._at += 1
            out.append(c)
        return "".join(out), ""

    def _pair(self, into: Values, level: int) -> None:
        key, stop = self._until(".=[,")
        if not key:
            raise self._fail(f"a key is missing before {stop!r}" if stop else "a key is missing at the end")
        if stop == "=":
            into[key] = self._value()
        elif stop == ".":
            if level == MAX_LEVELS:
                raise self._fail(f"the key has more than {MAX_LEVELS} levels")
            self._pair(self._below(key, into.setdefault(key, {}), dict), level + 1)
        elif stop == "[":
            into[key] = self._item(self._below(key, into.setdefault(key, []), list), level)
        else:
            raise self._fail(f"key {key!r} has no value")

    def _below(self, key: str, present: Any, kind: type) -> Any:
        if not isinstance(present, kind):
            wanted = "map" if kind is dict else "list"
            raise self._fail(f"{key!r} is already {json.dumps(present, ensure_ascii=False)}, not a {wanted}")
        return present

    def _item(self, items: list[Any], level: int) -> list[Any]:
        """Parse `0]=x`, `0].b=x` or `0][1]=x`, and put x at that index of the list."""
        text, stop = self._until("]")
        if stop != "]" or not re.fullmatch(r"[+]?[0-9]{1,18}", text):
            raise self._fail(f"[{text}] is not a list index")
        index = int(text)
        if index > MAX_INDEX:
            raise self._fail(f"list index {index} is larger than {MAX_INDEX}")
        items = items + [None] * (index + 1 - len(items))
        rest, stop = self._until("=.[")
        if rest or not stop:
            raise self._fail(f"'=', '.' or '[' is expected after [{index}]")
        present = items[index]
        if stop == "=":
            items[index] = self._value()
        elif stop == "[":
            inner = [] if present is None else self._below(f"[{index}]", present, list)
            items[index] = self._item(inner, level)
        else:
            # Unlike for a key of a map, Helm replaces an item that is not a map.
            items[index] = dict(present) if isinstance(present, dict) else {}
            self._pair(items[index], level)
        return items

    def _value(self) -> Any:
        if self._text[self._at : self._at + 1] == "{":
            self._at += 1
            return self._list()
        text, _ = self._until(",")
        return self._typed(text)

    def _list(self) -> list[Any]:
        items: list[Any] = []
        while True:
            text, stop = self._until(",}")
            if stop == "":
                raise self._fail("a list is not closed with '}'")
            items.append(self._typed(text))  # {} is a list of one empty text, as in Helm
            if stop == "}":
                if self._text[self._at : self._at + 1] == ",":
                    self._at += 1
                return items

    def _typed(self, text: str) -> Any:
        if self._read_file is not None:
            return self._read_file(text)
        if self._strings:
            return text
        lower = text.lower()
        if lower in ("true", "false"):
            return lower == "true"
        if lower == "null":
            return None
        # As in Helm: digits that start with 0 may be an id, so they stay text; so do integers beyond int64.
        if text == "0" or re.fullmatch(r"[+-][0-9]{1,30}|[1-9][0-9]{0,30}", text):
            return int(text) if -(1 << 63) <= int(text) < 1 << 63 else text
        # The deliberate difference from Helm: see above.
        return float(text) if re.fullmatch(r"[+-]?[0-9]+\.[0-9]+", text) else text
