# SPDX-License-Identifier: Apache-2.0
"""What a new master knows of the job's past, and reports of it: stories of the core."""

from __future__ import annotations

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, past, view
from edl.master.jobs import new_job
from tests.support.jobs.invariants import Watchdog
from tests.support.jobs.new_master import DATA, NewMaster, said
from tests.support.jobs.stories import Story, of


def test_with_what_the_job_has_begun_is_known_to_the_master_after_the_next_one() -> None:
    began = ev.WarmStarted(WorkerId(0), "the training begins with the weights of m.keras")
    first = NewMaster(0, next_id=1)
    first.tell(ev.Hello(WorkerId(0), resumes=True), began)
    second = NewMaster(0, next_id=1, began_with=first.job.notes.began_with)
    assert view.status(second.job, 0.0)["began_with"] == began.text
    assert view.summary(second.job)["began_with"] == began.text


def test_the_summary_covers_what_the_job_did_under_earlier_masters() -> None:
    """Seconds by hand: 0.03 starting, 40 of training, 5 re-forming, 15 of training, 20 without a master."""
    first = Story(workers=2, checkpoint={"dir": "d", "seconds": 1000}, joinDelaySeconds=0.5).running()
    ring = first.job.ring
    first.tell(ev.Warned(WorkerId(0), "the metric is not exact"))
    first.tell(ev.Evaluated(WorkerId(0), ring.generation, 3, "test", 50, {"loss": 0.5}))
    first.tell(ev.Checkpointed(WorkerId(0), 3, "a", 100))
    first.tell(ev.Failed(WorkerId(1), "ValueError: bad"), after=40.0)
    first.out(0, step=4, broken="reset")
    first.tell(*(ev.JoinedRing(m, ring.generation, 4) for m in ring.members), after=5.0)
    first.tell(*(ev.Stepped(m, ring.generation, 5, 5.0, 7, 0.0) for m in ring.members))
    first.tell(ev.Progress(ring.generation, 6), after=15.0)
    before = view.summary(first.job)
    (alone,) = ring.members
    active = first.now - 100.0 + 20.0

    second = Story(workers=2, checkpoint={"dir": "d", "seconds": 1000}, joinDelaySeconds=0.5)
    second.job = new_job(second.job.config)
    second.watchdog = Watchdog(second.job)
    adopted = ev.Adopted(
        ((alone, "pod"),), first.job.pool.next_id, active_seconds=active, past=past.of(first.job)
    )
    second.tell(adopted, ev.Begin(), ev.Hello(alone, resumes=True))
    second.tell(ev.Resume(alone, DATA, ring.generation, ring.members, False, True, None), after=2.0)
    g = second.job.ring.generation
    assert second.job.phase == "Training" and g == ring.generation == 2
    second.tell(ev.Evaluated(alone, g, 3, "test", 50, {"loss": 0.5}), ev.Progress(g, 10), after=10.0)
    second.out(alone, step=10, digest="d")
    second.tell(ev.Finished(alone, {}, "model.keras"), *(ev.Gone(w.id, code=0) for w in second.job.pool))
    found = view.summary(second.job)

    assert found["seconds"] == pytest.approx(active + 22.1, abs=0.2)
    goodput = found["goodput_seconds"]
    assert sum(goodput.values()) == pytest.approx(found["seconds"])
    assert goodput["re-forming"] == pytest.approx(5.0, abs=0.2), "the ring was kept, and trained on"
    assert goodput["useful"] == pytest.approx(40 + 15 + 20 + 22, abs=0.5)
    earlier = found["earlier_generations"]
    assert earlier["changes"] + len(found["generations"]) == 2
    assert (earlier["stall_seconds"], earlier["redone_records"]) == (5.0, 7)
    assert [(f["worker"], f["why"]) for f in found["failures"]] == [(1, "ValueError: bad")]
    for same in ("warnings", "state_losses", "evaluations"):
        assert found[same] == before[same], same
    assert found["warnings"] and found["evaluations"]["test"]["step"] == 3
    assert found["checkpoint"]["step"] == 3
    assert second.noticed(Reason.Evaluated) == [], "the first master has logged it"


