"""What a master finds of an earlier one in an output directory."""

from __future__ import annotations

import json
from pathlib import Path

from edl import config
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.errors import ConfigError, EdlError
from master import journal
from master.core import events as ev


def inherited(output: Path, values: dict[str, object]) -> tuple[RunId, ev.Adopted] | None:
    """The unfinished job of that directory: its run id, and the workers that may still live.

    Raises:
        ConfigError: it is a job with other values, and not only live ones.
    """
    path = output / artifacts.JOURNAL
    if not path.exists():
        return None
    head, _ = journal.read(path)
    if changes := config.frozen_changes(config.parse(head["values"]), config.parse(values)):
        raise ConfigError(f"{output}: its job has other values of {', '.join(changes)}: that is a new job")
    job = journal.replay(path, config.parse(head["values"]))
    if job.ended:
        raise EdlError(f"{output}: its job has ended: {job.phase}")
    workers = tuple((w.id, w.handle or "external") for w in job.pool if w.state != "pending")
    return RunId(head["run_id"]), ev.Adopted(workers, job.pool.next_id)


def token_of(output: Path) -> str:
    """The token of the job in that directory, "" when there is none."""
    try:
        return str(json.loads((output / artifacts.CONTACT).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError):
        return ""
