# SPDX-License-Identifier: Apache-2.0
"""Damage a job's journal, by chance or like a forger, and collect the errors that the tools report."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from edl.errors import EdlError
from edl.journal import audit
from edl.journal.format import Link
from edl.master.journal import replay

Entries = list[dict[str, Any]]
JOURNALS = 1000
KEYS = (
    "worker",
    "generation",
    "layout",
    "epochs",
    "shares",
    "step",
    "type",
    "members",
    "root",
    "records",
    "effects",
)


def refusals(output: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield the errors of audit and replay for this directory; a tool that accepts it yields nothing."""
    try:
        audit.audit(output)
    except EdlError as error:
        yield str(error)
    capsys.readouterr()
    if replay.main(str(output)):
        yield capsys.readouterr().err.removesuffix("\n")


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def of_type(entries: Entries, kind: str) -> Entries:
    """All events and effects of this type."""
    told = [entry["event"] for entry in entries[1:]]
    told += [effect for entry in entries[1:] for effect in entry["effects"]]
    return [one for one in told if one["type"] == kind]


def seal(path: Path, entries: list[Any], link: Link) -> Link:
    """Write these lines with a valid hash chain. Returns its last link."""
    lines = []
    for entry in entries:
        link, line = link.seal(entry)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    return link


def say_in_summary(output: Path, link: Link) -> None:
    """Change the summary so that the journal ends at this link."""
    summary = json.loads((output / artifacts.SUMMARY).read_text()) | {"journal": asdict(link)}
    (output / artifacts.SUMMARY).write_text(json.dumps(summary))


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Return the journal with some bytes or lines changed, lost, repeated or moved; never unchanged."""
    lines = whole.splitlines(keepends=True)
    while True:
        a, b = chance.randrange(len(whole)), chance.randrange(len(whole))
        i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
        changes: list[Callable[..., bytes]] = [
            lambda a=a: whole[:a] + bytes([chance.randrange(256)]) + whole[a + 1 :],
            lambda a=a: whole[:a] + whole[a + 1 + chance.randrange(40) :],
            lambda a=a: whole[:a] + chance.randbytes(chance.randrange(1, 20)) + whole[a:],
            lambda a=a, b=b: whole[: min(a, b)] + whole[max(a, b) :],
            lambda a=a, b=b: whole[:a] + whole[b : b + 200] + whole[a:],
            lambda a=a: whole[:a],
            lambda i=i: b"".join(lines[:i] + lines[i + 1 :]),
            lambda i=i, j=j: b"".join([*lines[:i], lines[j], *lines[i:]]),
            lambda i=i, j=j: b"".join([*lines[:i], lines[j], *lines[i + 1 :]]),
            lambda: whole.replace(*chance.choice([(b"0", b"1"), (b"true", b"false"), (b"\n", b"\r\n")]), 3),
            lambda a=a: whole[:a] + b"\0" * 64 + whole[a + 64 :],
            lambda: whole + lines[-1],
        ]
        if (found := chance.choice(changes)()) != whole:
            return found


def distort(entries: list[Any], chance: random.Random, part: str = "") -> None:
    """Change one value anywhere, or the order of lines; with `part`, a value in that part of the head."""
    if not part and chance.random() < 0.2:
        i, j = chance.randrange(len(entries)), chance.randrange(len(entries))
        act = chance.choice(("swap", "delete", "double"))
        if act == "swap":
            entries[i], entries[j] = entries[j], entries[i]
        elif act == "double":
            entries.insert(i, json.loads(json.dumps(entries[j])))
        elif len(entries) > 2:
            del entries[i]
        return
    places: list[tuple[Any, Any]] = []
    find = partial(_places, places)
    if part:
        find(entries[0][part])
    else:
        find(entries[chance.randrange(1, len(entries))] if chance.random() < 0.9 else entries[0])
    holder, key = chance.choice(places)
    value: Any = chance.choice(
        (None, -1, 0, 1, 7, 1 << 62, 0.5, "", "x" * 300, "\ud800", [], {}, [[3, 1]], True)
    )
    lot = chance.random()
    if lot < 0.15:
        del holder[key]
    elif lot < 0.25 and isinstance(holder, dict):
        holder[chance.choice(KEYS)] = value
    else:
        holder[key] = value


def _places(found: list[tuple[Any, Any]], value: Any) -> None:
    """Collect every (map or list, key) inside `value`."""
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            _places(found, value[key])
