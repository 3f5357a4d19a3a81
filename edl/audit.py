"""`edl audit`: a second, independent reading of a job's journal.

It shares no code with the master. From the events and effects as they were written it keeps
its own books, and checks at every line:

- the line is as it was written: the chain of hashes holds (`edl.contract.journals`);
- a lease is granted only for positions that are open, not applied, and nobody else's;
- the applied set only grows, from ring to ring, unless all state was lost and it starts anew;
- at the end it covers every epoch, and the order of each epoch names every record once.

Where a master has taken over from another one, the books go on over both journals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edl.contract import artifacts
from edl.contract.journals import JournalDamaged, JournalReader
from edl.contract.ranges import RangeSet
from edl.contract.shuffle import Order
from edl.errors import EdlError
from edl.text import one_line


class AuditFailed(EdlError):
    """A record was lost or counted twice, or the books do not agree."""


def audit(output: Path) -> str:
    """Check the job in `output`; returns the verdict in words.

    Raises:
        AuditFailed: names the first record or line that is wrong.
        EdlError: there is no journal to read, or it is damaged: names the file and the line.
    """
    summary = artifacts.read_summary(output)
    readers = [JournalReader(path) for path in artifacts.journals(output)]
    books = _books(readers[-1])
    for before, reader in zip([None, *readers], readers, strict=False):
        if reader.head["after"] != (before.link.chain if before else ""):
            raise JournalDamaged(reader.path, 1, "does not go on from the end of the journal before it")
        books.held = {}  # a new master leaves it open who holds what
        for number, entry in reader:
            try:
                books.note(entry, f"{reader.path}: line {number}")
            except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
                raise JournalDamaged(
                    reader.path, number, f"not what a master writes ({type(error).__name__}: {error})"
                ) from error
    last = readers[-1]
    last.check_end(summary)
    try:
        verdict = books.close(summary)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EdlError(
            f"{output / artifacts.SUMMARY}: not what a master writes ({type(error).__name__}: {error})"
        ) from error
    return f"{verdict}; the journal ends with {last.link.chain}"


def _books(journal: JournalReader) -> _Books:
    try:
        return _Books(journal.head["values"])
    except (LookupError, TypeError, ValueError) as error:
        raise JournalDamaged(
            journal.path, 1, f"not the values of a job ({type(error).__name__}: {error})"
        ) from error


class _Books:
    def __init__(self, values: dict[str, Any]):
        training, data = values["training"], values["data"]
        self.epochs = int(training["epochs"])
        self.order = (int(training["seed"]), int(data["blockRecords"]), bool(data["shuffle"]))
        self.size: int | None = None
        self.generation = 0
        self.applied = RangeSet()
        self.out: dict[int, RangeSet] = {}  # what each worker said when it left a ring
        self.skipped = RangeSet()
        self.holders: set[int] = set()
        self.held: dict[int, RangeSet] = {}
        self.grants = self.rings = self.losses = 0

    def note(self, entry: dict[str, Any], where: str) -> None:
        event = entry["event"]
        match event["type"]:
            case "Ready":
                self.size = event["records"] if self.size is None else self.size
            case "Resume":
                self.size = event["records"] if self.size is None else self.size
                if event["left_ring"] is not None:
                    self.note({"event": {**event["left_ring"], "type": "LeftRing"}, "effects": []}, where)
                if event["joined"]:
                    self.holders.add(event["worker"])
                self.generation = max(self.generation, event["generation"])
            case "JoinedRing":
                self.holders.add(event["worker"])
            case "LeftRing":
                self.out[event["worker"]] = _ranges(event["applied"])
                self.skipped = self.skipped.union(_ranges(event["skipped"]))
                if event["has_state"]:
                    self.holders.add(event["worker"])
            # One of an older ring comes too late: what its members said when they left it is newer.
            case "Heartbeat" if event["applied"] is not None and event["generation"] == self.generation:
                self._grow(_ranges(event["applied"]), where)
        for effect in entry["effects"]:
            match effect["type"]:
                case "Form":
                    self._form(effect, where)
                case "Grant":
                    self._grant(effect["worker"], tuple(effect["lease"]), where)
                case "Export" if self.size:
                    self._grow(self.out.get(effect["worker"], RangeSet()), where)

    def _form(self, form: dict[str, Any], where: str) -> None:
        self.rings += 1
        self.generation = form["generation"]
        root = form["root"]
        if root in self.holders:
            self._grow(self.out[root], where)
        else:  # nobody holds the state: all of it is lost, and training starts anew
            self.losses += bool(self.applied)
            self.applied, self.skipped = RangeSet(), RangeSet()
        held = {}
        for member, leases in zip(form["members"], form["leases"], strict=True):
            left = _ranges({"ranges": leases})
            expected = self.held.get(member, RangeSet()).minus(self.applied)
            if left != expected:
                raise AuditFailed(f"{where}: worker {member} keeps {left}, but should keep {expected}")
            held[member] = left
        self.held = held

    def _grant(self, worker: int, lease: tuple[int, int], where: str) -> None:
        self.grants += 1
        granted = RangeSet((lease,))
        taken = self.applied
        for leases in self.held.values():
            taken = taken.union(leases.minus(self.applied))
        if granted.minus(taken) != granted:
            raise AuditFailed(f"{where}: [{lease[0]}, {lease[1]}) is granted, but is applied or held already")
        assert self.size is not None
        begun = next(iter(self.applied), (0, 0))  # the epochs up to here are whole
        done = begun[1] // self.size if self.size and begun[0] == 0 else 0
        if lease[1] > (done + 1) * self.size:
            raise AuditFailed(f"{where}: [{lease[0]}, {lease[1]}) is granted before its epoch is open")
        self.held[worker] = self.held.get(worker, RangeSet()).union(granted)

    def _grow(self, applied: RangeSet, where: str) -> None:
        lost = self.applied.minus(applied)
        if lost:
            raise AuditFailed(f"{where}: {self._name(lost.ranges[0][0])} was applied and is no longer")
        self.applied = applied

    def close(self, summary: dict[str, Any]) -> str:
        if self.size is None:
            raise AuditFailed(
                f"no record was trained on: the job ended {summary['phase']}: {one_line(summary['reason'])}"
            )
        size = self.size
        missing = RangeSet.of([(0, size * self.epochs)]).minus(self.applied)
        if missing:
            raise AuditFailed(
                f"{self._name(missing.ranges[0][0])} was not applied; {len(missing)} are missing"
            )
        kept = RangeSet.of(tuple(r) for r in summary["records"]["applied"])
        if kept != self.applied:
            raise AuditFailed(f"{artifacts.SUMMARY} says {kept} is applied, the journal says {self.applied}")
        if len(set(summary["digests"].values())) > 1:
            raise AuditFailed(f"the weights differ between workers: {summary['digests']}")
        for epoch in range(self.epochs if size else 0):
            self._check_order(epoch, size)
        skipped = f", except {len(self.skipped)} skipped records (non-finite)" if self.skipped else ""
        text = (
            f"exactly once{skipped}: {size:,} records x {self.epochs} epochs, {self.rings} rings, "
            f"{self.grants} leases; {len(summary['digests'])} workers ended with the same weights"
        )
        if self.losses:
            text += f"; all state was lost {self.losses} times and training started anew"
        return text

    def _check_order(self, epoch: int, size: int) -> None:
        order = Order(size, *self.order)
        counts = np.zeros(size, np.int8)
        for start in range(0, size, order.block):
            stop = min(start + order.block, size)
            np.add.at(counts, order.records(epoch * size + start, epoch * size + stop), 1)
        if (counts != 1).any():
            record = int(np.argmax(counts != 1))
            raise AuditFailed(f"epoch {epoch + 1} visits record {record} {counts[record]} times")

    def _name(self, position: int) -> str:
        epoch, _ = divmod(position, self.size or 1)
        record = int(Order(self.size or 1, *self.order).records(position, position + 1)[0])
        return f"record {record} of epoch {epoch + 1} (position {position})"


def _ranges(value: dict[str, Any]) -> RangeSet:
    return RangeSet.of((a, b) for a, b in value["ranges"])
