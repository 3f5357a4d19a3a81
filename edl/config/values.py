# SPDX-License-Identifier: Apache-2.0
"""Values files and `--set` flags, merged by the rules of Helm 3.

    chart/values.yaml  <-  each -f file, in order  <-  each --set, in order  <-  each --set-string
                       <-  each --set-file

Maps merge key by key; lists and scalars replace; `null` removes a default. Files and flags are parsed like
Helm does it, so one values file means the same on a laptop and in a cluster.

Two deliberate differences, both tested in tests/unit/config/test_values.py:
- Stricter: mistakes that Helm silently ignores (a duplicate key, a second document, an empty key, an unknown
  tag) are refused.
- More lenient: `--set a=0.5` is a number here (see `edl.config.helm_set`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from edl.config.helm_set import Values, parse_set
from edl.errors import ConfigError

DEFAULTS = Path(__file__).resolve().parents[1] / "chart" / "values.yaml"
MERGE = "tag:yaml.org,2002:merge"  # tag of the key <<


STANDARD_INPUT = "-"
MAX_BYTES = 1 << 20  # Kubernetes stores no larger objects
MAX_VALUES = 100_000  # greatest number of values in one file, with all aliases expanded
MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """A YAML loader with the types of Helm's parser (go-yaml 2), which differ from PyYAML's.

    PyYAML reads 1:30 as 90 and 1e3 as a text. Here, keys are the literal text of the file, and a duplicate
    key is an error.
    """

    # Nothing is inherited: each supported tag is listed below.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node


def _check_size(root: yaml.Node) -> None:
    """Refuse a document whose size explodes when its aliases are expanded.

    Raises:
        ConfigError: the document has too many values, is nested too deeply, or contains itself.
    """
    known: dict[int, tuple[int, int]] = {}  # number of values and of levels of each node
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) in open_nodes:
            raise _refused(node, "an alias (*) stands for something that it is a part of")
        if id(node) not in known and depth <= MAX_DEPTH:
            open_nodes.add(id(node))
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            sizes = [size(part, depth + 1) for part in parts]
            known[id(node)] = 1 + sum(n for n, _ in sizes), 1 + max((n for _, n in sizes), default=0)
            open_nodes.remove(id(node))
        values, levels = known.get(id(node), (0, 0))
        if depth + levels > MAX_DEPTH:
            raise _refused(node, f"nested more than {MAX_DEPTH} levels deep")
        if values > MAX_VALUES:
            raise _refused(node, f"more than {MAX_VALUES:,} values, with its aliases (*) written out")
        return values, levels

    size(root, 0)


def number(text: str) -> int | float | str:
    """Convert an unquoted YAML word to a number if it is one; else return the word."""
    plain = text.replace("_", "")
    with contextlib.suppress(ValueError):
        whole = int(plain, 8 if re.fullmatch(r"[-+]?0[0-7]+", plain) else 0)
        if -(1 << 63) <= whole < 1 << 64:  # range of Go's integers; others are floats
            return whole
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", plain):
        found = float(plain)
        return found if math.isfinite(found) else text
    return text


def _bool(text: str) -> bool | str:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else text


def _mapping(loader: _Loader, node: yaml.Node) -> Values:
    if not isinstance(node, yaml.MappingNode):
        raise _refused(node, "not a map")
    seen: dict[str, int] = {}
    found: Values = {}
    for key_node, value_node in node.value:
        key, value = _key(key_node), loader.construct_object(value_node, deep=True)
        if key in seen:
            raise _refused(key_node, f"duplicate key {key!r} (first in line {seen[key]})")
        seen[key] = key_node.start_mark.line + 1
        if key_node.tag == MERGE:
            # As in go-yaml 2, the order in the file decides: only later keys win over merged ones.
            for part in reversed(value) if isinstance(value, list) else [value]:
                if not isinstance(part, dict):
                    raise _refused(value_node, "only maps can be merged by <<")
                found |= part
        else:
            found[key] = value
    return found


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _refused(node, "a key must be a string, not a list or a map")
    return str(node.value)


def _unknown_tag(_: _Loader, node: yaml.Node) -> None:
    raise _refused(node, f"unknown tag {node.tag!r}")


def _refused(node: yaml.Node, why: str) -> ConfigError:
    return ConfigError(f"{node.start_mark.name}: line {node.start_mark.line + 1}: {why}")


_TRUE, _FALSE = {"y", "yes", "true", "on"}, {"n", "no", "false", "off"}
_WORDS = "|".join(f"{w}|{w.capitalize()}|{w.upper()}" for w in sorted(_TRUE | _FALSE))

# Pattern of unquoted words of each type, and their possible first characters ("": the empty word).
_WORD_TAGS = {
    "merge": ("<<", ["<"]),
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (_WORDS, list("yYnNtTfFoO")),
    "int": (r"[-+.0-9][-+.\w]*", list("-+.0123456789")),  # may also be a float or a text: see number()
}
_CONSTRUCTORS: dict[str, Callable[[Any, Any], Any]] = {
    "map": _mapping,
    "seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    "null": lambda loader, node: None,
    "bool": lambda loader, node: _bool(loader.construct_scalar(node)),
    "int": lambda loader, node: number(loader.construct_scalar(node)),
    "float": lambda loader, node: number(loader.construct_scalar(node)),
    "str": lambda loader, node: loader.construct_scalar(node),
    "merge": lambda loader, node: loader.construct_scalar(node),
}
for _tag, (_look, _first) in _WORD_TAGS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_look})$", re.ASCII), _first)
for _tag, _construct in _CONSTRUCTORS.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)
_Loader.add_constructor(None, _unknown_tag)


def read_text(name: str) -> str:
    """Read the text of a file; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, is too large for a values file, or is not UTF-8.
    """
    shown = "standard input" if name == STANDARD_INPUT else name
    try:
        if name == STANDARD_INPUT:
            found = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(name, "rb") as file:
                found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot read: {error.strerror}") from error
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{shown}: larger than {MAX_BYTES >> 20} MiB, which no release of Helm may be")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}: cannot read: line {line} is not UTF-8") from error


def load_file(path: Path) -> Values:
    """Load the map in a YAML file; an empty file is an empty map; `-` is standard input.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a map, or would exhaust its reader's memory.
    """
    name = str(path)
    text = io.StringIO(read_text(name))
    text.name = path = "standard input" if name == STANDARD_INPUT else name  # type: ignore[assignment]
    try:
        values = yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        said = [getattr(error, part, None) for part in ("context", "problem")]
        problem = ", ".join(filter(None, said)) or str(error)
        raise ConfigError(f"{path}: {where}invalid YAML: {problem}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a map, found {type(values).__name__}")
    # Convert through JSON, like Helm: an alias (*x) is then a copy, which a flag can change by itself.
    return typing.cast(Values, json.loads(json.dumps(values)))


def defaults() -> Values:
    """The values of the chart.

    Raises:
        ConfigError: chart/values.yaml is not beside the code of edl.
    """
    if not DEFAULTS.is_file():
        raise ConfigError(f"{DEFAULTS} not found; edl reads the default values there, beside its own code")
    return typing.cast(Values, json.loads(_text_of(DEFAULTS)))


@cache
def _text_of(path: Path) -> str:
    """A values file as JSON, which is read in less than a hundredth of the time."""
    return json.dumps(load_file(path))


def load(
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    set_strings: Sequence[str] = (),
    set_files: Sequence[str] = (),
) -> Values:
    """The defaults with `files`, then `sets`, `set_strings` and `set_files` merged over them.

    Raises:
        ConfigError: a file or a flag is malformed. What the values mean is checked by config.parse.
    """
    return merge(defaults(), given(files, sets, set_strings, set_files))


def given(
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    set_strings: Sequence[str] = (),
    set_files: Sequence[str] = (),
) -> Values:
    """Like `load`, but without the defaults: a flag can change a list of a file, but not of the defaults."""
    said: Values = {}
    for file in files:
        said = _overlay(said, load_file(Path(file)))
    for text in sets:
        parse_set(text, said)
    for text in set_strings:
        parse_set(text, said, strings=True)
    for text in set_files:
        parse_set(text, said, read=read_text)
    return said


def _overlay(base: Values, over: Values) -> Values:
    """Lay one values file over a different one. A null is an ordinary value here; later files replace it."""
    laid = dict(base)
    for key, value in over.items():
        present = laid.get(key)
        both = isinstance(value, dict) and isinstance(present, dict)
        laid[key] = _overlay(present, value) if both else value  # type: ignore[arg-type]
    return laid


def merge(base: Values, over: Values) -> Values:
    """Merge `over` into a copy of `base`. Neither is changed.

    A null removes the key of `base`. If `base` lacks the key, the null stays, so that a misspelt key is
    refused by name even if its value is null.
    """
    merged = dict(base)
    for key, value in over.items():
        if value is None and merged.get(key) is not None:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
