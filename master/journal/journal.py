"""What happened, for ever: the journal, one line for each event with what followed from it.

A line holds the time, the event, and the effects. `replay` feeds the events through a new core; that the
effects come out the same is how a journal proves itself. `unfinished` is what a new master learns from the
journal of an earlier one that was killed: it reads the last segment, and no more.

The journal never takes more than `journal.maxBytes`: it is kept in segments, and the oldest are deleted. What
they have shown is at the head of each later one. The format is in `edl.journal.format`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from edl.config import Config
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.contract.phases import WorkerState
from edl.errors import ConfigError, EdlError
from edl.full_disk import PASSING
from edl.journal.format import Head, JournalDamaged, JournalReader, Link, head_of, last_chain, segments
from edl.journal.proof import NOT_A_MASTERS, AuditFailed, Books
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import past, snapshot
from edl.master.core.job import Job
from edl.master.spec import JobSpec

MOST_WAITING = 64 << 20  # bytes; some hours of a large job
SEGMENT = 1 << 20  # bytes of lines: a new master reads so much in less than half a second
LEAST_SEGMENTS = 8  # in journal.maxBytes: what is deleted at once is a small part

Entries: TypeAlias = Iterator[tuple[float, ev.Event, list[Any]]]

_EVENTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Event.__args__}
_EFFECTS = {cls.__name__: TypeAdapter(cls) for cls in ef.Effect.__args__}


class Journal:
    """An open journal. Lines are flushed as they are written: a killed master leaves no half line
    but the last. The segments of an earlier master of the same run are kept and gone on from.

    A segment is begun aside and put in place whole, so there is always one that a master can go on from. When
    the disk is full, `trouble` says so, and what could not be written waits in memory for room.

    Args:
        path: of the last segment.
        state: what is kept of the core at the head of a segment that this master goes on in.
        full_at: bytes of lines after which it does so.

    Raises:
        OSError: the directory cannot be written.
        EdlError: there is something else of that name.
    """

    def __init__(
        self, path: Path, run_id: str, spec: JobSpec, state: Callable[[], Any], full_at: int = SEGMENT
    ):
        self.trouble = ""  # why it cannot be written; empty while it can
        self._path, self._run_id, self._spec, self._state = path, run_id, spec, state
        self._waiting = bytearray()
        self._lock = threading.Lock()  # a master that is cancelled closes it while a segment begins
        self._file, self._segment = -1, full_at
        self._earlier: list[tuple[Path, int]] = []  # segments and their bytes
        self._books, after = self._go_on()
        self.link = Link(0, after)  # how far it is written
        self._begin(None)
        self._books.begin(spec.values)

    def write(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Note an event, and go on in another segment when this one is full."""
        self.note(now, event, effects)
        if self.full:
            self.begin_another()

    def note(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """The same in this segment. A journal for which there was no room for too long ends early."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._flush()
                return
            entry = {"now": now, "event": _dump(event), "effects": [_dump(e) for e in effects]}
            self._line(entry)
            self._note(entry)

    @property
    def full(self) -> bool:
        """Another segment is due."""
        return self._bytes >= self._full_at and not self._waiting

    def begin_another(self) -> None:
        """Go on in a new segment; later, if there is no room for it now.

        It waits for the disk, twice, and may do so on another thread while nothing is noted: what is noted
        later must come after the head, and what was decided must be on the disk before it is done.
        """
        with self._lock:
            self._earlier.append((artifacts.segment(self._path.parent, self._number), self._bytes))
            try:
                os.fsync(self._file)  # so that no crash leaves the new one without the end of this
                self._begin(self._state())
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                self._earlier.pop()
                self._full_at += self._segment

    def close(self) -> None:
        with self._lock:
            self._flush()
            os.close(self._file)

    def rescue(self, directory: Path) -> None:
        """Write all of it, what waits for room too, into another directory.

        Raises:
            OSError: that is full as well.
        """
        for path in artifacts.journals(self._path.parent):
            shutil.copyfile(path, directory / path.name)
        with open(directory / self._path.name, "ab") as file:
            file.write(self._waiting)

    # --- lines

    def _line(self, value: dict[str, Any]) -> None:
        self.link, line = self.link.seal(value)
        self._waiting += line
        self._bytes += len(line)
        self._flush()

    def _note(self, entry: dict[str, Any]) -> None:
        """Keep the books. What is wrong with them, an audit is to say: the job goes on."""
        if self._books.wrong:
            return
        where = f"segment {self._number}, line {self.link.lines}"
        try:
            self._books.note(entry, where)
        except AuditFailed as error:
            self._books.wrong = str(error)
        except NOT_A_MASTERS as error:
            self._books.wrong = f"{where}: {type(error).__name__}: {error}"

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
            self.trouble = ""
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self.trouble = f"{self._path}: {error.strerror}; it is kept in memory until there is room"

    # --- segments

    def _go_on(self) -> tuple[Books, str]:
        """From what is there: the books over the segments of this run, and the last `chain` of them."""
        directory = self._path.parent
        _delete(directory.glob(f".{self._path.name}.*"))  # half a head, of a master that was killed
        paths = artifacts.journals(directory)
        if paths and paths[-1] == self._path:
            if len(paths) > 1 and paths[-2].samefile(self._path):  # a master was killed in `_put_aside`
                paths.pop(-2).unlink()
            run = _run_of(self._path)
            if run != self._run_id:
                paths.pop()  # of another run, or not even a head: it will be replaced
                if run:
                    _delete(paths)
                    paths = []
        if paths and _run_of(paths[-1]) != self._run_id:
            _delete(paths)
            paths = []
        self._number = 0
        for path in paths:
            self._number = self._number + 1 if path == self._path else artifacts.number_of(path)
            if path == self._path and isinstance(said := head_of(path).get("number"), int):
                self._number = max(said, self._number)  # an earlier edl did not say it
            self._earlier.append((artifacts.segment(directory, self._number), path.stat().st_size))
        return _books_after(paths[-1]) if paths else (Books(), "")

    def _begin(self, state: Any) -> None:
        """Put a new segment in place, and delete as many of the oldest as there is no room for.

        Raises:
            OSError: it cannot be written. The one before is as it was.
        """
        most = self._spec.config.journal.max_bytes
        number = self._number + 1
        proof = self._books.dump() if number > 1 else None

        def sealed(oldest: int) -> tuple[Link, bytes]:
            head = Head(self._run_id, number, oldest, self.link.chain, self._spec.values, proof, state)
            return Link(0, self.link.chain).seal(head.line())

        length = len(sealed(number)[1])
        segment = max(min(self._segment, most // LEAST_SEGMENTS), length)  # at most half of it is heads
        kept, room = len(self._earlier), most - length - segment * 9 // 8  # its last line may be long
        while kept and sum(size for _, size in self._earlier[-kept:]) > room:
            kept -= 1
        link, head = sealed(number - kept)
        self._put_aside(number - 1)
        try:
            artifacts.write_whole(self._path, head.decode())
        except OSError:
            self._take_back(number - 1)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self.link, self._number, self._bytes = link, number, length
        self._full_at = length + segment
        deleted = len(self._earlier) - kept
        _delete(path for path, _ in self._earlier[:deleted])
        del self._earlier[:deleted]

    def _put_aside(self, number: int) -> None:
        """Give the last segment its number, and leave it where it is, too, until the next takes its place."""
        aside = artifacts.segment(self._path.parent, number)
        if self._earlier and not aside.exists():
            try:
                os.link(self._path, aside)
            except OSError:  # a file system without links: for a moment, there is no last segment
                self._path.rename(aside)

    def _take_back(self, number: int) -> None:
        aside = artifacts.segment(self._path.parent, number)
        if not aside.exists():
            return  # nothing was put aside
        if not self._path.exists():
            aside.rename(self._path)
        elif aside.samefile(self._path):
            aside.unlink()


def entries(reader: JournalReader) -> Entries:
    """The lines of a segment, as (now, event, effects as written).

    Raises:
        JournalDamaged: a line is not what a master has written.
    """
    for number, entry in reader:
        try:
            yield float(entry["now"]), _load(entry["event"]), entry["effects"]
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(reader.path, number, f"not an event of edl ({_brief(error)})") from error


def replay(readers: Iterable[JournalReader], config: Config) -> Job:
    """The job after segments of one master that follow each other: from the core as it was at the first head.

    Raises:
        EdlError: one is damaged, or the core decides otherwise than it did, or was otherwise at a head; the
            text names the first such line.
    """
    job: Job | None = None
    chain = ""
    for reader in readers:
        kept = reader.head["state"]
        if job is None:
            job = _job_at(reader, config)
        elif reader.after != chain:
            raise JournalDamaged(reader.path, 1, "does not go on from the end of the segment before it")
        elif json.dumps(snapshot.dump(job)) != json.dumps(kept):
            raise JournalDamaged(
                reader.path, 1, "its state is not that of the core after the lines before it"
            )
        _feed(job, reader)
        chain = reader.link.chain
    assert job is not None, "no segment at all"
    return job


def _job_at(reader: JournalReader, config: Config) -> Job:
    """The core as it was at the head of a segment."""
    if reader.begins:
        return Job(config)
    try:
        return snapshot.load(reader.head["state"], config)
    except ValueError as error:
        raise JournalDamaged(reader.path, 1, f"its state is damaged: {_brief(error)}") from error


def _feed(job: Job, reader: JournalReader) -> None:
    for now, event, written in entries(reader):
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


def replayed(output: Path, summary: dict[str, Any]) -> tuple[RunId, Job, Path | None]:
    """The run and the end of the job in an output directory, by its journal and nothing else; and the oldest
    segment, if what came before it is not kept.

    Raises:
        EdlError: the journal is damaged or not whole, or the core decides otherwise than it did.
    """
    readers = segments(output)
    # Of the last master: one that took over began with an empty core, and learned from the workers.
    first = max((n for n, reader in enumerate(readers) if reader.begins), default=0)
    oldest, last = readers[first], readers[-1]
    try:
        config = JobSpec.parse(oldest.head["values"]).config
    except ConfigError as error:
        wrong = "; ".join(str(error).splitlines())
        raise JournalDamaged(oldest.path, 1, f"its values are invalid: {wrong}") from error
    job = replay(readers[first:], config)
    last.check_end(summary)
    return RunId(last.head["run_id"]), job, None if oldest.begins else oldest.path


def unfinished(output: Path, spec: JobSpec) -> tuple[RunId, ev.Adopted] | None:
    """The unfinished job of an output directory: its run id, and the workers that may still live; None:
    no job was begun there.

    Raises:
        ConfigError: the values of that job are others than `spec`, and not only live ones.
        EdlError: that job has ended, or its journal cannot be read.
    """
    paths = artifacts.journals(output)
    if not paths:
        return None
    reader = JournalReader(paths[-1])
    earlier = JobSpec.parse(reader.head["values"])
    if changes := earlier.frozen_changes(spec):
        raise ConfigError(
            f"{output}: its job has other values of {', '.join(changes)}, which a running job keeps; "
            f"choose another --output for a new job"
        )
    job = replay([reader], earlier.config)
    if job.ended:
        raise EdlError(f"{output}: its job has ended: {job.phase}")
    workers = tuple((w.id, w.handle or "external") for w in job.pool if w.state != WorkerState.PENDING)
    active = job.active_before + (0.0 if job.began_at is None else job.now - job.began_at)
    return RunId(reader.head["run_id"]), ev.Adopted(
        workers, job.pool.next_id, safe=job.train.safe if job.train else 0,
        active_seconds=active, began_with=job.began_with, past=past.until(past.of(job), active),
    )  # fmt: skip


def silent_seconds(output: Path) -> float:
    """For how long nobody has written the journal there, by the clock of its disk."""
    return max(0.0, time.time() - artifacts.journals(output)[-1].stat().st_mtime)


def _books_after(path: Path) -> tuple[Books, str]:
    """The books after the last line of a segment, and its `chain`. If it cannot be read, they say why."""
    try:
        reader = JournalReader(path)
        books = Books.load(reader.head["proof"])
        if reader.begins:
            books.begin(reader.head["values"])
        for number, entry in reader:
            if not books.wrong:
                books.note(entry, f"segment {reader.number}, line {number}")
    except (EdlError, *NOT_A_MASTERS) as error:
        return Books(wrong=_brief(error)), last_chain(path)
    return books, reader.link.chain


def _run_of(path: Path) -> str:
    """Whose journal it is; empty if there is none, or a master was killed before it had written the head.

    Raises:
        EdlError: the file is something else.
    """
    try:
        return str(head_of(path)["run_id"])
    except JournalDamaged:
        return ""


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _dump(value: Any) -> dict[str, Any]:
    name = type(value).__name__
    adapter = _EVENTS.get(name) or _EFFECTS[name]
    return {"type": name, **adapter.dump_python(value, mode="json", exclude_defaults=True)}


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
