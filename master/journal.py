"""What happened, for ever: events.jsonl, one line for each event with what followed from it.

A line holds the time, the event, and the effects. `replay` feeds the events through a new
core; that the effects come out the same is how a journal proves itself. `unfinished` is what a
new master learns from the journal of an earlier one that was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from edl.config import Config
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.contract.phases import WorkerState
from edl.errors import ConfigError, EdlError
from master.core import events as ev
from master.core.job import Job
from master.spec import JobSpec

_EVENTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Event.__args__}
_EFFECTS = {cls.__name__: TypeAdapter(cls) for cls in ev.Effect.__args__}


class Journal:
    """An open journal. Lines are flushed as they are written: a killed master leaves no half line
    but the last. The journal of an earlier master of the same run is kept under another name."""

    def __init__(self, path: Path, run_id: str, values: dict[str, Any]):
        *earlier, last = artifacts.journals(path.parent)
        if last.exists() and _head(last)["run_id"] == run_id:
            last.rename(path.with_name(f"events.{len(earlier) + 1}.jsonl"))
        else:
            for old in earlier:
                old.unlink()
        self._file: IO[str] = open(path, "w", encoding="utf-8", buffering=1)
        self._line(
            {"journal": "edl", "version": artifacts.JOURNAL_VERSION, "run_id": run_id, "values": values}
        )

    def write(self, now: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._line({"now": now, "event": _dump(event), "effects": [_dump(e) for e in effects]})

    def close(self) -> None:
        self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")


def read(path: Path) -> tuple[dict[str, Any], Iterator[tuple[float, ev.Event, list[Any]]]]:
    """The head of a journal, and its lines as (now, event, effects as written).

    Raises:
        EdlError: the file is not a journal, or one of another version of edl.
    """
    head = _head(path)
    if head["version"] != artifacts.JOURNAL_VERSION:
        raise EdlError(
            f"{path}: the journal has version {head['version']}, this edl reads version "
            f"{artifacts.JOURNAL_VERSION}; use the version of edl that wrote it"
        )

    def entries() -> Iterator[tuple[float, ev.Event, list[Any]]]:
        with open(path, encoding="utf-8") as lines:
            next(lines)
            for number, line in enumerate(lines, 2):
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    if line.endswith("\n"):
                        raise EdlError(f"{path}: line {number} is not JSON") from error
                    return  # the master was killed while it wrote the last line
                yield entry["now"], _load(entry["event"]), entry["effects"]

    return head, entries()


def _head(path: Path) -> dict[str, Any]:
    """The first line of a journal of any version.

    Raises:
        EdlError: the file is not a journal.
    """
    with open(path, encoding="utf-8") as lines:
        head = json.loads(lines.readline() or "{}")
    if head.get("journal") != "edl":
        raise EdlError(f"{path}: not a journal of edl")
    return dict(head)


def replay(path: Path, config: Config) -> Job:
    """A new job that has seen all events of the journal.

    Raises:
        EdlError: the core decides otherwise than it did; the text names the first line.
    """
    _, entries = read(path)
    job = Job(config)
    for number, (now, event, written) in enumerate(entries, 2):
        effects = [_dump(e) for e in job.handle(event, now)]
        if effects != written:
            raise EdlError(
                f"{path}: line {number}: the core now decides {effects}, the journal says {written}"
            )
    return job


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
    head, _ = read(path)
    earlier = JobSpec.parse(head["values"])
    if changes := earlier.frozen_changes(spec):
        raise ConfigError(
            f"{output}: its job has other values of {', '.join(changes)}, which a running job keeps; "
            f"choose another --output for a new job"
        )
    job = replay(path, earlier.config)
    if job.ended:
        raise EdlError(f"{output}: its job has ended: {job.phase}")
    workers = tuple((w.id, w.handle or "external") for w in job.pool if w.state != WorkerState.PENDING)
    return RunId(head["run_id"]), ev.Adopted(workers, job.pool.next_id)


def _dump(value: Any) -> dict[str, Any]:
    name = type(value).__name__
    adapter = _EVENTS.get(name) or _EFFECTS[name]
    return {"type": name, **adapter.dump_python(value, mode="json")}


def _load(value: dict[str, Any]) -> Any:
    name = value.pop("type")
    return _EVENTS[name].validate_python(value)
