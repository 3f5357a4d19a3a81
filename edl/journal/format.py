"""The file format of a journal: segments, each a head and then one line for each event, in one chain of
hashes.

    {"journal": "edl", "version": 9, "run_id": ..., "number": 7, "oldest": 3, "after": "5f0e...",
     "values": {...}, "proof": {...}, "state": {...}, "chain": "77ab..."}
    {"now": ..., "event": {...}, "effects": [...], "chain": "09c1..."}

`chain` is the hash of the line without it and of the `chain` of the line before. So a line that was edited,
deleted, swapped or added is known: the chain is broken there. A segment goes on from the last line of the
one before it (`after`), and the summary names the last line of all, so that lines which are missing at the
end are known too.

A master begins a segment, and goes on in another one whenever one is full. When all of them together would
be too large, the oldest are deleted. What they have shown is kept at the head of the next: the books over
all lines before it (`proof`; `edl.journal.proof`), and what the master's core was then (`state`; null
where a master begins, with an empty core). So `edl audit` and `edl replay` go on from any head. `oldest` is
the number of the oldest segment that was kept when the segment began: if one from there on is missing,
somebody else has deleted it. Which number a file has: `edl.contract.artifacts`.

A field that has its default is not written: another default is another version.

A last line without its newline is torn: the master was killed while it wrote it. It is not in the journal.

What the chain cannot show is that somebody has written the whole journal and the summary anew. To rule that
out, keep the last `chain`, which `edl audit` prints, in another place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any

from edl.contract import artifacts
from edl.errors import EdlError
from edl.fast_json import encoded

DIGITS = 32  # of a link: 128 bits
_SEAL = re.compile(rb',"chain":"([0-9a-f]{%d})"\}\n' % DIGITS)
_SEAL_LENGTH = len(',"chain":""}\n') + DIGITS
_TAIL = 1 << 20  # more than any line has


_IN_A_HEAD: dict[str, Any] = {
    "number": int, "oldest": int, "after": str, "values": dict,
    "proof": (dict, NoneType), "state": (dict, NoneType),
}  # fmt: skip


class JournalDamaged(EdlError):
    """A journal is not as a master has written it; the text names file, line and what is wrong."""

    def __init__(self, path: Path, line: int, what: str):
        super().__init__(f"{path}: line {line}: {what}")


@dataclass(frozen=True)
class Link:
    """Where a chain is: its last line.

    Args:
        lines: how many lines the file has up to there.
        chain: the hash of the last one, and so of all; empty at the beginning of a run.
    """

    lines: int = 0
    chain: str = ""

    def seal(self, value: Mapping[str, Any]) -> tuple[Link, bytes]:
        """The next line of the chain as it stands in the file, and where the chain is with it."""
        body = encoded(value)
        chain = _hash(self.chain, body)
        return Link(self.lines + 1, chain), b'%b,"chain":"%b"}\n' % (body[:-1], chain.encode())


@dataclass(frozen=True)
class Head:
    """What a segment begins with.

    Args:
        number: of the segment, from 1; the masters of a run count on.
        oldest: the number of the oldest segment that is kept.
        after: the last `chain` before it; empty at the beginning of a run.
        values: of the master that writes it, as they were when it began.
        proof: what `Books.dump` gave after the last line before it; None: there is none before it.
        state: what the core was after that line; None: a master begins, with an empty core.
    """

    run_id: str
    number: int
    oldest: int
    after: str
    values: Mapping[str, Any]
    proof: Mapping[str, Any] | None
    state: Any

    def line(self) -> dict[str, Any]:
        return {"journal": "edl", "version": artifacts.JOURNAL_VERSION, **vars(self)}


class JournalReader:
    """A segment that is read once, from its first line to its last.

    Args:
        path: the file. Its head is read now.

    Raises:
        EdlError: the file cannot be read, is no journal, or one of another version of edl.
        JournalDamaged: the head is damaged.
    """

    def __init__(self, path: Path):
        self.path, self.torn = path, False
        first = _first_line(path)
        self.head = _head(path, first)
        if (version := self.head["version"]) != artifacts.JOURNAL_VERSION:
            raise EdlError(
                f"{path}: the journal has version {version}, this edl reads version "
                f"{artifacts.JOURNAL_VERSION}; use the version of edl that wrote it"
            )
        said: dict[str, Any] = {key: self.head.get(key) for key in _IN_A_HEAD}
        whole = all(key in self.head and isinstance(said[key], kinds) for key, kinds in _IN_A_HEAD.items())
        if not whole or (said["number"] == 1) != (said["proof"] is None):
            raise JournalDamaged(path, 1, "the journal's head is incomplete")
        self.number: int = said["number"]
        self.oldest: int = said["oldest"]
        self.after: str = said["after"]
        self.begins = said["state"] is None  # whether a master begins with it
        self.link = Link(0, self.after)
        self._open_line(first)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every further line as (number, what it says).

        Raises:
            JournalDamaged: a line is not what the master wrote there.
        """
        with open(self.path, "rb") as lines:
            next(lines)
            for line in lines:
                if not line.endswith(b"\n"):
                    self.torn = True
                    return
                body = self._open_line(line)
                if not isinstance(body.get("event"), dict) or not isinstance(body.get("effects"), list):
                    raise JournalDamaged(self.path, self.link.lines, "holds no event with its effects")
                yield self.link.lines, body

    def check_end(self, summary: Mapping[str, Any]) -> None:
        """Refuse a journal, read to its end, that is not the whole one of the job that `summary` is of.

        Raises:
            JournalDamaged: the last lines are missing, or it is another job's.
        """
        said = summary.get("journal")
        if not isinstance(said, dict):
            raise EdlError(f"{self.path.with_name(artifacts.SUMMARY)}: does not name the journal's last line")
        if said != {"lines": self.link.lines, "chain": self.link.chain}:
            number = self.link.lines + 1
            what = "torn" if self.torn else "missing, or the journal is another job's"
            raise JournalDamaged(
                self.path,
                number,
                f"{what}: {artifacts.SUMMARY} says that line {said.get('lines')} is the last",
            )

    def _open_line(self, line: bytes) -> dict[str, Any]:
        """The line's own part, once the chain holds."""
        number = self.link.lines + 1
        seal = _SEAL.fullmatch(line, max(len(line) - _SEAL_LENGTH, 0))
        if seal is None:
            raise JournalDamaged(self.path, number, "the line is damaged (its chain is missing)")
        body = line[: seal.start()] + b"}"
        chain = _hash(self.link.chain, body)
        if chain.encode() != seal[1]:
            raise JournalDamaged(
                self.path, number, "the chain is broken: this line, or one before it, was edited, "
                "deleted, swapped or added",
            )  # fmt: skip
        self.link = Link(number, chain)
        return _parsed(self.path, number, body)


