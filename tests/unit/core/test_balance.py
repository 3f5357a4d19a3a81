# SPDX-License-Identifier: Apache-2.0
"""How a step is divided over the members of a ring: `edl.master.core.balance`."""

from __future__ import annotations

import pytest

from edl.contract.ids import WorkerId
from edl.master.core import balance, facts
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.workers import WorkerRecord
from edl.master.telemetry import Telemetry
from tests.support.jobs.stories import Story, of, only


def members(*speeds: float) -> list[WorkerRecord]:
    return [WorkerRecord(WorkerId(i), 0.0, speed=speed) for i, speed in enumerate(speeds)]


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ((100.0,), (1,)),
        ((0.0, 0.0), (1, 1)),  # nothing is known yet
        ((100.0, 100.0, 100.0), (1, 1, 1)),
        ((100.0, 104.0, 97.0), (1, 1, 1)),  # noise
        ((100.0, 50.0), (20, 10)),
        ((50.0, 200.0, 100.0), (5, 20, 10)),
        ((100.0, 50.0, 0.0), (20, 10, 20)),  # a worker without a known speed has the median of the others
        ((100.0, 0.0), (1, 1)),
        ((100_000.0, 1.0), (20, 1)),  # every worker gets a share
    ],
)
def test_parts_are_even_for_those_alike_and_else_in_proportion_to_speed(
    speeds: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    assert balance.shares(members(*speeds), by_speed=True) == shares
    assert balance.shares(members(*speeds), by_speed=False) == (1,) * len(speeds)


def test_the_gain_is_how_much_faster_a_step_would_be() -> None:
    two = members(100, 50)
    assert balance.gain(two, (1, 1)) == pytest.approx(1.5)  # 1/2 at 50 a second, or 2/3 at 100
    assert balance.gain(two, (20, 10)) == pytest.approx(1.0)
    assert balance.gain(two, (10, 20)) == pytest.approx(2.0)
    assert balance.gain(members(100, 100), (20, 10)) == pytest.approx(4 / 3), "back to even"
    assert balance.gain(members(0, 0), (20, 10)) == 1.0, "nothing is known"
    assert balance.gain(two, (1, 1, 1)) == 1.0, "these parts are of another ring"


def test_what_the_shares_are_made_of_gains_nothing_more() -> None:
    for slow in range(5, 100, 3):
        found = members(100.0, float(slow), 90.0)
        assert balance.gain(found, balance.shares(found, by_speed=True)) == pytest.approx(1.0)


# --- in a job


def job_by(way: str, *, workers: int = 2) -> Story:
    """A running job with this `training.loadBalancing`."""
    story = Story(workers=workers, joinDelaySeconds=0.5)
    config = story.job.config
    training = config.training.model_copy(update={"load_balancing": way})
    story.job.config = config.model_copy(update={"training": training})
    story.telemetry = Telemetry(story.job.config)
    return story.running()


def beats(story: Story, *speeds: float, seconds: float, step: int = 1) -> list[ef.Effect]:
    """Members tell their speeds, in order, each second."""
    effects = []
    for _ in range(round(seconds)):
        generation, ring = story.job.ring.generation, story.job.ring.members
        for i, (w, speed) in enumerate(zip(ring, speeds, strict=True)):
            effects += story.tell(facts.Heartbeat(w, generation, step, speed=speed), after=0.0 if i else 1.0)
    return effects


def test_a_ring_whose_parts_fit_badly_is_left_at_a_step_boundary_once_it_has_settled() -> None:
    story = job_by("speed")
    assert story.job.ring.shares == (1, 1)
    assert not of(beats(story, 100, 50, seconds=8), ef.Leave), "it has not settled"
    effects = beats(story, 100, 50, seconds=4)
    assert only(effects, ef.Leave).members == (0, 1)
    assert not of(effects, ef.Cut)
    form = only(story.out(0, 1, step=4), ef.Form)
    assert (form.members, form.shares, form.sync) == ((0, 1), (20, 10), False)
    story.up(4)
    change = story.job.ring.changes[-1]
    assert (change.cause, change.planned) == ("parts by speed: 1.50 times as fast", True)


def test_it_is_not_done_again_and_again() -> None:
    story = job_by("speed")
    beats(story, 100, 50, seconds=balance.SETTLE_SECONDS + 1)
    story.out(0, 1, step=4)
    story.up(4)
    assert story.job.ring.generation == 2
    for speeds in ((100, 50), (104, 49), (95, 52), (100, 50)):  # measured with some noise
        assert not of(beats(story, *speeds, seconds=15, step=5), ef.Leave)


def test_when_the_slow_one_has_recovered_the_parts_are_even_again() -> None:
    story = job_by("speed")
    beats(story, 100, 50, seconds=balance.SETTLE_SECONDS + 1)
    story.out(0, 1, step=4)
    story.up(4)
    assert of(beats(story, 100, 100, seconds=balance.SETTLE_SECONDS + 1, step=5), ef.Leave)
    assert only(story.out(0, 1, step=6), ef.Form).shares == (1, 1)


def test_workers_alike_are_left_in_peace_and_so_is_who_did_not_ask_for_it() -> None:
    assert not of(beats(job_by("speed"), 100, 95, seconds=30), ef.Leave)
    story = job_by("none")
    assert not of(beats(story, 100, 10, seconds=30), ef.Leave)
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    story.ready(2)
    form = only(story.out(0, 1, step=4), ef.Form)
    assert form.shares == (1,) * len(form.members), "nor when a ring is formed anyhow"


def test_a_ring_that_is_formed_anyhow_has_the_parts_of_now_and_a_newcomer_the_middle() -> None:
    story = job_by("speed", workers=3)
    beats(story, 100, 50, 100, seconds=3)
    story.kill(2)
    form = only(story.out(0, 1, step=4, broken="reset"), ef.Form)
    assert (form.members, form.shares) == ((0, 1), (20, 10))
    story.up(4)
    story.ready(3)
    story.waits(0.6)
    form = only(story.out(0, 1, step=5), ef.Form)
    assert (form.members, form.shares) == ((0, 1, 3), (20, 10, 20))


def test_a_ring_that_is_not_up_yet_is_not_judged() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    training = story.job.config.training.model_copy(update={"load_balancing": "speed"})
    story.job.config = story.job.config.model_copy(update={"training": training})
    story.telemetry = Telemetry(story.job.config)
    story.ready(0, 1)
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 0))
    assert not of(beats(story, 100, 50, seconds=balance.SETTLE_SECONDS + 5), ef.Leave)
