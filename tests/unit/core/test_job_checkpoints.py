# SPDX-License-Identifier: Apache-2.0
"""When the master has checkpoints written, what it does when one fails, and how a job goes on from one."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.core.checkpoints import HURRIED_SECONDS
from edl.master.rpc.checkpoint_parts import CheckpointParts
from tests.support.jobs.stories import Story, finish, of, only

SECONDS = 10.0


def a_story(workers: int = 2, least: int = 2, **checkpoint: Any) -> Story:
    """Its workers are never silent."""
    return Story(
        workers=workers,
        least=least,
        checkpoint={"dir": "d", "seconds": SECONDS, **checkpoint},
        heartbeatTimeoutSeconds=10**6,
    )


def until_ordered(story: Story, most: float = 100.0) -> float:
    """After how many seconds the next one is ordered."""
    began = story.now
    while not of(story.waits(0.5), ef.Checkpoint):
        assert story.now - began < most, "none is ordered"
    return story.now - began


def parts(story: Story, step: int, last: int = 0, attempt: str = "a") -> list[ef.Effect]:
    return story.tell(ev.PartsWritten(WorkerId(last), step, attempt, story.job.ring.members))


def whole(story: Story, step: int, worker: int = 0, attempt: str = "a") -> list[ef.Effect]:
    return story.tell(ev.Checkpointed(WorkerId(worker), step, attempt, 1 << 20))


def test_one_is_due_after_so_many_seconds_and_the_one_who_was_last_finishes_it() -> None:
    story = a_story().running()
    assert not of(story.waits(SECONDS - 1), ef.Checkpoint)
    assert only(story.waits(1.1), ef.Checkpoint) == ef.Checkpoint(Generation(1), WorkerId(0))
    assert only(parts(story, 3, last=1), ef.Commit) == ef.Commit(WorkerId(1), 3, "a")
    whole(story, 3, worker=1)
    assert story.noticed(Reason.Checkpointed) == ["the checkpoint of step 3 is in d (1.0 MiB)"]
    story.waits(2)
    status = view.status(story.job, story.now)["checkpoint"]
    assert status["step"] == 3 and 2 <= status["seconds_ago"] < 3
    whole(story, 4)
    assert len(story.noticed(Reason.Checkpointed)) == 1, "only the first one is reported"


def test_they_are_whole_as_often_as_people_want_though_writing_takes_a_while() -> None:
    story = a_story().running()
    story.waits(SECONDS)
    for step in range(3, 9):
        story.waits(2)
        parts(story, step)
        whole(story, step)
        assert until_ordered(story) <= SECONDS - 4 + 0.6


def test_without_a_directory_there_are_none_and_the_job_says_so_before_it_begins() -> None:
    story = Story(workers=2)
    (told,) = story.noticed(Reason.CheckpointsOff)
    assert "training restarts from scratch" in told
    story.running()
    assert not of(story.waits(1000), ef.Checkpoint)
    story.tell(ev.CheckpointAsked())
    assert "no checkpoint is written" in story.noticed(Reason.SpecRefused)[0]
    assert view.status(story.job, story.now)["checkpoint"] is None


def test_people_may_ask_for_one_also_where_time_makes_none() -> None:
    story = a_story(seconds=0).running()
    assert not of(story.waits(1000), ef.Checkpoint)
    assert only(story.tell(ev.CheckpointAsked()), ef.Checkpoint).worker == 0


def test_a_failing_store_is_told_and_tried_again_later_and_later_and_the_training_goes_on() -> None:
    story = a_story().running()
    story.waits(SECONDS)
    pauses = []
    for attempt in "abcd":
        why = "d: cannot write the checkpoint of step 3: No space left on device"
        story.tell(ev.CheckpointFailed(WorkerId(0), 3, attempt, why))
        story.tell(ev.CheckpointFailed(WorkerId(1), 3, attempt, why))  # of the same attempt: one failure
        pauses.append(round(until_ordered(story)))
    assert pauses == [10, 20, 40, 80]
    (degraded,) = story.job.notes.degraded.items()
    assert degraded[0] == "writing checkpoints" and degraded[1].endswith(
        "the training goes on, no checkpoint exists"
    )
    assert story.job.phase == "Training"
    parts(story, 9)
    whole(story, 9)
    assert not story.job.notes.degraded
    assert story.noticed(Reason.Recovered) == ["writing checkpoints works again"]


@pytest.mark.parametrize("step", [8, 9])
def test_one_that_comes_to_nothing_when_one_as_new_is_whole_is_no_failure(step: int) -> None:
    story = a_story().running()
    whole(story, 9)
    assert not of(parts(story, step, attempt="late"), ef.Commit)
    story.tell(ev.CheckpointFailed(WorkerId(0), step, "late", "its parts are gone"))
    assert not story.job.notes.degraded


def test_when_who_is_to_finish_it_is_lost_another_writer_does() -> None:
    story = a_story(workers=3).running()
    story.waits(SECONDS)
    assert only(parts(story, 3, last=1), ef.Commit).worker == 1
    assert only(story.kill(1), ef.Commit) == ef.Commit(WorkerId(0), 3, "a")
    whole(story, 3)
    assert not of(story.kill(0), ef.Commit), "it is finished"


def test_what_was_under_way_in_a_ring_that_broke_is_asked_for_as_soon_as_the_next_is_up() -> None:
    story = a_story(workers=3).running()
    story.waits(SECONDS)
    story.kill(2)
    story.out(0, 1, broken="worker 2 has died")
    assert only(story.up(step=1), ef.Checkpoint) == ef.Checkpoint(story.job.ring.generation, WorkerId(0))


def test_when_everything_is_gone_the_job_goes_on_from_the_newest_one_and_tells_what_is_lost() -> None:
    story = a_story().running()
    story.waits(SECONDS)
    whole(story, 4)
    story.tell(ev.Progress(Generation(1), 8))
    story.kill(0)
    story.kill(1)
    story.waits(60)
    effects = story.tell(*[e for w in (2, 3) for e in _ready(w, checkpoint=4)])
    form = only(effects, ef.Form)
    assert form.sync and form.step == 4
    assert story.noticed(Reason.StateLost) == [
        "every worker that held the state is gone: 30 records of training are lost, the job goes on from the "
        "checkpoint of step 4"
    ]
    story.up(step=4)
    assert story.noticed(Reason.Restored) == ["the state of step 4 is restored from d"]
    assert story.job.train is not None and story.job.train.done == 4
    assert view.status(story.job, story.now)["records"]["applied"] == 40


def test_what_the_root_has_read_is_the_truth() -> None:
    story = a_story().running()
    whole(story, 6)
    story.tell(ev.Progress(Generation(1), 8))
    story.kill(0)
    story.kill(1)
    story.waits(60)
    story.tell(*[e for w in (2, 3) for e in _ready(w, checkpoint=6)])
    story.up(step=2)  # the one of step 6 is damaged
    assert story.job.train is not None and story.job.train.done == 2
    assert of(parts(story, 4, last=2), ef.Commit), "it is newer than what there is"
    assert [text.split(": ")[1].split(" records")[0] for text in story.noticed(Reason.StateLost)] == [
        "10",
        "40",
    ]


def test_a_checkpoint_that_is_completed_while_the_root_reads_an_earlier_one_is_the_newest() -> None:
    story = a_story().running()
    whole(story, 4)
    story.waits(SECONDS)
    assert of(parts(story, 6, last=1, attempt="b"), ef.Commit)
    story.kill(0)
    story.kill(1)
    story.waits(60)
    story.tell(*[e for w in (2, 3) for e in _ready(w, checkpoint=4)])
    whole(story, 6, worker=2, attempt="b")  # it was under way
    story.up(step=4)
    assert story.job.train is not None and (story.job.train.done, story.job.checkpoints.step) == (4, 6)
    story.kill(2)
    story.kill(3)
    story.waits(60)
    form = only(story.tell(*[e for w in (4, 5) for e in _ready(w, checkpoint=4)]), ef.Form)
    assert form.step == 6


def test_a_job_that_resumes_begins_where_the_other_one_has_ended() -> None:
    story = a_story()
    (form,) = of([e for w in (0, 1) for e in story.tell(*_ready(w, checkpoint=6))], ef.Form)
    assert form.step == 6 and not story.noticed(Reason.StateLost)
    story.up(step=6)
    assert story.job.train is not None and story.job.train.done == 6


def test_what_was_forced_is_told_once_and_stays_in_the_summary_and_in_how_the_job_ends() -> None:
    words = "training.seed 1 -> 9 at step 6"
    story = a_story()
    for w in (0, 1):
        story.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), Layout(100), checkpoint=6, forced=(words,)))
    story.up(step=6)
    finish(story)
    story.tell(ev.Finished(WorkerId(0), {}, "model.keras"))
    assert story.noticed(Reason.IncompatibleResume) == [f"forced: {words}"]
    assert story.job.reason.endswith(f"exactly once; forced: {words}")
    assert view.summary(story.job)["forced"] == [words]


def test_a_state_that_is_complete_is_read_in_a_ring_before_it_is_saved() -> None:
    story = a_story()
    effects = [e for w in (0, 1) for e in story.tell(*_ready(w, checkpoint=10))]
    assert only(effects, ef.Form).step == 10 and not of(effects, ef.Export)
    story.up(step=10)
    assert only(story.out(0, 1, step=10, digest="same"), ef.Export).worker == 0


def test_the_core_hears_of_parts_once_all_are_there_and_the_order_has_them_in_their_order() -> None:
    heard = CheckpointParts()
    parts_ = [
        pb.CheckpointPart(step=3, attempt="a", index=i, of=3, name=f"part {i}", state=bytes([i // 2]))
        for i in range(3)
    ]
    told = [pb.FromWorker(generation=9, checkpoint_part=part) for part in parts_]
    assert heard.hear(WorkerId(5), told[2]) is None
    assert heard.hear(WorkerId(5), told[2]) is None, "said twice"
    assert heard.hear(WorkerId(4), told[0]) is None
    done = heard.hear(WorkerId(7), told[1])
    writers = WorkerId(4), WorkerId(7), WorkerId(5)
    assert done == ev.PartsWritten(WorkerId(7), 3, "a", writers, 9, (("00", 2), ("01", 1)))
    order = heard.order(ef.Commit(WorkerId(7), 3, "a"))
    assert order is not None
    assert [part.name for part in order.commit_checkpoint.parts] == ["part 0", "part 1", "part 2"]
    assert CheckpointParts().order(ef.Commit(WorkerId(7), 3, "a")) is None, "another master has heard of them"


def _ready(worker: int, checkpoint: int) -> list[ev.Event]:
    w = WorkerId(worker)
    return [ev.Hello(w), ev.Ready(w, Layout(100), checkpoint=checkpoint)]


def test_a_job_that_is_scaled_to_zero_keeps_its_last_state_and_lets_all_go() -> None:
    story = a_story().running()
    assert only(story.tell(ev.Scale(0)), ef.Leave).members == (0, 1)
    effects = story.out(0, 1, step=5)
    assert only(effects, ef.WriteCheckpoint).worker == 0
    assert not of(effects, ef.Stop) and not of(effects, ef.Form)
    effects = whole(story, 5, attempt="alone")
    assert [e.worker for e in of(effects, ef.Stop)] == [0, 1]
    for worker in range(2):
        story.tell(ev.Closed(WorkerId(worker), "its stream ended"), ev.Gone(WorkerId(worker), code=0))
    status = view.status(story.job, story.now)
    assert (status["phase"], status["reason"]) == (
        "Suspended",
        "suspended: workers is 0; the job goes on once it is greater",
    )
    assert story.job.goodput.kind == "suspended"
    story.tell(ev.Scale(2))
    assert story.job.phase == "Waiting"
    story.ready(2, 3)
    story.tell(*(ev.JoinedRing(WorkerId(w), Generation(2), 5) for w in (2, 3)))
    assert story.noticed(Reason.Restored) and not story.noticed(Reason.StateLost)


def test_the_last_state_is_kept_by_another_one_or_tried_again() -> None:
    story = a_story().running()
    story.tell(ev.Scale(0))
    assert only(story.out(0, 1, step=5), ef.WriteCheckpoint).worker == 0
    assert only(story.kill(0), ef.WriteCheckpoint).worker == 1
    failed = ev.CheckpointFailed(WorkerId(1), 5, "alone", "No space left on device")
    assert not of(story.tell(failed), ef.WriteCheckpoint), "not at once"
    assert not of(story.waits(SECONDS - 1), ef.Stop)
    assert only(story.waits(2), ef.WriteCheckpoint).worker == 1
    assert only(whole(story, 5, worker=1, attempt="alone2"), ef.Stop).worker == 1


@pytest.mark.parametrize(
    "to_zero", [ev.Scale(0), ev.Live(0, 2, False, 1)], ids=["edl scale 0", "helm upgrade --set workers=0"]
)
def test_without_checkpoints_a_job_of_zero_workers_is_suspended_and_one_worker_keeps_the_state(
    to_zero: ev.Event,
) -> None:
    story = a_story(dir="").running()
    effects = story.tell(to_zero)
    assert only(effects, ef.Leave).members == (0, 1)
    effects = story.out(0, 1, step=5) + story.waits(1)
    assert not of(effects, ef.WriteCheckpoint) and not of(effects, ef.Form)
    assert [e.worker for e in of(effects, ef.Stop)] == [1]
    status = view.status(story.job, story.now)
    assert (status["phase"], status["target"]) == ("Suspended", 0)
    assert status["reason"] == (
        "suspended: workers is 0. The job writes no checkpoints (checkpoint.dir is empty), so one worker "
        "keeps the state"
    )
    story.tell(ev.Closed(WorkerId(1), "its stream ended"), ev.Gone(WorkerId(1), code=0))
    story.tell(ev.Scale(2))
    form = only(story.ready(2, 3), ef.Form)
    assert (form.root, form.step) == (0, 5) and set(form.members) > {0}
    assert not story.noticed(Reason.StateLost)


def test_one_is_due_at_once_and_then_often_when_all_who_hold_the_state_are_to_go() -> None:
    story = a_story().running()
    assert not of(story.tell(ev.Leaving(WorkerId(0), "SIGTERM")), ef.Checkpoint)
    assert only(story.tell(ev.Leaving(WorkerId(1), "SIGTERM")), ef.Checkpoint).worker == 0
    assert not of(story.waits(1), ef.Checkpoint), "not a second one beside the first"
    whole(story, 3)
    assert until_ordered(story) <= HURRIED_SECONDS + 0.5
    story.tell(ev.CheckpointFailed(WorkerId(0), 4, "a", "No space left on device"))
    assert until_ordered(story) >= SECONDS - 0.5, "a failing store is not hurried"