def test_the_time_without_a_master_is_no_training_where_the_ring_is_lost() -> None:
    seconds = {"useful": 50.0, "starting": 10.0}
    new = NewMaster(0, 1, next_id=2, workers=2, past=facts.Past(seconds, "useful"), active_seconds=100.0)
    new.back(0, members=(0, 1))
    new.tell(ev.Gone(WorkerId(1), signal="SIGKILL"))
    goodput = new.job.goodput.at(new.now)
    assert goodput["useful"] == 50.0
    assert goodput["re-forming"] == pytest.approx(40.0, abs=0.1)
    assert sum(goodput.values()) == pytest.approx(view.status(new.job, new.now)["seconds"])
    idle = NewMaster(0, next_id=1, past=facts.Past({"suspended": 3.0}, "suspended"), active_seconds=10.0)
    assert idle.job.goodput.at(idle.now)["suspended"] == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize(
    ("known", "trained"),
    [(facts.Past({"starting": 100.0}, "useful"), 240), (None, 340)],
    ids=["since the start", "an earlier edl"],
)
def test_the_last_holder_is_worth_all_that_it_may_have_trained_without_a_master(
    known: facts.Past | None, trained: int
) -> None:
    new = NewMaster(0, 1, next_id=2, workers=2, past=known, active_seconds=340.0)
    new.back(0, members=(0, 1))
    new.tell(ev.Gone(WorkerId(1), signal="SIGKILL"))
    new.out(0, step=5, broken="reset")
    assert not of(new.tell(ev.Silent(WorkerId(0), 3.0), after=3.0), ef.Fence)
    assert f"({trained} s of training)" in str(view.status(new.job, new.now)["reason"])


def test_what_an_earlier_master_has_seen_counts_as_what_it_was() -> None:
    known = past.until(facts.Past({"starting": 10.0}, "useful"), 60.0)
    assert known.seconds == {"starting": 10.0, "useful": 50.0}
    assert past.until(known, 40.0) == known, "clocks differ"


def test_failures_under_earlier_masters_count_though_the_last_alone_are_known() -> None:
    known = facts.Past({}, "useful", failures=((WorkerId(8), "ValueError: bad"),), failure_count=30)
    new = NewMaster(0, next_id=9, past=known)
    assert view.status(new.job, new.now)["failures"] == past.of(new.job).failure_count == 30


def test_a_state_that_is_older_than_what_the_earlier_master_knew_of_is_told_as_a_loss() -> None:
    new = NewMaster(0, past=facts.Past({}, "useful", safe=7))
    effects = new.back(0, members=(0,), left=True, out=said(0, step=4))
    assert len(of(effects, ef.Form)) == 1
    (lost,) = [e.text for e in of(effects, ef.Notice) if e.reason is Reason.StateLost]
    assert lost.endswith("30 records of training are lost, the job goes on from step 4")


def test_a_step_of_a_worker_proves_the_one_before_to_a_new_master() -> None:
    """The earlier master may have heard of step 6, and its status ended before that."""
    new = NewMaster(0, 1, next_id=2, past=facts.Past({}, "useful", safe=2, generation=7, checkpoint=3))
    new.back(1, members=(0, 1), left=True, up=False, out=ev.LeftRing(WorkerId(1), Generation(7), 0, False))
    effects = new.back(0, members=(0, 1), left=True, out=said(0, step=7))
    assert of(effects, ef.Form)[0].root == 0
    effects = new.tell(
        ev.Gone(WorkerId(0), signal="SIGKILL"), ev.LeftRing(WorkerId(1), Generation(8), 0, False)
    )
    (lost,) = [e.text for e in of(effects, ef.Notice) if e.reason is Reason.StateLost]
    assert "40 records of training are lost, the job goes on from the checkpoint of step 3" in lost


