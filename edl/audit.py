"""`edl audit`: a second, independent reading of a job's journal.

It shares no code with the master. From the events and effects as they were written it keeps
its own books, and checks at every line:

- the line is as it was written: the chain of hashes holds (`edl.contract.journals`);
- a ring goes on from the step of its root, which never falls below a step that every member of a ring had,
  unless all who had that one were lost, and that was told;
- every ring uses the data layout and the number of epochs of the job;
- at the end the model has all steps of all epochs, and the order of each epoch names every record once.

Where a master has taken over from another one, the books go on over both journals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edl.contract import artifacts
from edl.contract.journals import JournalDamaged, JournalReader
from edl.contract.layout import Layout
from edl.contract.order import Order
from edl.contract.ranges import RangeSet
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.errors import EdlError
from edl.text import one_line

AT_ONCE = 1 << 20  # positions of an order that are looked at together


class AuditFailed(EdlError):
    """A record was lost or counted twice, or the books do not agree."""


def audit(output: Path) -> str:
    """Check the job in `output`; returns the verdict in words.

    Raises:
        AuditFailed: names the first step, record or line that is wrong.
        EdlError: there is no journal to read, or it is damaged: names the file and the line.
    """
    summary = artifacts.read_summary(output)
    readers = [JournalReader(path) for path in artifacts.journals(output)]
    books = _Books()
    for before, reader in zip([None, *readers], readers, strict=False):
        if reader.head["after"] != (before.link.chain if before else ""):
            raise JournalDamaged(reader.path, 1, "does not go on from the end of the journal before it")
        books.begin(reader)
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


class _Books:
    def __init__(self) -> None:
        self.epochs = self.batch = self.seed = 0
        self.shuffle = False
        self.layout: Layout | None = None
        self.generation, self.members = 0, set[int]()
        self.root_step = 0  # from which the ring went on
        self.joined: set[int] = set()  # of its members
        self.safe = 0  # a step that every member of a ring had
        self.out: dict[int, dict[str, Any]] = {}  # what each worker said when it last left a ring
        self.skipped = RangeSet()  # steps that are not in the model
        self.bad: dict[int, int] = {}  # by epoch: how many records were left out
        self.named: set[tuple[int, int]] = set()  # of these: epoch and record
        self.holders: set[int] = set()
        self.exported: int | None = None  # the step of who saved the model
        self.rings = self.losses = 0

    def begin(self, journal: JournalReader) -> None:
        """The journal of the job's first master, or of one that took over: with its values."""
        try:
            training, data = journal.head["values"]["training"], journal.head["values"]["data"]
            self.epochs, self.batch = int(training["epochs"]), int(training["batchSize"])
            self.seed, self.shuffle = int(training["seed"]), bool(data["shuffle"])
            if min(self.epochs, self.batch) < 1:
                raise ValueError(f"{self.epochs} epochs, batches of {self.batch}")
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise JournalDamaged(
                journal.path, 1, f"not the values of a job ({type(error).__name__}: {error})"
            ) from error

    def note(self, entry: dict[str, Any], where: str) -> None:
        event = entry["event"]
        match event["type"]:
            case "Ready" | "Resume" if self.layout is None:
                self.layout = Layout(**event["layout"])
        match event["type"]:
            case "Resume":
                if event["left_ring"] is not None:
                    self.note({"event": {**event["left_ring"], "type": "LeftRing"}, "effects": []}, where)
                if event["joined"]:
                    self.holders.add(event["worker"])
                self.generation = max(self.generation, event["generation"])
            case "JoinedRing":
                self.holders.add(event["worker"])
                self._joined(event)
            case "LeftRing":
                self.out[event["worker"]] = event
                if event["has_state"]:
                    self.holders.add(event["worker"])
            # One of an older ring comes too late: what its members said when they left it is newer.
            case "Heartbeat" if event["generation"] == self.generation:
                # It has made a step in this ring. All took part in that one, so they have the one before.
                self.safe = max(self.safe, event["step"] - 1)
            case "BadRecords" if event["generation"] == self.generation:
                self.named |= {(event["epoch"], int(record)) for record in event["records"]}
            case "EpochEnded" if event["generation"] == self.generation and self.layout is not None:
                steps = Steps(self.layout.records, self.batch)
                self.safe = max(self.safe, event["epochs"] * steps.per_epoch)
            case "Live" if not any(e.get("reason") == Reason.SpecRefused for e in entry["effects"]):
                self.epochs = int(event["epochs"])
        lost = any(effect.get("reason") == Reason.StateLost for effect in entry["effects"])
        for effect in entry["effects"]:
            match effect["type"]:
                case "Form":
                    self._form(effect, lost, where)
                case "Export":
                    self.exported = self._goes_on(effect["worker"], lost, where)

    def _joined(self, event: dict[str, Any]) -> None:
        if event["generation"] == self.generation and event["worker"] in self.members:
            self.joined.add(event["worker"])
            if self.joined == self.members:  # nobody has less than the ring began with
                self.safe = max(self.safe, self.root_step)

    def _form(self, form: dict[str, Any], lost: bool, where: str) -> None:
        self.rings += 1
        self.generation, self.members, self.joined = form["generation"], set(form["members"]), set()
        if Layout(**form["layout"]) != self.layout:
            raise AuditFailed(f"{where}: the ring trains on {form['layout']}, the job on {self.layout}")
        if form["epochs"] != self.epochs:
            raise AuditFailed(f"{where}: the ring trains {form['epochs']} epochs, the job {self.epochs}")
        if len(form["shares"]) != len(form["members"]) or min(form["shares"]) < 0 or not any(form["shares"]):
            raise AuditFailed(f"{where}: {form['shares']} does not divide a step over {form['members']}")
        self.root_step = self._goes_on(form["root"], lost, where)

    def _goes_on(self, root: int, lost: bool, where: str) -> int:
        """From the state of this worker; from none at all if it holds none.

        Args:
            lost: it was told that all who had more are gone.
        """
        nothing: dict[str, Any] = {"step": 0, "skipped": {"ranges": []}, "bad": {}}
        out = self.out[root] if root in self.holders else nothing
        step: int = out["step"]
        if root in self.holders and step < self.safe and not lost:
            raise AuditFailed(
                f"{where}: step {self.safe} was in the model and is no longer: it goes on from {step}"
            )
        self.losses += step < self.safe
        self.safe = min(self.safe, step)
        self.skipped = RangeSet.of((a, b) for a, b in out["skipped"]["ranges"])
        self.bad = {int(epoch): count for epoch, count in out["bad"].items()}
        return step

    def close(self, summary: dict[str, Any]) -> str:
        if self.layout is None:
            raise AuditFailed(
                f"no record was trained on: the job ended {summary['phase']}: {one_line(summary['reason'])}"
            )
        if len(set(summary["digests"].values())) > 1:
            raise AuditFailed(f"the weights differ between workers: {summary['digests']}")
        size = self.layout.records
        steps = Steps(size, self.batch)
        done = self.safe if self.exported is None else self.exported
        end = steps.end(done, self.epochs)
        if done < end:
            position = steps.begins_at(done)
            missing = steps.begins_at(end) - position
            raise AuditFailed(
                f"{self._name(position)} was not applied; {missing} records are missing: "
                f"{done} of {end} steps are in the model"
            )
        if (told := summary["task"]["steps_done"]) != done:
            raise AuditFailed(
                f"{artifacts.SUMMARY} says {told} steps are in the model, the journal says {done}"
            )
        epochs = steps.epoch(done) if size else self.epochs
        for epoch in range(epochs if size else 0):
            self._check_order(epoch, size)
        skipped = steps.records_of(self.skipped)
        but = f", except {skipped} skipped records (non-finite)" if skipped else ""
        if bad := sum(self.bad.values()):
            if bad != summary["records"]["bad"]:
                raise AuditFailed(
                    f"{artifacts.SUMMARY} says {summary['records']['bad']} bad records, the journal {bad}"
                )
            unnamed = bad - len(self.named)
            but += f", except {bad} bad records" + (f", {unnamed} of which nobody has named" * (unnamed > 0))
        text = (
            f"exactly once{but}: {size:,} records x {epochs} epochs in {done:,} steps, {self.rings} rings; "
            f"{len(summary['digests'])} workers ended with the same weights"
        )
        if self.losses:
            text += f"; the newest state was lost {self.losses} times and training went on from what was left"
        return text

    def _order(self) -> Order:
        assert self.layout is not None
        return Order(self.layout, self.seed, self.shuffle)

    def _check_order(self, epoch: int, size: int) -> None:
        order, counts = self._order(), np.zeros(size, np.int8)
        for start in range(0, size, AT_ONCE):
            stop = min(start + AT_ONCE, size)
            np.add.at(counts, order.records(epoch * size + start, epoch * size + stop), 1)
        if (counts != 1).any():
            record = int(np.argmax(counts != 1))
            raise AuditFailed(f"epoch {epoch + 1} visits record {record} {counts[record]} times")

    def _name(self, position: int) -> str:
        assert self.layout is not None
        epoch = position // max(self.layout.records, 1)
        record = int(self._order().records(position, position + 1)[0])
        return f"record {record} of epoch {epoch + 1} (position {position})"
