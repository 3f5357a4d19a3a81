# SPDX-License-Identifier: Apache-2.0
"""A master dies and the next one goes on with what its workers tell: stories of the core."""

from __future__ import annotations

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from tests.support.jobs.new_master import DATA, FAILOVER_SECONDS, PROMPT_SECONDS, NewMaster, said
from tests.support.jobs.stories import of


def workers(*numbers: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(n) for n in numbers)


def test_a_ring_that_is_whole_trains_on_and_is_told_its_task_anew() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    assert of(new.first, ef.Create) == []
    assert of(new.back(2) + new.back(0), ef.Train) == []
    effects = new.back(1)
    assert of(effects, ef.Train) == [ef.Train(Generation(7), workers(0, 1, 2), 1)]
    assert new.job.phase == "Training" and new.job.ring.up
    new.tell(ev.Progress(Generation(7), 4))
    assert not of(effects + new.tell(ev.Tick(), after=100), ef.Leave)
    assert new.job.train is not None and new.job.train.done == 3
    effects = new.tell(ev.Live(4, 1, False, 1), ev.Hello(WorkerId(3)), ev.Ready(WorkerId(3), DATA))
    assert of(effects, ef.Leave) == [ef.Leave(Generation(7), workers(0, 1, 2))], "as any other ring"
    (form,) = of(new.out(0, 1, 2), ef.Form)
    assert (form.generation, form.members, form.sync, form.joining) == (8, (0, 1, 2, 3), False, (3,))
    assert (new.job.train.done, form.layout) == (4, DATA)
    assert new.job.restarts == 0


def test_an_epoch_that_the_earlier_master_has_reported_is_not_reported_again() -> None:
    new = NewMaster(0, 1, 2, next_id=3, past=facts.Past({}, "useful", safe=12))  # epochs have 10 steps
    new.tell(ev.Live(3, 1, False, 3))
    for w in (0, 1, 2):
        new.back(w)
    told = of(new.tell(ev.Progress(Generation(7), 14), ev.Progress(Generation(7), 21)), ef.Notice)
    assert [n.text for n in told if n.reason is Reason.EpochApplied] == ["epoch 2 of 3 is applied"]


def test_a_member_that_is_lost_after_that_breaks_it_as_any_other_ring() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    for w in (0, 1, 2):
        new.back(w)
    assert of(new.tell(ev.Gone(WorkerId(1), signal="SIGKILL")), ef.Cut) == [
        ef.Cut(Generation(7), workers(0, 2))
    ]
    (form,) = of(new.out(0, 2, broken="cut"), ef.Form)
    assert (form.generation, form.members) == (8, (0, 2))


def test_a_ring_whose_parts_are_by_speed_is_left_at_a_step_boundary() -> None:
    new = NewMaster(0, 1, 2, next_id=3, load_balancing="speed")
    assert of([e for w in (0, 1, 2) for e in new.back(w)], ef.Leave) == [
        ef.Leave(Generation(7), workers(0, 1, 2))
    ]
    assert of(new.out(0, 1, 2), ef.Form)


def test_while_it_waits_for_the_ring_it_forms_nothing() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    effects = new.back(0) + new.tell(ev.Progress(Generation(7), 3))
    assert not of(effects, ef.Form) + of(effects, ef.Leave)


def test_a_member_that_does_not_come_back_is_given_up_and_the_ring_cut() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    new.back(0)
    new.back(2)
    assert new.job.next_deadline() is not None
    effects = new.tell(ev.Tick(), after=FAILOVER_SECONDS)
    assert of(effects, ef.Cut) == [ef.Cut(Generation(7), workers(0, 2))]
    assert of(effects, ef.Delete)[0].worker == 1
    (form,) = of(new.out(0, 2, broken="cut"), ef.Form)
    assert form.members == (0, 2)
    (create,) = of(new.tell(ev.Tick(), after=1.0), ef.Create)
    assert create.worker == 3, "ids go on"


