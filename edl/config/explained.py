# SPDX-License-Identifier: Apache-2.0
"""The meaning of each value, from the comments of the chart's values.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path

from edl.config import values
from edl.config.changes import live_keys
from edl.config.job import JOB, File, flat, parse
from edl.config.messages import allowed, unknown
from edl.errors import ConfigError


def comments(file: Path) -> dict[str, str]:
    """Return the `# --` comment of each key in a values file, by dotted key, without line breaks."""
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
                found[".".join(key for _, key in above)] = comment
            comment = ""
    return found


def explained(key: str) -> list[str]:
    """Explain a value, or list the values of a section; those of a job if `key` is empty.

    Returns:
        The lines to print.

    Raises:
        ConfigError: no value and no section has this name; the message suggests others.
    """
    said, defaults = comments(values.DEFAULTS), flat(values.defaults())
    if key in defaults:
        live = key in live_keys(parse(values.defaults()))
        return [
            f"{key}: {allowed(key, File)}; default {json.dumps(defaults[key])}",
            "A running job takes a new value over." if live else "A running job keeps its value.",
            "",
            said.get(key, "Passed on to Kubernetes."),
        ]
    prefix = f"{key}." if key else ""
    below = [name for name in defaults if name.startswith(prefix)]
    if not below:
        raise ConfigError(f"{key}: {unknown(key, File)}")
    if not key:
        below = [name for name in below if name.partition(".")[0] in JOB]
    width = max(len(name) for name in below)
    return [f"{name:{width}}  {said.get(name, '').partition('. ')[0].rstrip('.')}".rstrip() for name in below]
