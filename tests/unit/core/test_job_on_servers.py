# SPDX-License-Identifier: Apache-2.0
"""A job whose whole state is on parameter servers (mode=ps): no worker has to hold it."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.jobs.stories import Story, of, only


def a_story(workers: int = 2, **elastic: Any) -> Story:
    return Story(workers=workers, mode="ps", least=workers, **elastic)


def test_all_workers_die_and_nothing_is_lost() -> None:
    story = a_story().running()
    story.tell(ev.Progress(story.job.ring.generation, 6))
    assert story.job.train is not None
    effects = [e for w in (0, 1) for e in story.kill(w)]
    assert [e.worker for e in of(effects, ef.Create)] == [2, 3]
    form = only(story.ready(2) + story.ready(3), ef.Form)
    assert form.members == (2, 3) and not form.sync and form.joining == ()
    story.tell(*(ev.JoinedRing(WorkerId(w), form.generation, 6) for w in (2, 3)))
    assert story.job.restarts == 0 and story.job.train.done == 6
    assert not story.noticed(Reason.StateLost) and not story.noticed(Reason.Restored)


def test_a_newcomer_is_sent_no_state() -> None:
    story = a_story().running()
    story.tell(ev.Scale(3))
    only(story.ready(2) + story.waits(1), ef.Leave)
    form = only(story.out(0, 1, step=3), ef.Form)
    assert form.members == (0, 1, 2) and not form.sync and form.joining == ()


def test_servers_that_went_back_are_told_with_what_is_made_again() -> None:
    story = a_story().running()
    g = story.job.ring.generation
    story.tell(ev.Progress(g, 6))
    story.out(0, 1, step=5, broken="parameter server 1 has come back with nothing")
    g = Generation(g + 1)
    assert story.job.ring.generation == g
    why = "parameter server 1 has lost its log and rows"
    story.tell(*(ev.JoinedRing(WorkerId(w), g, 2, rolled_back=why) for w in (0, 1)))
    (told,) = story.noticed(Reason.RolledBack)
    assert "rolled back to step 2" in told and why in told and "30 records are trained again" in told
    assert story.job.restarts == 1


@pytest.mark.parametrize("arrives", ["once the ring has formed", "while the ring forms"])
def test_an_order_of_servers_that_is_taken_back_before_the_rows_move_for_it_ends_none(arrives: str) -> None:
    story = a_story(1).running()
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 3, servers=1))
    assert of(story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1"))), ef.Leave)
    form = only(story.out(0, step=4), ef.Form)
    assert form.servers == 3
    moves_later = ev.JoinedRing(WorkerId(0), form.generation, 4, servers=1)
    taken_back = ev.ServersReady(1, ("a:1", "b:1", "c:1"))
    both: list[ev.Event] = (
        [moves_later, taken_back] if arrives == "once the ring has formed" else [taken_back, moves_later]
    )
    effects = story.tell(*both)
    assert of(effects, ef.Leave) and not of(effects, ef.Assigned), "the ring may be asking all three"
    if arrives == "while the ring forms":
        moved = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 4, servers=3))
        assert not of(moved, ef.Assigned), "they are to be fewer"
    form = only(story.out(0, step=5), ef.Form)
    assert form.servers == 1
    effects = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 5, servers=3))
    assert not of(effects, ef.Assigned)
    effects = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 5, servers=1))
    assert only(effects, ef.Assigned) == ef.Assigned(1, wanted=1)


def to_move_later() -> tuple[Story, ef.Form]:
    """A ring is up with the rows on one server, and is to move them to three at a boundary."""
    story = a_story(1).running()
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 3, servers=1))
    story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    form = only(story.out(0, step=4), ef.Form)
    story.tell(ev.JoinedRing(WorkerId(0), form.generation, 4, servers=1))
    return story, form


def test_a_move_at_a_boundary_is_told_whatever_time_passes_before_it() -> None:
    story, form = to_move_later()
    story.waits(1)
    effects = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 4, servers=3))
    assert only(effects, ef.Assigned) == ef.Assigned(3, wanted=3)
    assert story.noticed(Reason.Resharded)


def test_rows_that_stay_are_assigned_though_they_were_to_move_later() -> None:
    story, form = to_move_later()
    stay = ev.JoinedRing(WorkerId(0), form.generation, 4, servers=1, stay="no memory")
    assert only(story.tell(stay), ef.Assigned) == ef.Assigned(1, wanted=3)
    story.tell(ev.ServersReady(2, ("a:1", "b:1", "c:1")))
    story.tell(ev.ServersReady(1, ("a:1", "b:1", "c:1")))
    form = only(story.out(0, step=5), ef.Form)
    effects = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 5, servers=1))
    assert form.servers == 1 and not of(effects, ef.Leave)


def test_the_last_worker_may_go_and_the_job_waits_for_others() -> None:
    story = a_story(1).running()
    story.tell(ev.Leaving(WorkerId(0), "preempted"))
    effects = story.waits(1) + story.out(0, step=4)
    assert of(effects, ef.Stop), "it was kept as if it held the last copy"


def test_a_worker_that_never_saw_the_training_saves_its_model() -> None:
    story = a_story(1).running()
    story.tell(ev.EpochEnded(WorkerId(0), story.job.ring.generation, 1, None, {}))
    story.kill(0)
    form = only(story.ready(1), ef.Form)
    story.tell(ev.JoinedRing(WorkerId(1), form.generation, 10))
    effects = story.out(1, step=10, digest="same")
    assert only(effects, ef.Export).worker == 1
    story.tell(ev.Finished(WorkerId(1), {}, "model.keras"))
    assert story.job.ending is not None and story.job.ending[0] is Phase.Succeeded
