# SPDX-License-Identifier: Apache-2.0
"""What becomes of heartbeats: `edl.master.telemetry`, without a core; and what the status shows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edl import config
from edl.cli.shared import display
from edl.config import values
from edl.contract.heartbeats import Activity, ServerWait, Staleness, Usage
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.http.metrics import Metrics
from edl.master.telemetry import PROGRESS_SECONDS, Telemetry
from tests.support.jobs.stories import Story, only
from tests.unit.core.test_snapshot import kept

FIRST, SECOND, THIRD = WorkerId(0), WorkerId(1), WorkerId(2)
RING = Generation(1)


def telemetry(*ready: int, at: float = 100.0, load_balancing: str = "none") -> Telemetry:
    """The heartbeats of ready workers; each may be silent for 4 seconds."""
    overrides = {"elastic": {"heartbeatTimeoutSeconds": 4}, "training": {"loadBalancing": load_balancing}}
    t = Telemetry(config.parse(values.merge(values.defaults(), overrides)))
    for worker in ready:
        said = ev.Ready(WorkerId(worker), Layout(100))
        assert list(t.hears(said, at)) == [said]
    return t


def beat(worker: int, step: int, generation: int = 1, **more: object) -> facts.Heartbeat:
    return facts.Heartbeat(WorkerId(worker), Generation(generation), step, **more)  # type: ignore[arg-type]


# --- progress


def test_the_core_hears_of_the_first_heartbeat_of_a_ring_and_then_now_and_again() -> None:
    t = telemetry(0, 1)
    assert list(t.hears(beat(0, 1), 100.0)) == [ev.Progress(RING, 1)]
    told = [e for i in range(1000) for e in t.hears(beat(i % 2, i), 100.0 + i * 0.1)]
    assert len(told) == pytest.approx(100 / PROGRESS_SECONDS, abs=1)
    assert all(isinstance(e, ev.Progress) for e in told)


def test_it_is_told_the_most_that_any_member_has_said() -> None:
    t = telemetry(0, 1)
    list(t.hears(beat(0, 1), 100.0))
    fuller, newer = facts.EpochLoss(0, 90, 0.7), facts.EpochLoss(0, 20, 0.6)
    assert not list(t.hears(beat(0, 7, loss=0.5, epoch_loss=fuller), 101.0))
    assert not list(t.hears(beat(1, 6, loss=0.4, epoch_loss=newer), 101.1))
    left = ev.LeftRing(SECOND, RING, 7, True)
    assert list(t.hears(left, 101.2)) == [ev.Progress(RING, 7, 0.4, fuller), left]
    assert list(t.hears(left, 101.3)) == [left], "it has been told"


@pytest.mark.parametrize(
    "turn",
    [
        ev.Closed(SECOND, "its stream ended"),
        ev.Gone(SECOND, signal="SIGKILL"),
        ev.Failed(SECOND, "no"),
        ev.Live(2, 1, True, 1),
        ev.StopAsked("enough"),
    ],
)
def test_before_what_may_be_the_rings_last_moment_it_is_told_how_far_the_ring_is(turn: ev.Event) -> None:
    t = telemetry(0, 1)
    list(t.hears(beat(0, 1), 100.0))
    list(t.hears(beat(0, 5), 100.5))
    assert list(t.hears(turn, 101.0)) == [ev.Progress(RING, 5), turn]


def test_a_ring_that_stands_still_is_no_news() -> None:
    t = telemetry(0, 1, load_balancing="speed")
    assert list(t.hears(beat(0, 3, loss=0.5, speed=100.0), 100.0))
    assert not [e for i in range(60) for e in t.hears(beat(0, 3, loss=0.5, speed=100.0), 101.0 + i)]


WAITS: dict[str, Callable[[float], dict[str, Any]]] = {
    "waiting for servers": lambda seconds: {"waits": ServerWait(1, "Pull", seconds, "connection refused")},
    "waiting for records": lambda seconds: {"activity": Activity("waits for records: read(0, 64)", seconds)},
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_ring_stalls_from_its_last_step_until_the_next_if_a_member_waits(kind: str) -> None:
    t = telemetry(0, 1)
    assert list(t.hears(beat(0, 3), 100.0)) == [ev.Progress(RING, 3)]
    assert not list(t.hears(beat(0, 3, **WAITS[kind](0.4)), 101.0)), "a slow step"
    assert list(t.hears(beat(0, 3, **WAITS[kind](1.4)), 102.0)) == [ev.Stalled(RING, kind, 1.4)]
    assert not list(t.hears(beat(1, 3, **WAITS[kind](2.4)), 103.0)), "it is known"
    assert list(t.hears(beat(1, 4), 109.0)) == [ev.StallEnded(RING)]
    busy = Activity("is busy with step 5", 60.0)
    assert not [e for e in t.hears(beat(0, 4, activity=busy), 169.0) if isinstance(e, ev.Stalled)]


def test_a_member_that_waits_while_others_make_steps_does_not_stall_the_ring() -> None:
    t = telemetry(0, 1)
    list(t.hears(beat(0, 3), 100.0))
    told = [e for i in range(9) for e in t.hears(beat(0, 4 + i), 101.0 + i)]
    told += t.hears(beat(1, 3, waits=ServerWait(1, "Pull", 8.0)), 109.5)
    assert not [e for e in told if isinstance(e, ev.Stalled)]


def test_what_is_said_of_an_older_ring_or_of_none_is_no_progress() -> None:
    t = telemetry(0, 1)
    assert list(t.hears(beat(0, 3, generation=0, usage=Usage(7)), 100.0)) == []
    assert t.beats[FIRST].usage.memory == 7, "but it is shown"
    list(t.hears(beat(0, 9, generation=1), 100.0))
    list(t.hears(beat(0, 12, generation=1), 100.1))
    list(t.hears(beat(1, 4, generation=2), 100.2))
    assert not list(t.hears(beat(0, 13, generation=1), 100.3))
    assert t.ahead == ev.Progress(Generation(2), 4), "the new ring may have begun at an earlier step"


@pytest.mark.parametrize("load_balancing", ["none", "speed"])  # the report shows them in any case
def test_speeds_are_reported_when_they_have_changed(load_balancing: str) -> None:
    t = telemetry(0, 1, load_balancing=load_balancing)
    assert list(t.hears(beat(0, 1, speed=100.0), 100.0)) == [ev.Progress(RING, 1, speeds={FIRST: 100.0})]
    list(t.hears(beat(0, 2, speed=104.0), 101.0))
    list(t.hears(beat(1, 2, speed=50.0), 101.0))
    assert t.ahead == ev.Progress(RING, 2, speeds={SECOND: 50.0}), "104 is noise"
    list(t.hears(beat(0, 3, generation=2, speed=100.0), 102.0))
    list(t.hears(beat(1, 3, generation=2, speed=50.0), 102.0))
    assert t.ahead == ev.Progress(Generation(2), 3, speeds={SECOND: 50.0}), (
        "it has not been told in that ring"
    )


# --- silence


def test_who_is_silent_is_told_once_and_who_speaks_is_not() -> None:
    t = telemetry(0, 1)
    for tenth in range(40):
        assert t.passes(100.0 + tenth / 10) == []
        list(t.hears(beat(0, 1), 100.0 + tenth / 10))
    assert t.next_deadline() == 104.0
    assert t.passes(104.5) == [ev.Silent(SECOND, 4.5)]
    assert t.passes(105.0) == []
    assert t.next_deadline() == 107.9


def test_whoever_says_anything_is_not_silent() -> None:
    t = telemetry(0, 1)
    list(t.hears(beat(1, 1), 102.0))
    list(t.hears(ev.JoinedRing(FIRST, RING, 0), 103.0))
    list(t.hears(beat(1, 1), 104.0))
    assert t.passes(105.0) == []
    assert t.next_deadline() == 107.0


def test_only_who_has_got_ready_and_is_there_may_not_fall_silent() -> None:
    t = telemetry(0)
    list(t.hears(ev.Hello(SECOND), 100.0))
    list(t.hears(ev.Gone(FIRST, code=0), 101.0))
    assert t.next_deadline() is None
    assert FIRST not in t.beats


def test_nobody_is_blamed_for_silence_while_the_master_did_not_listen() -> None:
    t = telemetry(0, 1, at=20.0)
    list(t.hears(beat(0, 1), 22.0))
    assert t.next_deadline() == 24.0, "half of it is nothing unusual"
    assert t.passes(30.0) == [], "what they said meanwhile is still to be read"
    assert t.next_deadline() == 31.0
    list(t.hears(beat(1, 1), 30.2))
    (silent,) = t.passes(31.0)
    assert isinstance(silent, ev.Silent), "it had its moment more"
    assert silent.worker == FIRST and silent.seconds == pytest.approx(4.0)
    assert t.next_deadline() == 34.2


def test_words_that_end_a_stall_excuse_the_others_too() -> None:
    t = telemetry(0, 1, at=20.0)
    list(t.hears(beat(0, 1), 30.0))  # the first that is read
    assert t.passes(30.1) == []
    assert t.next_deadline() == 31.0


# --- in a job


def test_the_status_shows_what_the_core_has_not_been_told() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    loss = facts.EpochLoss(0, 60, 0.7)
    story.tell(beat(0, 2, loss=0.9))
    first = beat(0, 7, rate=30.0, loss=0.5, usage=Usage(5), epoch_loss=loss)
    story.tell(first, beat(1, 6, rate=20.0, loss=0.5))
    assert story.job.train is not None
    assert story.job.train.done == 1
    shown = view.status(story.job, story.now, story.telemetry.beats, story.telemetry.ahead)
    assert (shown["step"], shown["task"]["step"], shown["records"]["applied"]) == (7, 6, 60)
    assert (shown["loss"], shown["epoch_loss"], shown["rate"]) == (0.5, 0.7, 50.0)
    assert shown["eta_seconds"] == pytest.approx(40 / 50)
    assert [(w["step"], w["rate"], w["memory"]) for w in shown["workers"]] == [(7, 30.0, 5), (6, 20.0, 0)]
    story.kill(0)
    story.out(1, step=6, broken="reset")
    shown = view.status(story.job, story.now, story.telemetry.beats, story.telemetry.ahead)
    assert [(w["id"], w["step"], w["rate"]) for w in shown["workers"] if w["rank"] == 0] == [(1, 6, 0.0)]
    assert view.summary(story.job)["loss"] == 0.5


def test_a_worker_that_falls_silent_is_given_up_and_heartbeats_are_not_in_the_journal() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5, heartbeatTimeoutSeconds=3).running()
    effects = [e for _ in range(90) for e in (*story.beats(0, after=0.1), *story.waits(0.0))]
    fences = [e for _, _, done in story.watchdog.history for e in done if isinstance(e, ef.Fence)]
    assert [(f.worker, f.reason) for f in fences] == [(1, ef.FenceReason.HeartbeatTimeout)]
    assert only(effects, ef.Create).worker == 2, "a replacement is started"
    told = [event for _, event, _ in story.watchdog.history if isinstance(event, ev.Progress)]
    assert len(told) <= 2


# --- where all weights are on servers


def test_how_old_all_workers_weights_were_is_one_number_in_the_status_in_metrics_and_in_the_summary() -> None:
    story = Story(workers=3, mode="ps").running(0, 1, 2)
    form = story.job.ring.generation
    told = (Staleness(1000, 1.0, 7, 2), Staleness(10, 90.0, 99, 3), Staleness(400, 2.0, 3, 3))
    for worker, staleness in enumerate(told):
        story.tell(beat(worker, 4, form, staleness=staleness), after=PROGRESS_SECONDS)
    story.tell(beat(0, 5, form), after=PROGRESS_SECONDS)
    found = {"steps": 1410, "median": 1.0, "most": 99, "repeated": 3}
    assert view.summary(story.job)["staleness"] == view.summary(kept(story.job))["staleness"] == found
    status = view.status(story.job, story.now)
    assert status["staleness"] == found
    page = Metrics(lambda: status).page()[1].decode()
    assert "edl_staleness_median 1.0" in page and "edl_staleness_max 99.0" in page
    assert "edl_steps_repeated_total 3.0" in page
    assert display.staleness(view.summary(story.job)) == [
        "updates that the weights of the last 1,410 steps had missed: 1 (median), 99 (at most); "
        "3 steps came again"
    ]


def test_a_worker_that_waits_for_a_server_which_answers_the_master_is_told() -> None:
    story = Story(workers=1, mode="hybrid").running(0)
    beats = {FIRST: beat(0, 1, waits=ServerWait(1, "Push", 4.25))}
    said = view.status(story.job, story.now, beats)["waits"]
    assert said.startswith("worker 0 waits for parameter server 1 (Push: no answer for 4.2 s)")
    beats = {FIRST: beat(0, 1, waits=ServerWait(1, "Push", 4.25, "the log is full"))}
    assert view.status(story.job, story.now, beats)["waits"] == (
        "worker 0 waits for parameter server 1 (Push: tried again for 4.2 s): the log is full"
    )
    story.tell(ev.ServerAway(1, 4.0, "restarting"))
    assert view.status(story.job, story.now, beats)["waits"].startswith(
        "the ring waits for parameter server 1"
    )
