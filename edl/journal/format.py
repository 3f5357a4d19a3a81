# SPDX-License-Identifier: Apache-2.0
"""File format of a journal: segments in one chain of hashes, each with a head and a line for each event.

    {"journal": "edl", "version": 12, "run_id": ..., "number": 7, "oldest": 3, "after": "5f0e...",
     "values": {...}, "proof": {...}, "state": {...}, "chain": "77ab..."}
    {"now": ..., "event": {...}, "effects": [...], "chain": "09c1..."}

`chain` is the hash of the line without it and of the `chain` of the line before. So a line that was edited,
deleted, swapped or added is detected: the chain is broken there. A segment continues the chain of the segment
before it (`after`). The summary names the last line of all, so that missing lines at the end are detected,
too.

A master begins a segment, and continues in a new one whenever a segment is full. If the total size would
exceed the limit, the oldest segments are deleted. The head of a segment contains the proof of all lines
before it (`proof`; `edl.journal.proof`) and the state of the master's core (`state`; null if a master begins,
with an empty core). So `edl audit` and `edl replay` can start at any head. `oldest` is the number of the
oldest existing segment when the segment began: if a segment from this number on is missing, it was deleted
by a process other than the master. `edl.contract.artifacts` maps files to numbers.

A field with its default value is not written, so changing a default needs a new version.

A last line without its newline is torn: the master was killed while it wrote the line. It does not count.

The chain cannot detect that the whole journal and the summary were rewritten. To rule that out, keep the last
`chain`, which `edl audit` prints, in a different place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from edl.contract import artifacts
from edl.errors import EdlError
from edl.fast_json import decoded, encoded

DIGITS = 32  # hexadecimal digits of a link: 128 bits
_SEAL = re.compile(rb',"chain":"([0-9a-f]{%d})"\}\n' % DIGITS)
_SEAL_LENGTH = len(',"chain":""}\n') + DIGITS
_TAIL = 1 << 20  # bytes; more than the longest line of an event
_TOO_LONG = (
    f"the line is longer than {artifacts.MAX_BYTES >> 20} MiB, and a master writes none of this length"
)


_IN_A_HEAD: dict[str, Any] = {
    "number": int,
    "oldest": int,
    "after": str,
    "values": dict,
    "proof": (dict, NoneType),
    "state": (dict, NoneType),
}


class JournalDamaged(EdlError):
    """A journal differs from what a master has written; the message names file, line and damage."""

    def __init__(self, path: Path, line: int, what: str):
        super().__init__(f"{path}: line {line}: {what}")


@dataclass(frozen=True)
class Link:
    """The end of a chain: its last line.

    Args:
        lines: number of lines of the file up to this one.
        chain: hash of this line, and so of all lines before it; empty at the beginning of a run.
    """

    lines: int = 0
    chain: str = ""

    def seal(self, value: Mapping[str, Any]) -> tuple[Link, bytes]:
        """Return the new end of the chain, and the text of its next line."""
        body = encoded(value)
        chain = _hash(self.chain, body)
        return Link(self.lines + 1, chain), b'%b,"chain":"%b"}\n' % (body[:-1], chain.encode())


@dataclass(frozen=True)
class Head:
    """The first line of a segment.

    Args:
        number: number of the segment, from 1; all masters of a run share one count.
        oldest: number of the oldest existing segment.
        after: the last `chain` before this segment; empty at the beginning of a run.
        values: values of the writing master, as of its start.
        proof: result of `JournalProof.dump` after the line before it; None for the first segment.
        state: state of the core after that line; None: a master begins, with an empty core.
    """

    run_id: str
    number: int
    oldest: int
    after: str
    values: Mapping[str, Any]
    proof: Mapping[str, Any] | None
    state: Any

    def line(self) -> dict[str, Any]:
        """Return the first line of a segment, ready for JSON."""
        return {"journal": "edl", "version": artifacts.JOURNAL_VERSION, **vars(self)}


class JournalReader:
    """A reader that reads each line of a segment once, also while a master appends to it.

    Args:
        path: the file. Its head is read at once.

    Raises:
        EdlError: the file cannot be read, is not a journal, or is one of a different version of edl.
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
        self.begins = said["state"] is None  # whether a master begins with this segment
        self.link = Link(0, self.after)
        self._open_line(first)
        self._read = len(first)  # bytes

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield every complete line that was not read before, as (number, content).

        Raises:
            JournalDamaged: a line differs from what the master wrote.
            OSError: the segment was deleted.
        """
        self.torn = False
        with self._file() as lines:
            lines.seek(self._read)
            while line := lines.readline(artifacts.MAX_BYTES + 1):
                if len(line) > artifacts.MAX_BYTES:
                    raise JournalDamaged(self.path, self.link.lines + 1, _TOO_LONG)
                if not line.endswith(b"\n"):
                    self.torn = True
                    return
                body = self._open_line(line)
                self._read += len(line)
                if not isinstance(body.get("event"), dict) or not isinstance(body.get("effects"), list):
                    raise JournalDamaged(self.path, self.link.lines, "holds no event with its effects")
                yield self.link.lines, body

    def check_end(self, summary: Mapping[str, Any]) -> None:
        """Check that this journal, read to its end, is complete and belongs to the job of `summary`.

        Raises:
            JournalDamaged: the last lines are missing, or the journal is of a different job.
            EdlError: the summary does not name the journal's last line.
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

    def _file(self) -> BinaryIO:
        """Open the file; the segment has a different name if the master has begun the next one since."""
        file = open(self.path, "rb")
        first = file.readline(artifacts.MAX_BYTES)
        seal = _SEAL.fullmatch(first, max(len(first) - _SEAL_LENGTH, 0))
        if seal is not None and seal[1].decode() != self.head["chain"]:
            file.close()
            self.path = artifacts.segment(self.path.parent, self.number)
            file = open(self.path, "rb")
        return file

    def _open_line(self, line: bytes) -> dict[str, Any]:
        """Check that the chain holds, and return the content of the line.

        Raises:
            JournalDamaged: the line or one before it was changed.
        """
        number = self.link.lines + 1
        seal = _SEAL.fullmatch(line, max(len(line) - _SEAL_LENGTH, 0))
        if seal is None:
            raise JournalDamaged(self.path, number, "the line is damaged (its chain is missing)")
        body = line[: seal.start()] + b"}"
        chain = _hash(self.link.chain, body)
        if chain.encode() != seal[1]:
            raise JournalDamaged(
                self.path,
                number,
                "the chain is broken: this line, or one before it, was edited, deleted, swapped or added",
            )
        self.link = Link(number, chain)
        return _parsed(self.path, number, body)