def test_a_member_that_this_master_has_heard_before_is_given_up_sooner_than_one_that_must_look_for_it() -> (
    None
):
    new = NewMaster(0, 1, 2, 3, next_id=4, prompt=(0, 1))
    assert not of(new.tell(ev.Tick(), after=PROMPT_SECONDS), ef.Cut), (
        "no ring is known: worker 3 may be in it"
    )
    new.back(0)
    assert not of(new.tell(ev.Tick(), after=PROMPT_SECONDS), ef.Cut), "worker 2 looks for its master"
    effects = new.back(2)
    assert of(effects, ef.Cut) == [ef.Cut(Generation(7), workers(0, 2))]
    late = NewMaster(0, 1, 2, next_id=3, prompt=(0, 1))
    late.back(0)
    late.back(1)
    assert of(late.tell(ev.Tick(), after=FAILOVER_SECONDS), ef.Cut) == [ef.Cut(Generation(7), workers(0, 1))]


def test_a_member_whose_pod_is_gone_is_not_waited_for() -> None:
    new = NewMaster(0, 2, next_id=3)
    new.back(0)
    effects = new.back(2)
    assert of(effects, ef.Cut) == [ef.Cut(Generation(7), workers(0, 2))]


def test_a_ring_that_was_being_formed_is_called_off() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    new.back(0)
    new.back(1)
    effects = new.back(2, up=False)
    assert of(effects, ef.Cut) == [ef.Cut(Generation(7), workers(0, 1, 2))]


def test_who_comes_back_into_a_ring_that_was_called_off_before_is_told_so() -> None:
    new = NewMaster(0, 1, 2)
    new.back(0, up=False)
    assert of(new.tell(ev.Closed(WorkerId(0), "its stream ended")), ef.Cut) == [], "no worker is in it yet"
    assert of(new.back(1, up=False), ef.Cut) == []
    assert of(new.back(2, up=False), ef.Cut) == [ef.Cut(Generation(7), workers(1, 2))]


def test_a_ring_that_all_have_left_is_followed_by_the_next_one() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    new.back(0, left=True, out=said(0, step=5))
    new.back(1, left=True, out=said(1, step=4))
    (form,) = of(new.back(2, left=True, out=said(2, step=4)), ef.Form)
    assert (form.generation, form.root, bool(form.joining)) == (8, 0, True)


def test_one_whom_the_earlier_master_had_given_up_is_fenced_whoever_comes_first() -> None:
    for order in ((3, 0, 1, 2), (0, 1, 2, 3), (0, 3, 1, 2)):
        new, effects = NewMaster(0, 1, 2, 3, next_id=4, workers=4), []
        for w in order:
            effects += new.back(w, 5, (0, 1, 2, 3)) if w == 3 else new.back(w)
        assert [f.worker for f in of(effects, ef.Fence)] == [3]
        assert of(effects, ef.Train) == [ef.Train(Generation(7), workers(0, 1, 2), 1)]


def test_newcomers_wait_until_the_ring_is_known() -> None:
    new = NewMaster(0, 1, 2, next_id=3, workers=4)
    assert of(new.first, ef.Create) == [ef.Create(WorkerId(3))]
    effects = new.tell(ev.Hello(WorkerId(3)), ev.Ready(WorkerId(3), DATA))
    assert not of(effects, ef.Form), "it holds nothing: that would be a start from nothing"
    new.back(0)
    new.back(1)
    new.back(2)
    (form,) = of(new.out(0, 1, 2), ef.Form)
    assert form.members == (0, 1, 2, 3) and form.joining == (3,) and form.root == 0


def test_nothing_starts_anew_while_somebody_may_come_with_the_state() -> None:
    new = NewMaster(0, 1, next_id=2, workers=3)
    new.tell(ev.Hello(WorkerId(2)), ev.Ready(WorkerId(2), DATA))
    assert not of(new.tell(ev.Tick(), after=FAILOVER_SECONDS + 1), ef.Form)
    new.tell(ev.Progress(Generation(0), 0))
    new.tell(ev.Gone(WorkerId(1), signal="SIGKILL"))
    effects = new.back(0, 7, (0, 1))
    assert of(effects, ef.Cut) == [ef.Cut(Generation(7), workers(0))]


def test_nor_does_it_after_the_ring_that_was_found_has_died() -> None:
    new = NewMaster(0, 1, next_id=2)
    new.back(0, members=(0,))
    new.tell(ev.Hello(WorkerId(2)), ev.Ready(WorkerId(2), DATA))
    effects = new.tell(ev.Closed(WorkerId(0), "its stream ended"), ev.Tick(), after=FAILOVER_SECONDS + 1)
    assert of(effects, ef.Form) == [], "worker 1 has not come back yet"
    assert "may hold the state" in new.job.reason
    effects = new.tell(ev.Gone(WorkerId(1), 1, ""))
    assert [form.sync for form in of(effects, ef.Form)] == [True], "now no worker can"


