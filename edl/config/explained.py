# SPDX-License-Identifier: Apache-2.0
"""The meaning of each value, from the comments of the chart's values.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.config import values
from edl.config.changes import live_keys
from edl.config.job import JOB, File, flat, parse
from edl.config.messages import allowed, unknown
from edl.errors import ConfigError

_TYPE = re.compile(r"^\((?:bool|int|float|string|list|object|/)+\) ")


def comments(file: Path) -> dict[str, str]:
    """Return the `# --` comment of each key in a values file, by dotted key, without line breaks.

    The type at its beginning, such as `(int)`, is left out: the schema has it.
    """
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # the keys that the line is below, with their indents
    comment = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\s*# -- (.*)", line):
            comment = match[1]
        elif comment and (match := re.match(r"\s*# (.*)", line)):
            comment += f" {match[1]}"
        elif match := re.match(r"( *)([\w-]+):", line):
            above = [(indent, key) for indent, key in above if indent < len(match[1])]
            above.append((len(match[1]), match[2]))
            if comment:
                found[".".join(key for _, key in above)] = _TYPE.sub("", comment)
            comment = ""
    return found


@dataclass(frozen=True)
class Explained:
    """A value: its dotted key, allowed type, default, and whether a running job takes a new one over."""

    key: str
    type: str
    default: Any
    live: bool
    meaning: str


def explained(key: str) -> list[Explained]:
    """Explain a value, or all values of a section; those of a job if `key` is empty.

    Raises:
        ConfigError: no value and no section has this name; the message suggests others.
    """
    said, defaults = comments(values.DEFAULTS), flat(values.defaults())
    if key in defaults:
        below = [key]
    elif key:
        below = [name for name in defaults if name.startswith(f"{key}.")]
    else:
        below = [name for name in defaults if name.partition(".")[0] in JOB]
    if not below:
        raise ConfigError(f"{key}: {unknown(key, File)}")
    live = live_keys(parse(values.defaults()))
    return [
        Explained(
            name,
            allowed(name, File),
            defaults[name],
            name in live,
            said.get(name, "Passed on to Kubernetes."),
        )
        for name in below
    ]
