# SPDX-License-Identifier: Apache-2.0
"""The disk of a simulated parameter server: its log in memory, which outlives the process or is lost."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

from edl.contract.rows.wire import Bytes
from edl.ps.storage.wal import Base, Damaged, Log


@dataclass
class Disk:
    """The contents of a server's log."""

    base: Base | None = None
    segments: dict[int, list[bytes]] = field(default_factory=dict)


class MemoryLog(Log):
    """A server's log on a simulated disk: the promises of `edl.ps.storage.wal.Log`, without files."""

    def __init__(self, disk: Disk):
        self.directory, self._disk = Path("simulated"), disk
        self.base, self.segment = None, 0

    @property
    def nbytes(self) -> int:
        return sum(len(record) for records in self._disk.segments.values() for record in records)

    def read(self, run: str) -> Generator[tuple[int, bytes], None, None]:
        self.base = self._disk.base
        if self.base is None:
            if self._disk.segments:
                raise Damaged("the base is missing")
            return
        if self.base.run != run:
            raise Damaged("it is the log of another run")
        for number in sorted(n for n in self._disk.segments if n >= self.base.first):
            for record in list(self._disk.segments[number]):
                yield number, record
            self.segment = number

    def begin(self, base: Base, records: list[list[Bytes]]) -> None:
        self.another(records)
        self.rebase(replace(base, first=self.segment))

    def another(self, records: list[list[Bytes]]) -> int:
        self.segment = max([self.segment, *self._disk.segments]) + 1
        self._disk.segments[self.segment] = [b"".join(record) for record in records]
        return self.segment

    def rebase(self, base: Base) -> None:
        self.base = self._disk.base = base
        for number in [n for n in self._disk.segments if n < base.first]:
            del self._disk.segments[number]

    def append(self, *pieces: Bytes) -> None:
        self._disk.segments[self.segment].append(b"".join(pieces))

    def disown(self) -> None:
        self.base = self._disk.base = None

    def close(self) -> None: ...