def segments(output: Path) -> list[JournalReader]:
    """Open the segments of the journal in a directory, in order, and check that no segment is missing.

    Raises:
        EdlError: a segment cannot be read, is not a journal, or is one of a different version of edl.
        JournalDamaged: a segment is missing, or damaged at its head.
    """
    paths = artifacts.journals(output)
    newest = JournalReader(paths.pop() if paths else output / artifacts.JOURNAL)
    there = {artifacts.number_of(path): path for path in paths}
    found = []
    for number in range(newest.oldest, newest.number):
        if (path := there.get(number)) is None:
            raise JournalDamaged(
                artifacts.segment(output, number),
                1,
                f"the file is missing: {newest.path.name} goes on from segments {newest.oldest} to "
                f"{newest.number - 1}",
            )
        found.append(JournalReader(path))
        if (said := found[-1].number) != number:
            raise JournalDamaged(path, 1, f"it is segment {said} of the journal")
    return [*found, newest]


def next_segment(reader: JournalReader) -> JournalReader | None:
    """Open the segment after that of `reader`; None if the master has not begun it yet.

    Raises:
        EdlError: it cannot be read, or the journal has begun anew.
        JournalDamaged: it is missing, or damaged at its head.
    """
    output, number = reader.path.parent, reader.number + 1
    if not (output / artifacts.JOURNAL).exists():  # a master without links was killed between two segments
        return None
    newest = JournalReader(output / artifacts.JOURNAL)
    if newest.number == reader.number and newest.head["chain"] == reader.head["chain"]:
        return None
    if newest.number < number or newest.head["run_id"] != reader.head["run_id"]:
        raise JournalDamaged(newest.path, 1, f"it does not continue segment {reader.number} of the journal")
    return newest if newest.number == number else JournalReader(artifacts.segment(output, number))


def last_chain(path: Path) -> str:
    """The `chain` of the last complete line of a journal, for the next master's; empty: no complete line."""
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, 2) - _TAIL, 0))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if seal := _SEAL.search(line, max(len(line) - _SEAL_LENGTH, 0)):
            return seal[1].decode()
    return ""


def head_of(path: Path) -> dict[str, Any]:
    """Read the head of a journal of any version.

    Raises:
        EdlError: the file cannot be read, or is not a journal.
        JournalDamaged: the file does not exist, or its head is incomplete.
    """
    if not path.exists():
        raise JournalDamaged(path, 1, "there is no such file")
    return _head(path, _first_line(path))


def _first_line(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            line = file.readline(artifacts.MAX_BYTES + 1)
    except OSError as error:
        raise EdlError(f"{path}: cannot read: {error.strerror}") from error
    if len(line) > artifacts.MAX_BYTES:
        raise JournalDamaged(path, 1, _TOO_LONG)
    return line


def _head(path: Path, line: bytes) -> dict[str, Any]:
    if not line:
        raise JournalDamaged(path, 1, "the file is empty")
    found = _parsed(path, 1, line)
    if found.get("journal") != "edl" or "version" not in found or not isinstance(found.get("run_id"), str):
        raise EdlError(f"{path}: not a journal of edl")
    return found


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        value = decoded(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise JournalDamaged(path, number, "not JSON") from error
    if not isinstance(value, dict):
        raise JournalDamaged(path, number, "not a map")
    return value


def _hash(before: str, body: bytes) -> str:
    return sha256(before.encode() + b"\n" + body).hexdigest()[:DIGITS]
