# SPDX-License-Identifier: Apache-2.0
"""The journal: one line for each event of a job, with its effects.

A line holds the time, the event, and the effects. `replay` feeds the events through a new core; the journal
is valid if the effects are the same. After a master was killed, a new master reads the last segment of the
journal, and nothing else, with `unfinished`.

The journal never takes more than `journal.maxBytes`: it is kept in segments, and the oldest are deleted. The
head of each later segment has the proof of the deleted ones. The format is in `edl.journal.format`.
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

from edl import scratch
from edl.config import Config
from edl.contract import artifacts, hangs
from edl.contract.ids import RunId
from edl.contract.phases import WorkerState
from edl.errors import ConfigError, EdlError
from edl.full_disk import PASSING
from edl.journal.format import Head, JournalDamaged, JournalReader, Link, head_of, last_chain, segments
from edl.journal.proof import NOT_A_MASTERS, AuditFailed, JournalProof
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import past, snapshot
from edl.master.core.job import Job
from edl.master.jobs import new_job, work_of
from edl.master.spec import JobSpec

MAX_WAITING = 64 << 20  # bytes; some hours of a large job
SEGMENT = 1 << 20  # bytes of lines: a new master reads so much in less than half a second
MIN_SEGMENTS = 8  # in journal.maxBytes, so that one deletion removes a small part

Entries: TypeAlias = Iterator[tuple[float, ev.Event, list[Any]]]

_EVENTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Event.__args__}
_EFFECTS = {cls.__name__: TypeAdapter(cls) for cls in ef.Effect.__args__}


class Journal:
    """An open journal. It continues the segments of an earlier master of the same run.

    Lines are flushed as they are written, so a killed master can leave only the last line incomplete. A new
    segment is written to a temporary file and moved into place, so there is always one that a master can
    continue from. When the disk is full, `trouble` reports it, and unwritten lines wait in memory for room.

    Args:
        path: the path of the last segment.
        state: returns the core's state for the head of each later segment of this master.
        full_at: bytes of lines after which a new segment begins.

    Raises:
        OSError: the directory cannot be written.
        EdlError: the path is a different kind of file.
    """

    def __init__(
        self, path: Path, run_id: str, spec: JobSpec, state: Callable[[], Any], full_at: int = SEGMENT
    ):
        self.trouble = ""  # why the journal cannot be written; empty while it can
        self._path, self._run_id, self._spec, self._state = path, run_id, spec, state
        self._waiting = bytearray()
        self._lock = threading.Lock()  # a cancelled master may close the journal while a segment begins
        self._file, self._segment = -1, full_at
        self._earlier: list[tuple[Path, int]] = []  # segments and their bytes
        self._proof, after = self._go_on()
        self.link = Link(0, after)  # the last written line
        self._begin(None)
        self._proof.begin(spec.values)

    def write(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Record an event, and start a new segment when this one is full."""
        self.note(now, event, effects)
        if self.full:
            self.begin_another()

    def note(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Record an event in this segment; drop it if MAX_WAITING bytes already wait for room."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self._flush()
                return
            entry = {"now": now, "event": _dump(event), "effects": [_dump(e) for e in effects]}
            self._line(entry)
            self._note(entry)

    @property
    def full(self) -> bool:
        """True if a new segment is due."""
        return self._bytes >= self._full_at and not self._waiting

    def begin_another(self) -> None:
        """Start a new segment; later, if there is no room for it now.

        This waits for the disk twice, and may run on a different thread while no event is recorded. Later
        events must come after the head, and decisions must be on the disk before they are performed.

        Raises:
            OSError: the disk failed for another reason than lack of room.
        """
        with self._lock, hangs.watched():
            self._earlier.append((artifacts.segment(self._path.parent, self._number), self._bytes))
            try:
                os.fsync(self._file)  # so that no crash keeps the new segment but loses the end of this one
                self._begin(self._state())
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                self._earlier.pop()
                self._full_at += self._segment

    def close(self) -> None:
        """Flush the last lines to the disk, and close the file."""
        with self._lock:
            self._flush()
            os.close(self._file)

    def rescue(self, directory: Path) -> None:
        """Write the whole journal, including the lines that wait for room, to a different directory.

        Raises:
            OSError: that directory cannot be written, either.
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
        """Update the proof. An error in it is recorded for an audit, and the job continues."""
        if self._proof.wrong:
            return
        where = f"segment {self._number}, line {self.link.lines}"
        try:
            self._proof.note(entry, where)
        except AuditFailed as error:
            self._proof.wrong = str(error)
        except NOT_A_MASTERS as error:
            self._proof.wrong = f"{where}: {type(error).__name__}: {error}"

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

    def _go_on(self) -> tuple[JournalProof, str]:
        """Load the proof of the existing segments of this run, and the last `chain` of them."""
        directory = self._path.parent
        scratch.remove_unfinished(self._path)  # incomplete heads of masters that were killed
        paths = artifacts.journals(directory)
        if paths and paths[-1] == self._path:
            if len(paths) > 1 and paths[-2].samefile(self._path):  # a master was killed in `_put_aside`
                paths.pop(-2).unlink()
            run = _run_of(self._path)
            if run != self._run_id:
                paths.pop()  # of a different run, or without a complete head: it will be replaced
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
                self._number = max(said, self._number)  # early versions of edl did not write it
            self._earlier.append((artifacts.segment(directory, self._number), path.stat().st_size))
        return _proof_after(paths[-1]) if paths else (JournalProof(), "")

    def _begin(self, state: Any) -> None:
        """Put a new segment in place, and delete the oldest ones if there is no room for them.

        Raises:
            OSError: the new segment cannot be written. The previous one is unchanged.
        """
        most = self._spec.config.journal.max_bytes
        number = self._number + 1
        proof = self._proof.dump() if number > 1 else None

        def sealed(oldest: int) -> tuple[Link, bytes]:
            head = Head(self._run_id, number, oldest, self.link.chain, self._spec.values, proof, state)
            return Link(0, self.link.chain).seal(head.line())

        length = len(sealed(number)[1])
        segment = max(min(self._segment, most // MIN_SEGMENTS), length)  # at most half of it is heads
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
        """Link the last segment to its numbered name; it also keeps its path until the next replaces it."""
        aside = artifacts.segment(self._path.parent, number)
        if self._earlier and not aside.exists():
            try:
                os.link(self._path, aside)
            except OSError:  # a file system without links: for a moment, the last segment is missing
                self._path.rename(aside)

    def _take_back(self, number: int) -> None:
        aside = artifacts.segment(self._path.parent, number)
        if not aside.exists():
            return  # `_put_aside` did nothing
        if not self._path.exists():
            aside.rename(self._path)
        elif aside.samefile(self._path):
            aside.unlink()


def entries(reader: JournalReader) -> Entries:
    """Yield the lines of a segment, as (now, event, effects as written).

    Raises:
        JournalDamaged: a line was not written by a master.
    """
    for number, entry in reader:
        try:
            yield float(entry["now"]), _load(entry["event"]), entry["effects"]
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(reader.path, number, f"not an event of edl ({_brief(error)})") from error


def replay(readers: Iterable[JournalReader], config: Config) -> Job:
    """Replay consecutive segments of one master, from the core's state at the first head; return the job.

    Raises:
        JournalDamaged: a segment is damaged, or the core's decisions, or its state at a head, differ from the
            journal; the text names the first line that does.
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
    """Return the core with the state at the head of a segment.

    Raises:
        JournalDamaged: the state at the head cannot be loaded.
    """
    if reader.begins:
        return new_job(config)
    try:
        return snapshot.load(reader.head["state"], config, work_of(config))
    except ValueError as error:
        raise JournalDamaged(reader.path, 1, f"its state is damaged: {_brief(error)}") from error


def _feed(job: Job, reader: JournalReader) -> None:
    for now, event, written in entries(reader):
        try:
            effects = [_dump(e) for e in job.handle(event, now)]
        except Exception as error:  # events in an impossible order
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
    """Replay the journal in an output directory; return its run id, and the job at its end.

    The third value is the oldest segment if earlier ones were deleted, else None.

    Raises:
        JournalDamaged: a segment or its values are damaged, or the core's decisions differ from the journal.
        EdlError: the journal is missing or incomplete.
    """
    readers = segments(output)
    # Replay the last master only: after a failover, a master starts with an empty core.
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
    """Return the run id and the possibly live workers of the unfinished job in an output directory.

    None if no job was started there.

    Raises:
        ConfigError: values of that job that are not live differ from `spec`.
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
    active = job.lifetime.seconds(job.now)
    return RunId(reader.head["run_id"]), ev.Adopted(
        workers,
        job.pool.next_id,
        active_seconds=active,
        began_with=job.notes.began_with,
        past=past.until(past.of(job), active),
    )


def silent_seconds(output: Path) -> float:
    """Return the seconds since the journal there was last written, by the modification time of its file."""
    return max(0.0, time.time() - artifacts.journals(output)[-1].stat().st_mtime)


def _proof_after(path: Path) -> tuple[JournalProof, str]:
    """Return the proof after the last line of a segment, and its `chain`; `wrong` is set on errors."""
    try:
        reader = JournalReader(path)
        proof = JournalProof.load(reader.head["proof"])
        if reader.begins:
            proof.begin(reader.head["values"])
        for number, entry in reader:
            if not proof.wrong:
                proof.note(entry, f"segment {reader.number}, line {number}")
    except (EdlError, *NOT_A_MASTERS) as error:
        return JournalProof(wrong=_brief(error)), last_chain(path)
    return proof, reader.link.chain


def _run_of(path: Path) -> str:
    """Return the run id of a journal; empty if a master was killed before it had written the head.

    Raises:
        EdlError: the file is not a journal.
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
    """Describe an error in one line; of pydantic's, which have one line for each field, the first."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _cut(effects: list[Any]) -> str:
    text = str(effects)
    return text if len(text) <= 400 else f"{text[:400]}..."
