"""Values files and `--set` flags, merged as Helm 3 merges them.

    chart/values.yaml  <-  each -f file, in order  <-  each --set, in order  <-  each --set-string

Maps merge key by key; lists and scalars replace. `null` takes a key away. The grammar of
`--set` is that of Helm's pkg/strvals: `a.b=c,d=e`, `a={x,y}`, `a[0].b=c`, and a backslash
before a character that would mean something.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from edl.errors import ConfigError

DEFAULTS = Path(__file__).resolve().parent.parent / "chart" / "values.yaml"
MOST_INDEX = 65536  # as in Helm: a larger list index is a mistake, not a list

Values = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML without surprises: a key that stands twice is an error."""


def _no_duplicates(loader: _Loader, node: yaml.MappingNode) -> Values:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key = str(loader.construct_object(key_node))
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"{key_node.start_mark.name}: line {line}: key {key!r} stands there twice "
                f"(first in line {seen[key]})"
            )
        seen[key] = line
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _no_duplicates)


def load_file(path: Path) -> Values:
    """The map in a YAML file; an empty file is an empty map.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a map.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}: {where}not valid YAML: {problem}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a map of keys is expected, not {type(values).__name__}")
    return values


def defaults() -> Values:
    """The values of the chart.

    Raises:
        ConfigError: chart/values.yaml is not beside the program.
    """
    return load_file(DEFAULTS)


def load(files: Sequence[Path] = (), sets: Sequence[str] = (), set_strings: Sequence[str] = ()) -> Values:
    """The defaults with `files`, then `sets`, then `set_strings` merged over them.

    Raises:
        ConfigError: a file or a flag is malformed. What the values mean is checked by config.parse.
    """
    values = defaults()
    for file in files:
        values = merge(values, load_file(Path(file)))
    flags: Values = {}
    for text in sets:
        parse_set(text, flags)
    for text in set_strings:
        parse_set(text, flags, strings=True)
    return merge(values, flags)


def merge(base: Values, over: Values) -> Values:
    """`base` with `over` laid over it. Neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def parse_set(text: str, into: Values, strings: bool = False) -> None:
    """Read one `--set` flag into `into`. With `strings`, values are never typed.

    Raises:
        ConfigError: the flag is malformed; it is quoted.
    """
    _SetParser(text, strings).read(into)


class _SetParser:
    """A reader of `key=value,...`, one character at a time, as pkg/strvals does it."""

    def __init__(self, text: str, strings: bool):
        self._text, self._strings, self._at = text, strings, 0

    def read(self, into: Values) -> None:
        while self._at < len(self._text):
            self._pair(into)

    def _fail(self, why: str) -> ConfigError:
        return ConfigError(f"--set {self._text!r}: {why} (expected key=value, e.g. training.epochs=3)")

    def _until(self, stops: str) -> tuple[str, str]:
        """Text up to one of `stops`, unescaped, and the stop ("" at the end)."""
        out: list[str] = []
        while self._at < len(self._text):
            c = self._text[self._at]
            self._at += 1
            if c in stops:
                return "".join(out), c
            if c == "\\" and self._at < len(self._text):
                c = self._text[self._at]
                self._at += 1
            out.append(c)
        return "".join(out), ""

    def _pair(self, into: Values) -> None:
        key, stop = self._until(".=[,")
        if not key and stop != "=":
            raise self._fail("a key is missing")
        if not key:
            raise self._fail("a key is missing before '='")
        if stop == "=":
            into[key] = self._value()
        elif stop == ".":
            inner = into.get(key)
            inner = into[key] = inner if isinstance(inner, dict) else {}
            if self._at >= len(self._text):
                raise self._fail(f"key {key!r} ends with a dot")
            self._pair(inner)
        elif stop == "[":
            present = into.get(key)
            into[key] = self._item(present if isinstance(present, list) else [])
        else:
            raise self._fail(f"key {key!r} has no value")

    def _item(self, items: list[Any]) -> list[Any]:
        """`0]=x`, `0].b=x` or `0][1]=x`: put x at that place of the list."""
        text, stop = self._until("]")
        if stop != "]" or not re.fullmatch(r"\d+", text):
            raise self._fail(f"[{text}] is not a list index")
        index = int(text)
        if index > MOST_INDEX:
            raise self._fail(f"list index {index} is larger than {MOST_INDEX}")
        items = items + [None] * (index + 1 - len(items))
        rest, stop = self._until("=.[")
        if rest or not stop:
            raise self._fail(f"'=' , '.' or '[' is expected after [{index}]")
        present = items[index]
        if stop == "=":
            items[index] = self._value()
        elif stop == "[":
            items[index] = self._item(present if isinstance(present, list) else [])
        else:
            inner = dict(present) if isinstance(present, dict) else {}
            self._pair(inner)
            items[index] = inner
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
            if text or stop == "," or items:
                items.append(self._typed(text))
            if stop == "}":
                if self._text[self._at : self._at + 1] == ",":
                    self._at += 1
                return items

    def _typed(self, text: str) -> Any:
        if self._strings:
            return text
        lower = text.lower()
        if lower in ("true", "false"):
            return lower == "true"
        if lower == "null":
            return None
        if text == "0" or re.fullmatch(r"[+-]?[1-9]\d*", text):
            return int(text)
        return yaml_number(text)


def yaml_number(text: str) -> Any:
    """Helm leaves everything else a text and lets the schema decide; a decimal number is a number here."""
    return float(text) if re.fullmatch(r"[+-]?\d+\.\d+", text) else text