@pytest.mark.parametrize(
    ("known", "lost"),
    [
        (None, "an unknown number of records of training are lost"),
        (facts.Past({}, "useful", generation=1), "an unknown number of records of training are lost"),
        (facts.Past({}, "useful", safe=7, generation=1), "at least 70 records of training are lost"),
        (facts.Past({}, "starting", generation=1), "an unknown number of records of training are lost"),
        (facts.Past({}, "waiting for workers", safe=7, generation=1), "70 records of training are lost"),
        (facts.Past({}, "starting"), ""),
    ],
)
def test_a_master_that_finds_no_worker_with_the_state_reports_that_as_a_loss(
    known: facts.Past | None, lost: str
) -> None:
    new = NewMaster(next_id=2, workers=1, past=known, active_seconds=60.0)
    effects = new.tell(ev.Hello(WorkerId(2)), ev.Ready(WorkerId(2), DATA))
    assert of(effects, ef.Form)
    told = [e.text for e in of(effects, ef.Notice) if e.reason is Reason.StateLost]
    gone, again = "every worker that held the state is gone: ", ", the job starts again from its first record"
    assert told == ([gone + lost + again] if lost else [])
    assert view.summary(new.job)["state_losses"] == len(told)
    assert new.job.goodput.kept >= 0.0


def test_a_job_whose_end_is_decided_is_not_trained_again_by_the_next_master() -> None:
    first = NewMaster(0, next_id=1, workers=1)
    first.back(0, members=(0,))
    first.out(0, step=10)
    first.tell(ev.Finished(WorkerId(0), {"loss": 0.5}, "model.keras", exports={"keras": "model.keras"}))
    assert first.job.ending is not None and not first.job.ended
    before = view.summary(first.job)
    second = NewMaster(next_id=1, workers=1, past=past.of(first.job))
    assert second.job.ended and second.job.phase == "Succeeded"
    assert not of(second.first, ef.Create)
    found = view.summary(second.job)
    for same in ("reason", "records", "task", "metrics", "model", "exports", "digests", "step"):
        assert found[same] == before[same], same


def test_a_saved_model_is_known_to_the_next_master_though_the_worker_that_saved_it_is_gone() -> None:
    first = NewMaster(0, next_id=1, workers=1)
    first.back(0, members=(0,))
    first.out(0, step=10)
    first.tell(ev.Saved(WorkerId(0), "model.keras"))
    second = NewMaster(next_id=1, workers=1, past=past.of(first.job))
    effects = second.tell(ev.Hello(WorkerId(1)), ev.Ready(WorkerId(1), DATA))
    assert not of(effects, ef.Form), "it is not trained again"
    assert second.job.reason.endswith("; the trained model is kept: model.keras")


def test_reports_that_come_again_count_once() -> None:
    first = NewMaster(0, 1, next_id=2, workers=2)
    first.back(0, members=(0, 1))
    first.back(1, members=(0, 1))
    g = Generation(7)
    reports = (
        ev.Stepped(WorkerId(0), g, 5, 5.0, 7, 0.0),
        ev.Warned(WorkerId(0), "the metric is not exact"),
        ev.WarmStarted(WorkerId(0), "m.keras"),
        ev.EpochEnded(WorkerId(0), g, 0, None),
    )
    first.tell(*reports)
    second = NewMaster(
        0, 1, next_id=2, workers=2, past=past.of(first.job), began_with=first.job.notes.began_with
    )
    second.back(0, members=(0, 1))
    effects = second.back(1, members=(0, 1)) + second.tell(*reports)
    effects += second.tell(
        ev.Stepped(WorkerId(1), g, 5, 4.0, 2, 0.0)
    )  # the first one died before it heard this
    assert not [e for e in of(effects, ef.Notice) if e.reason in (Reason.ModelWarning, Reason.WarmStarted)]
    assert past.of(second.job).redone_records == 9
    failed = ev.Failed(WorkerId(0), "ValueError: bad")
    second.tell(failed)
    third = NewMaster(0, 1, next_id=3, workers=2, past=past.of(second.job))
    third.back(0, members=(0, 1))
    third.tell(failed)
    assert third.job.failures.count == 1
