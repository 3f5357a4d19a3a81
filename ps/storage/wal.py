# SPDX-License-Identifier: Apache-2.0
"""A server's write-ahead log: each request is logged before it is answered.

The directory holds segments `log-000000000001` and on, and `base.json`, which names the first segment and the
rows before it: none, those of a checkpoint, or those of a snapshot beside the log. The base and then all
records from that segment on give the server's state.

A record is 16 bytes and the data: the record's kind, the decision about the request, and the request as
received. The 16 bytes: the length of the data, the length of what precedes the request, a checksum (XXH3 of
the request, seeded with the CRC-32 of what precedes it), and the CRC-32 of these three. A record that extends
beyond the end of the file was never answered: it is cut off. Any other mismatch is damage, and then the whole
log is ignored.

Promise: a record that `append` has returned from survives the end of the process; it is written entirely or
not at all. `append` does not wait for the disk. So a log that was not closed is valid only on the machine
that wrote it, and until its next reboot.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from edl.contract.rows.wire import Bytes
from edl.ps.errors import Unavailable

HEAD = struct.Struct("<IIII")
_OWN = struct.Struct("<I")  # its last number
FORMAT = 2  # of the records' data (`edl.ps.storage.records`)
BASE = "base.json"
_SEGMENT = re.compile(r"log-(\d{12})")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Damaged(Exception):
    """The log is damaged."""


class AnotherRun(Damaged):
    """The log is of another run, which has ended: not an error."""


@dataclass(frozen=True)
class Base:
    """The rows from which the log starts.

    Args:
        run: the run, and the index of the server.
        first: number of the first segment.
        kind: "", "checkpoint" or "snapshot".
        step, attempt: of the checkpoint.
        snapshot: the file's name, beside the log.
        boot: of the machine, while it ran on which this was written.
        closed: all of it is on the disk.
        format: of the records; those of edl 0.1 do not name it.
    """

    run: str
    first: int
    kind: str = ""
    step: int = 0
    attempt: str = ""
    snapshot: str = ""
    boot: str = ""
    closed: bool = False
    format: int = 1


class Log:
    """The log of one server, in its directory. Not for several threads.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._file, self.segment, self._end = -1, 0, 0
        self._earlier = 0  # bytes of the segments before
        self.base: Base | None = None

    @property
    def nbytes(self) -> int:
        return self._earlier + self._end

    # --- reading

    def read(self, run: str) -> Generator[tuple[int, bytes], None, None]:
        """Yield the records after `base`, each with its segment.

        The caller must read to the end: only then is a torn record cut off and the log open for writing.

        Raises:
            AnotherRun: the log is of another run.
            Damaged: the log is damaged, or of another server or machine. Records read so far must be
            discarded.
        """
        self.base = self._read_base()
        if self.base is None:
            if self._segments():
                raise Damaged(f"{self.directory / BASE} is missing")
            return
        if self.base.run != run:
            if self.base.run.rpartition("/")[0] == run.rpartition("/")[0]:
                raise Damaged("it is the log of another server")
            raise AnotherRun("it is the log of another run")
        if self.base.format != FORMAT:
            raise Damaged(
                f"it has format {self.base.format}, expected {FORMAT}: another version of edl wrote it; the "
                "job continues from its newest checkpoint"
            )
        if not self.base.closed and self.base.boot != boot_id():
            raise Damaged("the machine was restarted or replaced: what was written last may be missing")
        numbers = [n for n in self._segments() if n >= self.base.first]
        if numbers != list(range(self.base.first, self.base.first + len(numbers))) or not numbers:
            raise Damaged(f"segments {numbers}: expected all from {self.base.first} on")
        self._earlier = 0
        for number in numbers:
            size = self._path(number).stat().st_size
            end = yield from _records(self._path(number), number, size)
            if end < size:
                if number != numbers[-1]:
                    raise Damaged(f"segment {number} ends within a record, and others follow")
                os.truncate(self._path(number), end)
            self._earlier += end
        self._earlier -= end
        self._open(numbers[-1], end)
        self._save(self.base)

    def _read_base(self) -> Base | None:
        try:
            return Base(**json.loads((self.directory / BASE).read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            raise Damaged(f"{BASE}: {error}") from error

    # --- writing

    def begin(self, base: Base, records: list[list[Bytes]]) -> None:
        """Drop the present log and start a new one from `base`.

        Raises:
            Unavailable: the log cannot be written; it is unchanged.
        """
        with _trouble(self.directory):
            self._another(records)
            self._earlier = 0
            self._save(replace(base, first=self.segment))
        self._remove()

    def another(self, records: list[list[Bytes]]) -> int:
        """Continue in a new segment, which starts with these records; returns its number.

        Raises:
            Unavailable: as in `begin`.
        """
        with _trouble(self.directory):
            before = self._end
            if self._file >= 0:
                os.fsync(self._file)
            self._another(records)
            self._earlier += before
        return self.segment

    def rebase(self, base: Base) -> None:
        """Set a newer base and remove the segments before it.

        Raises:
            Unavailable: as in `begin`.
        """
        with _trouble(self.directory):
            self._save(base)
        self._remove()
        self._earlier = sum(self._path(n).stat().st_size for n in self._segments() if n < self.segment)

    def append(self, *pieces: Bytes) -> None:
        """Write one record. The last piece may be large.

        Raises:
            Unavailable: the disk is full; nothing of the record is written.
        """
        with _trouble(self.directory):
            self._end = _write(self._file, self._end, pieces)

    def disown(self) -> None:
        """Make the present log invalid."""
        with suppress(OSError):
            (self.directory / BASE).unlink()
        self.base = None

    def close(self) -> None:
        """Flush the log to the disk and mark it as closed, if there is room for the mark."""
        if self._file >= 0:
            with suppress(OSError):
                os.fsync(self._file)
                if self.base is not None:
                    self._save(self.base, closed=True)
            os.close(self._file)
            self._file = -1

    def _another(self, records: list[list[Bytes]]) -> None:
        number = max([self.segment, *self._segments()]) + 1
        path = self._path(number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            end = 0
            for record in records:
                end = _write(file, end, record)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self.segment, self._end = file, number, end

    def _open(self, number: int, end: int) -> None:
        self._file = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        self.segment, self._end = number, end

    def _save(self, base: Base, closed: bool = False) -> None:
        base = replace(base, boot=boot_id(), closed=closed, format=FORMAT)
        path = self.directory / BASE
        unfinished = path.with_suffix(".new")
        with open(unfinished, "wb") as file:
            file.write(json.dumps(base.__dict__).encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            with suppress(OSError):
                os.fsync(directory)
        finally:
            os.close(directory)
        self.base = base

    def _remove(self) -> None:
        """Remove segments and snapshots that the base does not need."""
        assert self.base is not None
        with suppress(OSError):  # the next call tries again
            for number in self._segments():
                if number < self.base.first:
                    self._path(number).unlink()
            for path in self.directory.glob("snapshot-*"):
                if path.name != self.base.snapshot:
                    path.unlink()

    def _segments(self) -> list[int]:
        found = (_SEGMENT.fullmatch(name) for name in os.listdir(self.directory))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> Path:
        return self.directory / f"log-{number:012d}"


class NoLog:
    """A log that records nothing: a server that ends loses its rows."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.base: Base | None = None
        self.nbytes = self._segment = 0

    def read(self, run: str) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def begin(self, base: Base, records: list[list[Bytes]]) -> None:
        self.base = replace(base, first=self.another(records))

    def another(self, records: list[list[Bytes]]) -> int:
        self._segment += 1
        return self._segment

    def rebase(self, base: Base) -> None:
        self.base = base

    def append(self, *pieces: Bytes) -> None: ...

    def disown(self) -> None:
        self.base = None

    def close(self) -> None: ...


def _write(file: int, at: int, pieces: Sequence[Bytes]) -> int:
    """Write one record; returns its end.

    Raises:
        OSError: the record cannot be written; the file ends where it ended before.
    """
    first, last = b"".join(pieces[:-1]), pieces[-1]
    head = HEAD.pack(len(first) + len(last), len(first), _check(first, last), 0)[: -_OWN.size]
    rest = [memoryview(head + _OWN.pack(zlib.crc32(head)) + first), memoryview(last)]
    end = at
    try:
        while rest:
            written = os.pwritev(file, rest, end)
            end += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][written:]
    except OSError:
        os.ftruncate(file, at)
        raise
    return end


def _check(first: bytes, last: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(last, zlib.crc32(first)) & 0xFFFFFFFF


def _records(path: Path, number: int, size: int) -> Generator[tuple[int, bytes], None, int]:
    """Yield the records of a segment; returns the end of the last complete one.

    Raises:
        Damaged: a record is not what was written. An incomplete last record is no error.
    """
    at = 0
    with open(path, "rb") as file:
        while at + HEAD.size <= size:
            head = file.read(HEAD.size)
            length, of_first, check, own = HEAD.unpack(head)
            if zlib.crc32(head[: -_OWN.size]) != own:
                raise Damaged(f"segment {number}: the record at byte {at} is not what was written")
            if at + HEAD.size + length > size:
                break
            record = file.read(length)
            if _check(record[:of_first], memoryview(record)[of_first:]) != check:
                raise Damaged(f"segment {number}: the record at byte {at} is not what was written")
            yield number, record
            at += HEAD.size + length
    return at


class _trouble:
    """Turn an OSError into Unavailable."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, OSError):
            raise Unavailable(
                f"the log in {self._directory} cannot be written ({error.strerror}): nothing was changed, "
                "and the server continues when there is room; free some, or use a larger volume"
            ) from error


def boot_id() -> str:
    """An id that changes with each boot of the machine; empty: unknown."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