def segments(output: Path) -> list[JournalReader]:
    """The segments that a directory has of its job's journal, in order: none is missing among them.

    Raises:
        EdlError: one cannot be read, is no journal, or one of another version of edl.
        JournalDamaged: one is missing, or damaged at its head.
    """
    paths = artifacts.journals(output)
    newest = JournalReader(paths.pop() if paths else output / artifacts.JOURNAL)
    there = {artifacts.number_of(path): path for path in paths}
    found = []
    for number in range(newest.oldest, newest.number):
        if (path := there.get(number)) is None:
            raise JournalDamaged(
                artifacts.segment(output, number), 1,
                f"the file is missing: {newest.path.name} goes on from segments {newest.oldest} to "
                f"{newest.number - 1}",
            )  # fmt: skip
        found.append(JournalReader(path))
        if (said := found[-1].number) != number:
            raise JournalDamaged(path, 1, f"it is segment {said} of the journal")
    return [*found, newest]


def last_chain(path: Path) -> str:
    """Of the last whole line of a journal, for the next master's; empty if there is none."""
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - _TAIL, 0))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if seal := _SEAL.search(line, max(len(line) - _SEAL_LENGTH, 0)):
            return seal[1].decode()
    return ""


def head_of(path: Path) -> dict[str, Any]:
    """The first line of a journal of any version.

    Raises:
        EdlError: the file cannot be read, or is not a journal.
        JournalDamaged: there is none, or its head was not written whole.
    """
    if not path.exists():
        raise JournalDamaged(path, 1, "there is no such file")
    return _head(path, _first_line(path))


def _first_line(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline()
    except OSError as error:
        raise EdlError(f"{path}: cannot read: {error.strerror}") from error


def _head(path: Path, line: bytes) -> dict[str, Any]:
    if not line:
        raise JournalDamaged(path, 1, "the file is empty")
    found = _parsed(path, 1, line)
    if found.get("journal") != "edl" or "version" not in found or not isinstance(found.get("run_id"), str):
        raise EdlError(f"{path}: not a journal of edl")
    return found


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise JournalDamaged(path, number, "not JSON") from error
    if not isinstance(value, dict):
        raise JournalDamaged(path, number, "not a map")
    return value


def _hash(before: str, body: bytes) -> str:
    return sha256(before.encode() + b"\n" + body).hexdigest()[:DIGITS]
