"""What a master finds of an earlier one in an output directory."""

from __future__ import annotations

import json
from pathlib import Path

from edl import config, files
from edl.errors import ConfigError, EdlError
from edl.ids import RunId
from master.adapters import journal
from master.core import events as ev


def inherited(output: Path, values: dict[str, object]) -> tuple[RunId, ev.Adopted] | None:
    """The unfinished job of that directory: its run id, and the workers that may still live.

    Raises:
        ConfigError: it is a job with other values, and not only live ones.
    """
    path = output / files.JOURNAL
    if not path.exists():
        return None
    head, _ = journal.read(path)
    if changes := config.frozen_changes(config.parse(head["values"]), config.parse(values)):
        raise ConfigError(f"{output}: its job has other values of {', '.join(changes)}: that is a new job")
    job = journal.replay(path, config.parse(head["values"]))
    if job.ended:
        raise EdlError(f"{output}: its job has ended: {job.phase}")
    workers = tuple((w.id, w.handle or "by hand") for w in job.pool if w.state != "asked")
    return RunId(head["run_id"]), ev.Adopted(workers, job.pool.born)


def token_of(output: Path) -> str:
    """The token of the job in that directory, "" when there is none."""
    try:
        return str(json.loads((output / files.CONTACT).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError):
        return ""
