# SPDX-License-Identifier: Apache-2.0
"""Each published figure of a measurement is in the raw record that its row links.

A row of a table with a column `record` links benchmarks/records/DATE-NAME/record.json, where an entry has the
name in the row's first cell. Each number in the other columns, but for those in DESCRIBED, must be one of the
entry's statistics, as far as it is printed: a value, a list's median, least or greatest, or a ratio of them.
A figure in the text is the text of such a link, of the entry for edl.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/benchmark.md")
DESCRIBED = {
    "command",
    "error",
    "goal",
    "lines",
    "load",
    "met",
    "peer",
    "record",
    "row",
    "versions",
    "way",
    "what",
}
FACTS = {"command", "commit", "date", "load", "machine", "versions"}
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
LINK = re.compile(r"\[([^]]*\d[^]]*)\]\(([^)]*/record\.json)\)")
WITH_UNIT = re.compile(r"(?<![\w.])\d[\d,.]* ?(?:s|ms|seconds|minutes|times|%|MiB|MB|GB)(?!\w)")


def tables(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row of each table: its line, and its cells by the heads of their columns."""
    head: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = cells
        elif set("".join(cells)) - set("-: "):
            yield number, dict(zip(head, cells, strict=True))


def in_text(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each figure with a unit outside tables and commands, as the row of a table with its record."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if fenced or line.startswith(("|", "```")):
            continue
        for words, link in LINK.findall(line):
            yield number, {"name": "edl", "figure": words, "record": f"[raw]({link})"}
        for figure in WITH_UNIT.findall(LINK.sub("", line)):
            yield number, {"name": "edl", "figure": figure, "record": ""}


def entry(record: Any, name: str) -> Any:
    """The part of a record with this name: the value of this key, or an object with it as its `name`."""
    if isinstance(record, dict):
        if record.get("name") == name:
            return record
        if name in record:
            return record[name]
        record = list(record.values())
    parts = record if isinstance(record, list) else []
    return next((found for part in parts if (found := entry(part, name)) is not None), None)


def statistics_of(values: Any) -> Iterator[float]:
    """All numbers that may be printed for an entry: a list of rounds, or an object of numbers and lists."""
    if isinstance(values, list):
        rounds = [each for each in values if isinstance(each, dict)]
        keys = {key for each in rounds for key in each}
        values = {"": values} if not rounds else {key: [each.get(key) for each in rounds] for key in keys}
        yield float(len(rounds))
    columns = [column for value in values.values() if (column := numbers(value))]
    for column in columns:
        known = [value for value in column if value is not None]
        yield from [statistics.median(known), min(known), max(known), *known] if known else []
        yield float(len(column) - len(known))  # how often there was no result
    for a, b in permutations(columns, 2):
        if len(a) == len(b) and all(a) and all(b):
            pairs = [x / y for x, y in zip(a, b, strict=True) if x and y]
            yield from (statistics.median(pairs), min(pairs), max(pairs))
        x, y = ([value for value in column if value is not None] for column in (a, b))
        if x and y and statistics.median(y):
            yield statistics.median(x) / statistics.median(y)


def numbers(value: Any) -> list[float | None]:
    """A number, or a list of nothing but numbers and None."""
    values = value if isinstance(value, list) else [value]
    known = [each for each in values if each is not None]
    if not known or any(isinstance(each, bool) or not isinstance(each, int | float) for each in known):
        return []
    return values


def printed_as(value: float, text: str) -> bool:
    """Whether a value rounds to a printed number."""
    plain = text.replace(",", "")
    digits = len(plain.partition(".")[2])
    return abs(value - float(plain)) <= 0.5000001 * 10.0**-digits


def wrong(cells: dict[str, str], root: Path, page: Path) -> list[str]:
    """What is wrong with the row of a figure: its record, or numbers that the record does not have."""
    link = re.search(r"\]\(([^)]*/record\.json)\)", cells.get("record", ""))
    if not link:
        return ["no link to a record"]
    file = (page.parent / link[1]).resolve()
    if not file.is_relative_to(root / "benchmarks" / "records") or not file.exists():
        return [f"no record {link[1]}"]
    record = json.loads(file.read_text())
    facts = sorted(FACTS - record.keys())
    name = next(iter(cells.values()))
    found = entry({key: value for key, value in record.items() if key not in FACTS}, name)
    if found is None:
        return [f"the record has no entry {name!r}"]
    here = list(statistics_of(found))
    cited = [n for head, cell in cells.items() if head not in DESCRIBED for n in NUMBER.findall(cell)]
    missing = [n for n in cited if not any(printed_as(value, n) for value in here)]
    return [f"the record has no {fact}" for fact in facts] + [f"the record has no {n}" for n in missing]


@pytest.mark.parametrize("name", PAGES)
def test_each_figure_is_in_the_record_that_its_row_links(name: str) -> None:
    page = ROOT / name
    rows = [
        (number, cells)
        for number, cells in tables(page.read_text())
        if "record" in cells or "scripts/bench" in str(cells)
    ]
    rows += in_text(page.read_text()) if name == "README.md" else []
    assert rows, "the page has no figures"
    found = {number: problems for number, cells in rows if (problems := wrong(cells, ROOT, page))}
    assert found == {}


def test_a_figure_in_the_text_needs_a_record_as_well() -> None:
    text = "It costs 0.1 s, or [about 2 s](a/record.json).\n```console\n$ edl  # 4 s\n```\n| 5 s |\n3 ways\n"
    found = [(line, cells["figure"], cells["record"]) for line, cells in in_text(text)]
    assert found == [(1, "about 2 s", "[raw](a/record.json)"), (1, "0.1 s", "")]


def test_a_figure_without_its_record_or_with_a_different_value_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "records" / "2026-01-01-kill"
    folder.mkdir(parents=True)
    rows = [
        {"name": "kill", "ours": [0.1, 0.2, 0.34], "peer": [2.0, 4.0, 5.0]},
        {"name": "join", "ours": [9.0]},
    ]
    facts = dict.fromkeys(FACTS, "")
    (folder / "record.json").write_text(json.dumps({**facts, "rows": rows}))
    page = tmp_path / "docs" / "benchmark.md"
    link = "[raw](../benchmarks/records/2026-01-01-kill/record.json)"

    def problems(edl: str, record: str = link) -> list[str]:
        return wrong({"what": "kill", "edl": edl, "record": record}, tmp_path, page)

    assert problems("0.20 (0.10..0.34) s, 0.05 of the peer's") == []
    assert problems("0.3 s") == []
    assert problems("0.21 s") == ["the record has no 0.21"]
    assert problems("20 times as fast") == []
    assert problems("25 times as fast") == ["the record has no 25"]
    assert problems("9 s") == ["the record has no 9"], "it is that of the other entry"
    assert problems("0.20 s", "") == ["no link to a record"]
    assert problems("0.20 s", "[raw](../benchmarks/records/other/record.json)") != []
