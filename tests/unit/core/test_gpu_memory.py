# SPDX-License-Identifier: Apache-2.0
"""Stories of workers whose GPU has too little memory: no worker is charged, and the job ends all the same."""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.jobs.stories import Story, only

WHY = "the GPU's memory is not enough: OOM"


def lacks(story: Story, worker: int) -> list[ef.Effect]:
    """The worker reports the error, and its process ends."""
    w = WorkerId(worker)
    effects = story.tell(ev.Failed(w, WHY, "the traceback", no_gpu_memory=True))
    return effects + story.tell(ev.Gone(w, code=1))


def test_a_worker_that_never_finds_memory_is_replaced_later_and_later_and_then_the_job_fails() -> None:
    story = Story(workers=1, maxFailures=2)
    for worker in range(3):
        assert story.job.ending is None
        story.tell(ev.Hello(WorkerId(worker)))
        lacks(story, worker)
        story.waits(30.0)
    assert story.job.ending == (
        Phase.Failed,
        f"3 workers in a row failed before the job made a step; the last: worker 2: {WHY}",
    )
    assert story.job.failures.traceback == "the traceback"
    assert story.job.failures.charged == [], "the user's code is not to blame"
    assert story.noticed(Reason.RestartBackOff) == [
        f"worker {n}: {WHY}; the next one starts in {s} s; "
        "the job fails when it happens 3 times without a step"
        for n, s in ((0, "1.0"), (1, "2.0"))
    ]


def test_a_job_that_trains_is_not_failed_by_a_worker_for_which_there_is_no_memory() -> None:
    story = Story(workers=2, maxFailures=2).running(0)
    generation, newcomer = story.job.ring.generation, 1
    for step in range(2, 8):
        story.tell(ev.Progress(generation, step))
        story.tell(ev.Hello(WorkerId(newcomer)))
        lacks(story, newcomer)
        story.beats(0)
        for _ in range(40):
            story.waits(1.0)
            story.beats(0)
        newcomer = max(w.id for w in story.job.pool)
    assert story.job.ending is None and story.job.ring.members == (0,)
    assert story.job.failures.charged == []


def test_a_lack_in_a_step_breaks_the_ring_and_costs_no_state() -> None:
    story = Story(workers=2, maxFailures=2, joinDelaySeconds=0.5).running()
    effects = lacks(story, 1)
    assert only(effects, ef.Cut).members == (0,)
    assert story.job.failures.charged == [] and story.job.ending is None
    assert only(story.out(0, step=4, broken="reset"), ef.Form).members == (0,)
