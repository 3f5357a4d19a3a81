# SPDX-License-Identifier: Apache-2.0
"""Draw state diagrams of Mermaid as SVG (a hook of mkdocs.yml).

GitHub draws Mermaid itself, but the site loads no script from another host.

Each state is a column, and each arrow has a row of its own, so nothing overlaps.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

NAMED = re.compile(r'^\s*state "([^"]+)" as (\w+)$')
ARROW = re.compile(r"^\s*(\S+) --> (\S+?)(?:: (.+))?$")
CHARACTER = 7.2  # width in pixels of a character of the font below
PADDING, ROW, HEAD = 14, 30, 48
FIRST_OR_LAST = "[*]"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the diagrams of a page by pictures."""
    return FENCE.sub(lambda found: f"<div>{svg(found[1])}</div>", markdown)


def svg(text: str) -> str:
    """Return the diagram as an SVG element that takes the colors of the text around it.

    Raises:
        ValueError: a line is no state and no arrow.
    """
    names: dict[str, str] = {}
    arrows: list[tuple[str, str, str]] = []
    for line in text.strip().splitlines():
        if named := NAMED.match(line):
            names[named[2]] = named[1]
        elif arrow := ARROW.match(line):
            arrows.append((arrow[1], arrow[2], arrow[3] or ""))
        elif line.strip() != "stateDiagram-v2":
            raise ValueError(
                f"not drawn: {line.strip()!r} (a state or an arrow of a state diagram was expected)"
            )
    states = list(dict.fromkeys(s for a, b, _ in arrows for s in (a, b) if s != FIRST_OR_LAST))
    first = {b for a, b, _ in arrows if a == FIRST_OR_LAST}
    last = {a for a, b, _ in arrows if b == FIRST_OR_LAST}
    rows = [arrow for arrow in arrows if FIRST_OR_LAST not in arrow[:2]]
    wide = [len(names.get(s, s)) * CHARACTER + 2 * PADDING for s in states]
    for before, after, events in rows:  # an event fits between its two states
        low, high = sorted((states.index(before), states.index(after)))
        lack = (
            len(events) * CHARACTER + 2 * PADDING - (sum(wide[low:high]) + sum(wide[low + 1 : high + 1])) / 2
        )
        if lack > 0:
            wide[low] += lack
            wide[high] += lack
    middle = [sum(wide[:n]) + wide[n] / 2 for n in range(len(states))]
    height = HEAD + ROW * len(rows) + PADDING
    parts = [
        f'<svg class="states" role="img" aria-label="state diagram" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {sum(wide):.0f} {height}" style="max-width:{sum(wide):.0f}px" font-size="12" '
        'font-family="monospace" fill="currentColor" stroke="currentColor" text-anchor="middle">'
    ]
    for state, x in zip(states, middle, strict=True):
        name = names.get(state, state)
        half = len(name) * CHARACTER / 2 + 8
        thick = 2.5 if state in first else 1
        parts.append(f'<line x1="{x:.0f}" y1="36" x2="{x:.0f}" y2="{height}" stroke-opacity="0.25"/>')
        parts.append(
            f'<rect x="{x - half:.0f}" y="10" width="{2 * half:.0f}" height="26" rx="6" fill="none" '
            f'stroke-width="{thick}" stroke-dasharray="{"4 3" if state in last else "none"}"/>'
        )
        parts.append(f'<text x="{x:.0f}" y="27" stroke="none">{escape(name)}</text>')
    for n, (before, after, events) in enumerate(rows):
        y = HEAD + ROW * n + 18
        start, end = middle[states.index(before)], middle[states.index(after)]
        tip = end + (-7 if end > start else 7)
        parts.append(f'<circle cx="{start:.0f}" cy="{y}" r="3"/>')
        parts.append(f'<line x1="{start:.0f}" y1="{y}" x2="{tip:.0f}" y2="{y}"/>')
        parts.append(f'<path d="M{end:.0f},{y} L{tip:.0f},{y - 4} L{tip:.0f},{y + 4} Z"/>')
        parts.append(f'<text x="{(start + end) / 2:.0f}" y="{y - 5}" stroke="none">{escape(events)}</text>')
    return "".join([*parts, "</svg>"])
