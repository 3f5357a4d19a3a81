# SPDX-License-Identifier: Apache-2.0
"""Formatting of text from outside edl for printing: names, reasons, log lines, values.

Promise: a result of `plain` moves no cursor, changes no colour or title of a terminal, hides no text and
reverses none, and can be encoded as UTF-8. Replaced characters stay readable, as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters but newline and tab (including 8-bit ones: some terminals read one of them as ESC [);
# marks that reverse the direction of text, or split its lines; and halves of surrogate pairs.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Replace each unfit character by an escape, such as \x1b."""
    return _UNFIT.sub(_escape, text)


def how_many(count: int, thing: str) -> str:
    """Format a count with its noun: `1 epoch`, `2 epochs`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def measured(value: float | None) -> str:
    """Format a loss or a metric with four significant digits: `0.7500`, `1.234e-06`; None is not finite."""
    return "not finite" if value is None else f"{value:#.4g}".removesuffix(".")


def numbered(thing: str, numbers: Sequence[object], most: int) -> str:
    """Name at least one thing by its number, and at most `most` of them.

    Examples: `worker 3`; `workers 0, 1 and 2`; beyond `most`, `workers 0, 1 and 4 more`.
    """
    named = [str(number) for number in numbers[:most]]
    if len(numbers) > most:
        named.append(f"{len(numbers) - most} more")
    *some, last = named
    said = f"{', '.join(some)} and {last}" if some else last
    return f"{thing}{'' if len(numbers) == 1 else 's'} {said}"


def one_line(text: str) -> str:
    """Apply `plain`, and escape newlines, too."""
    return plain(text).replace("\n", "\\n")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def class_numbers(classes: Sequence[str], most: int = 20) -> str:
    """The classes with their numbers, for people: "0 cat, 1 dog"."""
    shown = ", ".join(f"{number} {name}" for number, name in enumerate(classes[:most]))
    return shown + (f" and {len(classes) - most:,} more" if len(classes) > most else "")
