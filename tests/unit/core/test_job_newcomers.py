# SPDX-License-Identifier: Apache-2.0
"""Stories of new workers: how long they wait for the ring to change."""

from __future__ import annotations

import pytest

from edl.contract.ids import WorkerId
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from tests.support.jobs.stories import Story, of, only


def test_a_newcomer_is_taken_in_at_once_where_nobody_else_is_on_the_way() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    g = story.job.ring.generation
    story.tell(
        ev.Gone(WorkerId(1), signal="SIGKILL"), *(ev.LeftRing(WorkerId(w), g, 1, True) for w in (0, 2))
    )
    story.up(1)
    assert only(story.ready(3), ef.Leave).members == (0, 2)


def test_a_newcomer_waits_a_moment_for_one_that_is_on_the_way() -> None:
    story = Story(workers=4, joinDelaySeconds=0.5)
    story.ready(0, 1)
    story.waits(1)
    story.up()
    assert not of(story.ready(2), ef.Leave)
    assert only(story.ready(3), ef.Leave).members == (0, 1), "now all are here"


def changed(story: Story, seconds: float) -> Story:
    """The members are out of the ring for so long, which is changed for joining or leaving workers."""
    first, *others = story.job.ring.members
    story.out(first)
    back_at = story.now + seconds
    story.out(*others)
    ring, story.now = story.job.ring, back_at
    for member in ring.members:
        story.tell(ev.JoinedRing(member, ring.generation, 1), after=0)
    return story


def growing(members: int, workers: int) -> Story:
    """A ring of `members`, and it has been changed before: that stopped its members for a second."""
    story = Story(workers=workers, heartbeatTimeoutSeconds=600, startupTimeoutSeconds=6000).running(
        *range(members - 1)
    )
    story.ready(members - 1)
    assert changed(story, 1.0).job.ring.members == tuple(range(members))
    return story


def test_a_newcomer_is_taken_in_when_it_has_waited_as_long_as_the_change_costs_the_members() -> None:
    story = growing(4, workers=6)
    assert not of(story.ready(4), ef.Leave)
    assert not of(story.waits(3.9), ef.Leave)
    told = view.status(story.job, story.now)["reason"]
    assert told == "4 workers (generation 2); worker 4 will join within 5 s, or when the ring changes before"
    assert only(story.waits(0.2), ef.Leave).members == (0, 1, 2, 3)


def test_newcomers_wait_together() -> None:
    story = growing(4, workers=6)
    story.ready(4)
    story.waits(2)
    assert not of(story.ready(5), ef.Leave)
    assert not of(story.waits(0.9), ef.Leave), "2.9 s and 0.9 s: less than 4 s"
    assert only(story.waits(0.2), ef.Leave)


def test_a_newcomer_is_taken_in_when_the_ring_changes_for_another_reason() -> None:
    story = growing(4, workers=6)
    story.ready(4)
    story.kill(0)
    assert only(story.out(1, 2, 3), ef.Form).members == (1, 2, 3, 4)
    assert story.job.next_ring.join_at is None
    story.up(1)
    assert story.job.ring.stop_seconds == pytest.approx(1), "a broken ring says nothing of a planned change"


@pytest.mark.parametrize("answers", [True, False], ids=["the server is back", "the server is still away"])
def test_an_outage_of_a_server_is_no_cost_of_a_change(answers: bool) -> None:
    story = growing(4, workers=6)
    story.ready(4)
    assert of(story.waits(4), ef.Leave)
    story.tell(ev.ServerAway(0, 1.0, "restarting"))
    story.out(0, 1, 2, 3)
    if answers:
        story.tell(ev.ServerRecovered(0), after=20)
    for member in story.job.ring.members:
        story.tell(ev.JoinedRing(member, story.job.ring.generation, 1), after=5)
    assert story.job.ring.up
    assert story.job.ring.stop_seconds == pytest.approx(1), "as the change before it took"


def test_no_newcomer_waits_longer_than_half_a_minute() -> None:
    story = growing(60, workers=61)
    story.ready(60)
    assert not of(story.waits(29.9), ef.Leave)
    assert only(story.waits(0.2), ef.Leave)


def test_a_newcomer_that_is_lost_while_it_waits_changes_nothing() -> None:
    story = growing(4, workers=5)
    story.ready(4)
    story.kill(4)
    assert view.status(story.job, story.now)["reason"] == "4 workers (generation 2)"
    assert not of(story.waits(10), ef.Leave)
    assert story.job.ring.running
    assert (story.job.next_ring.join_at, story.job.next_ring.review_at) == (None, None), (
        "no change is planned again"
    )


def test_who_leaves_does_not_wait_for_a_newcomer() -> None:
    story = growing(4, workers=6)
    story.ready(4)
    assert only(story.tell(ev.Leaving(WorkerId(0), "SIGTERM")), ef.Leave)
