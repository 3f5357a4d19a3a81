# SPDX-License-Identifier: Apache-2.0
"""The output directory of a story's job, as its master would leave it."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from edl.contract import artifacts
from edl.master.core import events as ev
from edl.master.core import snapshot, view
from edl.master.jobs import new_job
from edl.master.journal.journal import SEGMENT, Journal
from edl.master.spec import JobSpec
from tests.support.jobs.stories import Story

RUN = "a run"


def keep(story: Story, output: Path, *cuts: int, full_at: int = 0) -> None:
    """Write the story's journal and summary.

    Args:
        cuts: the numbers of events after which a new master continues, in a segment of its own.
        full_at: bytes of lines in a segment; 0 for the default.
    """
    history = story.watchdog.history
    spec = JobSpec.parse(story.values)
    for first, after in itertools.pairwise((0, *cuts, len(history))):
        job = new_job(spec.config)
        journal = Journal(
            output / artifacts.JOURNAL, RUN, spec, partial(snapshot.dump, job), full_at or SEGMENT
        )
        for now, event, effects in history[first:after]:
            if not cuts:
                job.handle(event, now)
            journal.write(now, event, effects)
        journal.close()
    summary = {"run_id": RUN, "foreign_messages": 0, "journal": asdict(journal.link)}
    (output / artifacts.SUMMARY).write_text(json.dumps({**summary, **view.summary(story.job)}))


def whole_story(exports: dict[str, str] | None = None, list_sha256: bytes = b"") -> Story:
    """Run two workers; one dies and is replaced, and all records are applied in the end.

    Args:
        exports, list_sha256: reported by the worker that saves the model.
    """
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 4))
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.ready(2)
    story.waits(1)
    if len(story.job.ring.members) == 1:
        story.up(4)
        story.out(0, step=5)
    story.up(5)
    members = story.job.ring.members
    story.tell(ev.Progress(story.job.ring.generation, 10, loss=0.5))
    story.out(*members, step=10, digest="same")
    story.tell(
        ev.Finished(
            members[0], {"accuracy": 0.9}, "model.keras", exports=exports or {}, list_sha256=list_sha256.hex()
        )
    )
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    assert story.job.phase == "Succeeded", story.job.reason
    return story