def test_with_nobody_left_the_job_starts() -> None:
    new = NewMaster(next_id=5, workers=2)
    assert [c.worker for c in of(new.first, ef.Create)] == [5, 6]
    effects = [e for w in (5, 6) for e in new.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), DATA))]
    assert of(effects, ef.Form)


def test_workers_that_wait_for_room_are_waited_for_and_not_made_twice() -> None:
    new = NewMaster(0, 1, pending=(2,), next_id=3)
    assert of(new.first, ef.Create) == []
    new.back(0, 7, (0, 1))
    effects = new.back(1, 7, (0, 1))
    assert of(effects, ef.Train) and not of(effects, ef.Create)


def test_a_finished_state_is_exported_again() -> None:
    new = NewMaster(0, 1, next_id=2, workers=2)
    for w in (0, 1):
        out = ev.LeftRing(WorkerId(w), Generation(7), 10, True, digest="same")
        effects = new.back(w, 7, (0, 1), left=True, out=out)
    assert of(effects, ef.Export) == [ef.Export(WorkerId(0))]


def test_one_that_was_still_starting_just_starts() -> None:
    new = NewMaster(0, 1, next_id=2, workers=2)
    effects = []
    for w in (0, 1):
        effects += new.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), DATA))
    assert [f.generation for f in of(effects, ef.Form)] == [1]


def test_how_the_records_lie_is_as_the_first_one_says_who_is_back() -> None:
    new, told = NewMaster(0, next_id=1, workers=1), Layout(100, block=7, shards=64)
    out = said(0, step=4)
    effects = new.tell(
        ev.Hello(WorkerId(0), resumes=True),
        ev.Resume(WorkerId(0), told, Generation(7), (WorkerId(0),), left=True, joined=True, left_ring=out),
    )
    (form,) = of(effects, ef.Form)
    assert (form.layout, form.root, form.sync, form.epochs) == (told, 0, False, 1)


def test_other_epochs_while_a_ring_is_being_learned_of_are_the_next_rings() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    new.back(0, left=True, out=said(0))
    assert not of(new.tell(ev.Live(3, 1, False, 2)), ef.Train), "no reconnected worker is in it"
    new.back(1, left=True, out=said(1))
    (form,) = of(new.back(2, left=True, out=said(2)), ef.Form)
    assert (form.epochs, form.members) == (2, (0, 1, 2))


def test_a_ring_that_is_taken_over_may_be_about_to_move_rows_so_another_one_is_formed() -> None:
    new = NewMaster(0, next_id=1, workers=1, mode="ps")
    new.back(0, members=(0,))
    new.tell(ev.JoinedRing(WorkerId(0), Generation(7), 4, servers=1))
    effects = new.tell(ev.ServersReady(1, ("a:1", "b:1", "c:1")))
    assert of(effects, ef.Leave) and not of(effects, ef.Assigned), "it may be for all three"
    (form,) = of(new.out(0, step=5), ef.Form)
    assert form.servers == 1
    (assigned,) = of(new.tell(ev.JoinedRing(WorkerId(0), form.generation, 5, servers=1)), ef.Assigned)
    assert assigned == ef.Assigned(1, wanted=1)


def test_who_comes_back_twice_changes_nothing() -> None:
    new = NewMaster(0, 1, 2, next_id=3)
    for w in (0, 1, 2):
        new.back(w)
    before = new.job.ring.generation, new.job.ring.members
    effects = new.tell(ev.Resume(WorkerId(1), DATA, Generation(9), (), False, True, None))
    assert not of(effects, ef.Form) and before == (new.job.ring.generation, new.job.ring.members)
    assert new.job.stale == 1


def test_one_that_is_given_up_is_not_charged_for_ending() -> None:
    new = NewMaster(0, 1, 2, 3, next_id=4, workers=4)
    new.back(0)
    assert of(new.back(3, 5, (0, 1, 2, 3)), ef.Fence)
    new.tell(ev.Closed(WorkerId(3), "its stream ended"), ev.Gone(WorkerId(3), code=3))
    assert new.job.failures.charged == []


