"""`edl audit` on the journals of stories."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl import audit
from edl.contract.ids import Generation, WorkerId
from edl.contract.ranges import RangeSet
from master.core import events as ev
from tests.journals import keep
from tests.stories import Story

FIRST = WorkerId(0)


def verdict(story: Story, output: Path) -> str:
    """Trains what is left of the story with worker 0, ends it, and audits its journal."""
    story.up(4)
    story.take_leases()
    story.tell(ev.Heartbeat(FIRST, story.job.ring.generation, 10, applied=RangeSet(((0, 100),))))
    story.out(0, step=10, applied=(0, 100), digest="d")
    story.tell(ev.Finished(FIRST, {}, ""), *(ev.Gone(w.id, code=0) for w in story.job.pool))
    keep(story, output)
    return audit.audit(output)


def a_story_with_a_death() -> Story:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.take_leases()
    story.tell(ev.Heartbeat(FIRST, story.job.ring.generation, 3, applied=RangeSet(((0, 30),))))
    story.kill(1)
    story.out(0, step=4, applied=(0, 40), broken="reset")
    return story


def test_a_beat_that_comes_after_its_ring_was_left_is_no_news(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    story.tell(ev.Heartbeat(FIRST, Generation(1), 4, applied=RangeSet(((0, 30),))))
    assert verdict(story, tmp_path).startswith("exactly once: 100 records x 1 epochs, 2 rings")


def test_what_a_ring_has_applied_must_not_be_lost_in_it(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    story.tell(ev.Heartbeat(FIRST, Generation(2), 4, applied=RangeSet(((0, 30),))))
    with pytest.raises(audit.AuditFailed, match=r"\(position 30\) was applied and is no longer"):
        verdict(story, tmp_path)
