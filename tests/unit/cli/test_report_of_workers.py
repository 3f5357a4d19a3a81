# SPDX-License-Identifier: Apache-2.0
"""The report's stragglers, parameter servers, and hours of workers: compared with the events of the job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core import view
from edl.report import hours, reading, write
from edl.report.pace import Paces
from edl.report.servers import ServerState
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story
from tests.unit.cli.test_report import Page, lines_of

FAST, SLOW = WorkerId(0), WorkerId(1)


def page_of(output: Path) -> tuple[str, Page]:
    text = write.html(output, artifacts.read_summary(output))
    return text, Page(text)


# --- stragglers


def test_the_fast_worker_waits_for_the_slow_one(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()  # 5 of the 10 records of a step each
    story.tell(ev.Progress(story.job.ring.generation, 8, speeds={FAST: 1000.0, SLOW: 250.0}))
    keep(story, tmp_path)
    found = reading.read(tmp_path).paces
    assert (found[FAST].steps, found[SLOW].steps) == (8, 8)
    assert (found[FAST].own, found[FAST].waited) == pytest.approx((8 * 0.005, 8 * 0.015))
    assert (found[SLOW].own, found[SLOW].waited) == pytest.approx((8 * 0.02, 0.0))
    text, page = page_of(tmp_path)
    assert "Slowest: worker 1 computes for 20.0 ms a step, 4.00 times the median" in text
    shown = [rows[1:] for rows in page.tables if "own (ms)" in rows[0]]
    assert shown == [
        [["1", "1", "8", "20.00", "0.00", "0"], ["0", "0", "8", "5.00", "15.00", "75"]],
    ]


def test_steps_count_with_the_speeds_and_the_shares_of_their_time() -> None:
    paces = Paces()
    paces.form((0, 1), (1, 1), 100, 0)
    paces.reach(10, {0: 100.0})
    paces.reach(20, {1: 50.0})  # only now both are known: for all steps so far
    paces.reach(30, {1: 100.0})  # the ten steps before were made at the earlier speed
    paces.form((0, 1, 2), (1, 1, 2), 100, 30)  # the speed of worker 2 is never known: it may be the slowest
    paces.reach(90, {})
    paces.form((1,), (1,), 100, 90)  # a worker alone waits for none
    paces.reach(99, {})
    paces.settle()
    assert {worker: pace.steps for worker, pace in paces.by_worker.items()} == {0: 30, 1: 30}
    assert paces.by_worker[0].waited == pytest.approx(30 * 0.5)
    assert paces.by_worker[1].own == pytest.approx(30 * 1.0)


def test_a_job_without_speeds_has_no_stragglers(tmp_path: Path) -> None:
    keep(Story(workers=2).running(), tmp_path)
    text, _ = page_of(tmp_path)
    assert "Stragglers" not in text


# --- parameter servers


def test_servers_have_the_outages_of_the_journal(tmp_path: Path) -> None:
    story = Story(workers=1, mode="hybrid", ps={"servers": 2})
    story.tell(ev.ServerListens(0, 1.0, again=False), ev.ServerListens(1, 1.0, again=False))
    story.running()
    story.waits(5)
    story.tell(ev.ServerAway(1, 2.0, "not answering"))
    story.waits(1)
    story.tell(ev.ServerExited(1, "SIGKILL"))
    story.waits(3)
    story.tell(ev.ServerListens(1, 3.0, again=True))
    keep(story, tmp_path)
    first, second = reading.read(tmp_path).servers.values()
    assert [state for state, _, _ in first.intervals] == [ServerState.ANSWERS] and not first.unavailable
    states = [ServerState.ANSWERS, ServerState.NOT_ANSWERING, ServerState.RESTARTING, ServerState.ANSWERS]
    assert [state for state, _, _ in second.intervals] == states
    assert all(before[2] == after[1] for before, after in pairwise(second.intervals))
    assert second.unavailable == pytest.approx([2 + 1 + 3], abs=0.1)
    text, page = page_of(tmp_path)
    assert "2 parameter servers, 1 outage; the longest one lasted 6.0 s." in text
    assert [row[:5] for row in page.rows("server")] == [
        ["0", "answers", "0", "", "0"],
        ["1", "answers", "1", "SIGKILL", "1"],
    ]
    loads = [{"index": 0, "rows": 700, "share": 0.25}, {"index": 1, "rows": 900, "share": None}]
    running = Page(write.html(tmp_path, view.status(story.job, story.now) | {"servers": loads}))
    assert [row[-2:] for row in running.rows("server")] == [["700", "25"], ["900", ""]]


# --- hours and cost


def test_the_hours_of_workers_are_their_lives_and_cost_what_they_cost(tmp_path: Path) -> None:
    story = whole_story()
    story.values["report"]["pricePerWorkerHour"] = 7200.0  # 2 a second
    keep(story, tmp_path)
    seen: dict[int, float] = {}
    gone: dict[int, float] = {}
    for line in lines_of(tmp_path):
        event = line["event"]
        if event["type"] in ("Seen", "Hello", "Ready"):
            seen.setdefault(event["worker"], line["now"])
        elif event["type"] in ("Gone", "Closed"):
            gone.setdefault(event["worker"], line["now"])
    lives = sum(gone[worker] - seen[worker] for worker in seen)
    found = reading.read(tmp_path)
    seconds = hours.worker_seconds(found)
    assert sum(seconds.values()) == pytest.approx(lives)
    # The ring changed while its members made no step: that is no useful time.
    assert all(seconds[kind] > 0 for kind in ("useful", "re-forming", "waiting to join")), seconds
    text, page = page_of(tmp_path)
    assert f"costs {2 * lives:,.2f} at 7200 an hour (report.pricePerWorkerHour)" in text
    (costs,) = [rows[1:] for rows in page.tables if rows[0][-1] == "cost"]
    assert {row[0]: float(row[-1]) for row in costs} == pytest.approx(
        {kind: 2 * s for kind, s in seconds.items()}, abs=0.01
    )


def test_a_worker_that_was_never_placed_costs_nothing(tmp_path: Path) -> None:
    story = Story(workers=2)
    story.ready(0)
    story.waits(2)
    keep(story, tmp_path)
    found = reading.read(tmp_path)
    assert found.workers[1].runs_since is None
    alone = found.workers[0].runs_since
    assert alone is not None
    assert sum(hours.worker_seconds(found).values()) == pytest.approx(found.ends - alone)
    text = write.html(tmp_path, view.status(story.job, story.now))
    assert "with report.pricePerWorkerHour also what it costs" in text