def test_a_ring_that_is_told_of_late_and_that_all_have_left_is_followed_by_another() -> None:
    new = NewMaster(0, 1, next_id=2, workers=2)
    new.tell(ev.Live(2, 2, False, 1))
    old = said(0, 4, 6, "worker 2 has died")
    new.back(0, 6, (0, 2), out=old, left=True)  # of the ring before: it had not heard of the last one
    assert new.job.failover.until is None
    none = ev.LeftRing(WorkerId(1), Generation(7), 0, False, broken="form: cut")
    (form,) = of(new.back(1, 7, (0, 1), up=False, out=none, left=True), ef.Form)
    assert (form.generation, form.members, form.root, form.step) == (8, (0, 1), 0, 4)


def test_a_worker_in_another_ring_of_the_same_number_is_no_member_of_this_one() -> None:
    new = NewMaster(0, 1, next_id=2, workers=2)
    new.tell(ev.Live(2, 1, False, 1))
    (form,) = of(new.back(0, 6, (0, 2), out=said(0, 4, 6, "cut"), left=True), ef.Form)
    assert (form.generation, form.members) == (7, (0,))
    (fence,) = of(new.back(1, 7, (1, 3), up=True), ef.Fence)
    assert (fence.worker, fence.reason) == (1, ef.FenceReason.OutdatedRing)


def test_a_new_master_compares_the_loss_of_a_new_worker_with_that_of_the_workers_it_has_taken_over() -> None:
    master = NewMaster(0, 1, next_id=2)
    for worker in 0, 1:
        w, members = WorkerId(worker), (WorkerId(0), WorkerId(1))
        loss = facts.SampleLoss(0.5, 0.01)
        resume = ev.Resume(w, DATA, Generation(7), members, False, True, None, sample_loss=loss)
        master.tell(ev.Hello(w, resumes=True), resume)
    master.tell(ev.Hello(WorkerId(2)), ev.Ready(WorkerId(2), DATA, sample_loss=facts.SampleLoss(0.7, 0.01)))
    (failure,) = master.job.failures.charged
    assert failure.why.startswith(
        "worker 2 computes a loss of 0.7 for the first records with fixed weights, "
        "workers 0 and 1 compute 0.5: "
    )


def leaving(new: NewMaster, worker: int, members: tuple[int, ...] = (0, 1)) -> list[ef.Effect]:
    """Let a member come back that had asked an earlier master to let it leave."""
    w, ring = WorkerId(worker), tuple(map(WorkerId, members))
    resume = ev.Resume(w, DATA, Generation(7), ring, False, True, None, leaving="SIGTERM")
    return new.tell(ev.Hello(w, resumes=True), resume)


@pytest.mark.parametrize("way", ["it says so", "its pod is being deleted", "both"])
def test_who_is_about_to_be_killed_hands_over_to_the_replacement_that_an_earlier_master_has_started(
    way: str,
) -> None:
    """The master was drained with its only workers; without checkpoints, no other worker holds the state."""
    new = NewMaster(0, 1, 2, 3, next_id=4, workers=2)
    if way != "it says so":
        new.tell(*(ev.Terminating(WorkerId(w), "its pod is being deleted") for w in (0, 1)))
    back = new.back if way == "its pod is being deleted" else lambda w, members: leaving(new, w, members)
    effects = [e for w in (0, 1) for e in back(w, members=(0, 1))]
    assert not of(new.first + effects, ef.Delete) + of(new.first + effects, ef.Stop), "they are no surplus"
    assert [new.job.pool[WorkerId(w)].state for w in (0, 1)] == ["draining", "draining"]
    assert of(effects, ef.Leave) == [ef.Leave(Generation(7), workers(0, 1))]
    for w in (2, 3):
        new.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), DATA))
    (form,) = of(new.out(0, 1), ef.Form)
    assert (form.root, form.members) == (0, (0, 2, 3)), "one of them transfers the state"
    assert new.job.restarts == 0


def test_a_worker_that_starts_in_a_pod_that_is_being_deleted_is_replaced_at_once() -> None:
    new = NewMaster(0, 1, next_id=2, workers=2)
    new.tell(ev.Terminating(WorkerId(1), "its pod is being deleted"))
    assert of(new.tell(ev.Hello(WorkerId(1))), ef.Create) == [ef.Create(WorkerId(2))]
