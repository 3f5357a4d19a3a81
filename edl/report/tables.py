# SPDX-License-Identifier: Apache-2.0
"""The style and the tables of a report's page. Nothing here needs Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from edl.formatting import plain

COLOURS = {
    "paper": "#fefefe",
    "ink": "#1f2328",
    "muted": "#5c6670",
    "grid": "#d5dae0",
    "blue": "#0b6bb0",
    "sky": "#57b0e6",
    "orange": "#d98e04",
    "green": "#0a8f68",
    "red": "#c8441b",
    "purple": "#a04c8c",
    "grey": "#9aa3ad",
}
_DARK = {
    "paper": "#15181c",
    "ink": "#e4e7ea",
    "muted": "#9aa3ad",
    "grid": "#343a41",
    "blue": "#4aa3df",
    "sky": "#9bd1f2",
    "orange": "#f0b23f",
    "green": "#3cc79b",
    "red": "#f0714a",
    "purple": "#cf86bd",
    "grey": "#78828c",
}
_CSS = """
:root { color-scheme: light dark; LIGHT }
@media screen and (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem }
p { margin: .4rem 0 } .muted { color: var(--muted) }
.phase { font-weight: 600 } .mixed { color: var(--orange) }
.good { color: var(--green) } .bad { color: var(--red) }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0 }
dl div { border: 1px solid var(--grid); border-radius: .4rem; padding: .5rem .7rem }
dt { color: var(--muted); font-size: .85rem }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums }
.verdict { border-left: .25rem solid var(--blue); padding: .3rem .8rem; margin: 1rem 0 }
figure { margin: .5rem 0 } .newest { margin: .3rem 0; padding-left: 1.2rem }
[data-age]::after { content: " " attr(data-age); color: var(--orange); font-size: .85rem; font-weight: 400 }
.strip { display: grid; grid-template-columns: max-content 1fr; gap: .3rem .7rem; align-items: center;
  margin: .6rem 0 }
.strip b { font-weight: 400; font-size: .85rem; text-align: right }
.strip svg { width: 100%; overflow: visible; fill: none } .strip path { vector-effect: non-scaling-stroke }
svg.ring { height: 3.2rem } svg.lane { height: 1rem }
.axis { display: flex; justify-content: space-between; color: var(--muted); font-size: .85rem }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem }
.scroll { overflow-x: auto }
.scroll svg { display: block; width: 100%; min-width: 40rem; height: auto }
summary { cursor: pointer; color: var(--blue); padding: .3rem 0 }
table { border-collapse: collapse; font-size: .9rem; min-width: 30rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0 }
th, td { border-bottom: 1px solid var(--grid) }
td.n, th.n { text-align: right; white-space: nowrap }
:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px }
@media screen and (max-width: 42rem) { figure::before, details[open] > summary::after {
  content: "\\2194  scroll sideways"; color: var(--muted); font-size: .85rem }
  details[open] > summary::after { margin-left: .7rem } }
@media print { body { max-width: none; padding: 0 } .scroll { overflow: visible } .scroll svg { min-width: 0 }
  section { break-inside: avoid } }
"""


def style() -> str:
    """The style sheet of a page."""
    return _CSS.replace("LIGHT", _variables(COLOURS)).replace("DARK", _variables(_DARK))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that can be unfolded. The columns whose names begin with # hold numbers."""
    numbers = [name.startswith("#") for name in columns]
    kinds = [' class="n"' if number else "" for number in numbers]
    head = "".join(
        f'<th scope="col"{k}>{text_of(n.lstrip("#"))}</th>' for n, k in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{text_of(cell)}</td>" for cell, k in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    if not body:
        return ""
    return (
        f"<details><summary>Table: {text_of(title)}</summary>"
        + scrolled(title, f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>")
        + "</details>"
    )


def scrolled(title: str, content: str) -> str:
    """An element that scrolls sideways on a small screen, also with the keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text_of(title)}">{content}</div>'


def text_of(value: object) -> str:
    """Return a value as text for HTML, without control characters."""
    return escape(plain(str(value)))


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {code};" for name, code in colours.items())
