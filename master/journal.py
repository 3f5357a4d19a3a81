"""What happened, for ever: events.jsonl, one line for each event with what followed from it.

A line holds the time, the event, and the effects. `replay` feeds the events through a new
core; that the effects come out the same is how a journal proves itself. `unfinished` is what a
new master learns from the journal of an earlier one that was killed. The format of the file is in
`edl.contract.journals`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from edl.config import Config
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.contract.journals import JournalDamaged, JournalReader, Link, head, head_of, last_chain
from edl.contract.phases import WorkerState
from edl.errors import ConfigError, EdlError
from edl.full_disk import PASSING
from master.core import events as ev
from master.core.job import Job
from master.spec import JobSpec

MOST_WAITING = 64 << 20  # bytes; some hours of a large job

_EVENTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Event.__args__}
_EFFECTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Effect.__args__}


class Journal:
    """An open journal. Lines are flushed as they are written: a killed master leaves no half line
    but the last. The journal of an earlier master of the same run is kept under another name.

    When the disk is full, `trouble` says so, and what could not be written waits in memory for room.
    """

    def __init__(self, path: Path, run_id: str, values: dict[str, Any]):
        *earlier, last = artifacts.journals(path.parent)
        before = _run_of(last)
        if before == run_id:
            earlier.append(last.rename(path.with_name(f"events.{len(earlier) + 1}.jsonl")))
        elif before or not earlier or _run_of(earlier[-1]) != run_id:
            for old in earlier:
                old.unlink()
            earlier = []
        after = last_chain(earlier[-1]) if earlier else ""
        self.link = Link(0, after)  # how far it is written
        self.trouble = ""  # why it cannot be written; empty while it can
        self._path, self._waiting = path, bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._line(head(run_id, values, after))

    def write(self, now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Note an event. A journal for which there was no room for too long ends early."""
        if len(self._waiting) < MOST_WAITING:
            self._line({"now": now, "event": _dump(event), "effects": [_dump(e) for e in effects]})
        else:
            self._flush()

    def close(self) -> None:
        self._flush()
        os.close(self._file)

    def rescue(self, directory: Path) -> None:
        """Write all of it, what waits for room too, into another directory.

        Raises:
            OSError: that is full as well.
        """
        copy = directory / self._path.name
        shutil.copyfile(self._path, copy)
        with open(copy, "ab") as file:
            file.write(self._waiting)

    def _line(self, value: dict[str, Any]) -> None:
        self.link, line = self.link.seal(value)
        self._waiting += line.encode()
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
            self.trouble = ""
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self.trouble = f"{self._path}: {error.strerror}; it is kept in memory until there is room"


def read(path: Path) -> tuple[JournalReader, Iterator[tuple[float, ev.Event, list[Any]]]]:
    """A journal's reader, with its head, and its lines as (now, event, effects as written).

    Raises:
        EdlError: the file is not a journal, one of another version of edl, or damaged.
    """
    reader = JournalReader(path)

    def entries() -> Iterator[tuple[float, ev.Event, list[Any]]]:
        for number, entry in reader:
            try:
                yield float(entry["now"]), _load(entry["event"]), entry["effects"]
            except (KeyError, TypeError, ValueError) as error:
                raise JournalDamaged(path, number, f"not an event of edl ({_brief(error)})") from error

    return reader, entries()


def replay(path: Path, config: Config) -> Job:
    """A new job that has seen all events of the journal.

    Raises:
        EdlError: the journal is damaged, or the core decides otherwise than it did; the text names the
            first line.
    """
    return _replayed(*read(path), config)


def _replayed(
    reader: JournalReader, entries: Iterator[tuple[float, ev.Event, list[Any]]], config: Config
) -> Job:
    job = Job(config)
    for now, event, written in entries:
        try:
            effects = [_dump(e) for e in job.handle(event, now)]
        except Exception as error:  # of events in an order in which no job could have had them
            raise JournalDamaged(
                reader.path, reader.link.lines, f"the core cannot take this event ({_brief(error)})"
            ) from error
        if effects != written:
            raise JournalDamaged(
                reader.path,
                reader.link.lines,
                f"the core now decides {_cut(effects)}, the journal says {_cut(written)}",
            )
    return job


def replayed(output: Path, summary: dict[str, Any]) -> tuple[RunId, Job]:
    """The run and the end of the job in an output directory, by its journal and nothing else.

    Raises:
        EdlError: the journal is damaged or not whole, or the core decides otherwise than it did.
    """
    reader, entries = read(output / artifacts.JOURNAL)
    try:
        config = JobSpec.parse(reader.head["values"]).config
    except ConfigError as error:
        wrong = "; ".join(str(error).splitlines())
        raise JournalDamaged(reader.path, 1, f"its values are invalid: {wrong}") from error
    job = _replayed(reader, entries, config)
    reader.check_end(summary)
    return RunId(reader.head["run_id"]), job


def unfinished(output: Path, spec: JobSpec) -> tuple[RunId, ev.Adopted] | None:
    """The unfinished job of an output directory: its run id, and the workers that may still live; None:
    no job was begun there.

    Raises:
        ConfigError: the values of that job are others than `spec`, and not only live ones.
        EdlError: that job has ended, or its journal cannot be read.
    """
    path = output / artifacts.JOURNAL
    if not path.exists():
        return None
    reader, entries = read(path)
    earlier = JobSpec.parse(reader.head["values"])
    if changes := earlier.frozen_changes(spec):
        raise ConfigError(
            f"{output}: its job has other values of {', '.join(changes)}, which a running job keeps; "
            f"choose another --output for a new job"
        )
    job = _replayed(reader, entries, earlier.config)
    if job.ended:
        raise EdlError(f"{output}: its job has ended: {job.phase}")
    workers = tuple((w.id, w.handle or "external") for w in job.pool if w.state != WorkerState.PENDING)
    return RunId(reader.head["run_id"]), ev.Adopted(workers, job.pool.next_id)


def _run_of(path: Path) -> str:
    """Whose journal it is; empty if there is none, or a master was killed before it had written the head.

    Raises:
        EdlError: the file is something else.
    """
    try:
        return str(head_of(path)["run_id"])
    except JournalDamaged:
        return ""


def _dump(value: Any) -> dict[str, Any]:
    name = type(value).__name__
    adapter = _EVENTS.get(name) or _EFFECTS[name]
    return {"type": name, **adapter.dump_python(value, mode="json")}


def _load(value: dict[str, Any]) -> Any:
    fields = dict(value)
    return _EVENTS[fields.pop("type")].validate_python(fields)


def _brief(error: Exception) -> str:
    """An error in one line: pydantic's has one for each field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _cut(effects: list[Any]) -> str:
    text = str(effects)
    return text if len(text) <= 400 else f"{text[:400]}..."
