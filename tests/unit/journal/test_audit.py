# SPDX-License-Identifier: Apache-2.0
"""`edl audit` on the journals of stories. (What a forger changes: test_damaged_journals.py.)"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edl import config
from edl.checkpoints import Checkpoint, Store
from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.journal import audit
from edl.journal.format import JournalDamaged
from edl.journal.proof import AuditFailed, JournalProof
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, past, view
from edl.master.jobs import new_job
from tests.support.checkpoints.checkpoints import write
from tests.support.jobs.invariants import Watchdog
from tests.support.jobs.journals import keep
from tests.support.jobs.stories import Story, only

FIRST = WorkerId(0)


def verdict(
    story: Story,
    output: Path,
    *,
    steps: int = 10,
    worker: int = 0,
    skipped: RangeSet | None = None,
    bad: dict[int, int] | None = None,
) -> str:
    """Trains what is left of the story with the ring that is, ends it, and audits its journal."""
    generation, members = story.job.ring.generation, story.job.ring.members
    story.tell(*(ev.JoinedRing(w, generation, story.job.train.done) for w in members))
    story.tell(ev.Progress(generation, steps))
    for w in members:
        skips = skipped or RangeSet()
        story.tell(ev.LeftRing(w, generation, steps, True, skips, digest="d", bad=bad or {}))
    return saved(story, output)


def saved(story: Story, output: Path) -> str:
    story.tell(ev.Finished(story.exporter, {}, ""), *(ev.Gone(w.id, code=0) for w in story.job.pool))
    keep(story, output)
    return audit.audit(output)


def live(story: Story, epochs: int) -> list[ef.Effect]:
    return story.tell(ev.Live(story.job.target, story.job.min_size, story.job.suspended, epochs))


def a_story_with_a_death() -> Story:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 4))
    story.kill(1)
    story.out(0, step=4, broken="reset")
    return story


def test_a_job_that_went_well_has_a_verdict_in_one_line(tmp_path: Path) -> None:
    assert verdict(a_story_with_a_death(), tmp_path).startswith(
        "exactly once: 100 records x 1 epoch in 10 steps, 2 rings; 1 worker ended with the same weights; "
        "the journal ends with "
    )


@pytest.mark.parametrize(
    ("script", "compared", "expected"),
    [
        ("/train.py", 5, "not proved: 1 time the training went on from a worker that had received the state"),
        ("/train.py", 6, "exactly once: 100 records x 1 epoch in 10 steps, 4 rings"),
        ("", 5, "exactly once: 100 records x 1 epoch in 10 steps, 4 rings"),
    ],
    ids=["a loop, killed before its second step", "a loop, killed after it", "a Keras model"],
)
def test_a_loop_that_goes_on_from_a_worker_that_was_never_compared_has_no_certificate(
    tmp_path: Path, script: str, compared: int, expected: str
) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5, model={"script": script} if script else {}).running()
    story.tell(ev.Progress(story.job.ring.generation, 4))
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.ready(2)
    story.waits(1.0)
    form = only(story.out(0, step=4), ef.Form)
    assert (form.members, form.root) == ((0, 2), 0)
    for worker in form.members:
        story.tell(ev.JoinedRing(worker, form.generation, 4))
    story.tell(ev.Progress(form.generation, compared))
    story.kill(0)
    (alone,) = only(story.out(2, step=compared, broken="reset"), ef.Form).members
    assert alone == 2
    assert verdict(story, tmp_path, worker=2).startswith(expected)


def test_a_beat_of_a_ring_whose_state_was_lost_is_no_news(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(Generation(1), 5))
    story.kill(0)
    story.kill(1)
    story.ready(2, 3)
    story.up()
    story.tell(ev.Progress(Generation(1), 5))  # it was on its way
    story.kill(3)
    only(story.out(2, step=2, broken="reset"), ef.Form)
    told = verdict(story, tmp_path, worker=2)
    assert told.startswith("exactly once: 100 records x 1 epoch in 10 steps, 3 rings; 1 worker ended with")
    assert "the newest state was lost once and training went on from what was left" in told


@pytest.mark.parametrize(("restored", "losses"), [(5, 0), (3, 1)])
def test_a_ring_that_begins_with_a_checkpoint_has_lost_what_that_lacks(
    restored: int, losses: int, tmp_path: Path
) -> None:
    """A job that is scaled to 0 and back begins with its last checkpoint, or with an older one."""
    story = Story(workers=2, checkpoint={"dir": "d"}, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 6), ev.Checkpointed(FIRST, 3, "a", 1))
    story.tell(ev.Scale(0))
    story.out(0, 1, step=5)
    if restored == 5:
        story.tell(ev.Checkpointed(FIRST, 5, "alone", 1))
    story.kill(0)
    story.kill(1)
    story.tell(ev.Scale(1))
    only(story.ready(2), ef.Form)
    story.up(restored)
    told = verdict(story, tmp_path, worker=2)
    assert ("the newest state was lost once" in told) == (losses == 1)
    assert view.summary(story.job)["state_losses"] == losses


def test_bad_records_are_told_with_how_many_nobody_has_named(tmp_path: Path) -> None:
    story = Story(workers=2, records=100).running()
    story.tell(ev.BadRecords(FIRST, story.job.ring.generation, 0, {7: "KeyError: 'label'", 31: "it is bad"}))
    told = verdict(story, tmp_path, bad={0: 3})
    assert told.startswith("exactly once, except 3 bad records, 1 of them unnamed: 100 records")


def test_a_state_that_is_older_than_what_all_had_is_gone_on_from_only_where_that_is_told(
    tmp_path: Path,
) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"), ev.Leaving(WorkerId(1), "SIGTERM"))
    form = only(story.out(0, 1, step=4), ef.Form)
    (alone,) = form.members
    story.tell(ev.JoinedRing(alone, form.generation, 4), ev.Progress(form.generation, 8))
    (other,) = only(story.kill(alone), ef.Form).members
    told = verdict(story, tmp_path, worker=other)
    assert "the newest state was lost once and training went on from what was left" in told


def test_skipped_steps_are_told_in_records(tmp_path: Path) -> None:
    story = Story(workers=2, records=95, joinDelaySeconds=0.5).running()
    told = verdict(story, tmp_path, skipped=RangeSet(((2, 4), (9, 10))))
    assert told.startswith("exactly once, except 25 skipped records (non-finite): 95 records x 1 epoch")


def test_more_epochs_while_the_job_runs_are_all_to_be_trained(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    live(story, 3)
    assert verdict(story, tmp_path, steps=30).startswith("exactly once: 100 records x 3 epochs in 30 steps")


def test_fewer_epochs_than_have_begun_are_those_that_have_begun(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    live(story, 3)
    story.tell(ev.Progress(story.job.ring.generation, 14))
    live(story, 1)
    assert verdict(story, tmp_path, steps=20).startswith("exactly once: 100 records x 2 epochs in 20 steps")


def test_epochs_that_the_master_refused_are_not_missing(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    only(story.out(0, 1, step=10, digest="d"), ef.Export)
    live(story, 4)
    assert saved(story, tmp_path).startswith("exactly once: 100 records x 1 epoch in 10 steps")


def test_a_master_that_takes_over_has_the_epochs_of_now(tmp_path: Path) -> None:
    """The first one began with 1 epoch and heard of 2; the second one began with 2."""
    first = Story(workers=1, joinDelaySeconds=0).running()
    live(first, 2)
    keep(first, tmp_path)
    second = Story(workers=1, joinDelaySeconds=0)
    second.values = values.merge(second.values, {"training": {"epochs": 2}})
    second.job = new_job(config.parse(second.values))
    second.watchdog, second.now = Watchdog(second.job), first.now
    second.tell(
        ev.Adopted(((FIRST, "a pod"),), 1),
        ev.Begin(),
        ev.Hello(FIRST, resumes=True),
        ev.Resume(FIRST, Layout(100), Generation(1), (FIRST,), left=False, joined=True, left_ring=None),
    )
    assert only(second.out(0, step=5), ef.Form).epochs == 2
    told = verdict(second, tmp_path, steps=20)
    assert told.startswith("exactly once: 100 records x 2 epochs in 20 steps, 2 rings; 1 worker ended")


def test_a_journal_without_that_of_the_earlier_master_says_which_steps_it_does_not_prove(
    tmp_path: Path,
) -> None:
    """As in a cluster, where the journal goes with the master's pod."""
    for mode in ("train", "ps"):
        second = Story(workers=1, joinDelaySeconds=0, mode=mode)
        second.job = new_job(config.parse(second.values))
        second.watchdog = Watchdog(second.job)
        back = ev.Resume(FIRST, Layout(100), Generation(1), (FIRST,), left=False, joined=True, left_ring=None)
        second.tell(ev.Adopted(((FIRST, "a pod"),), 1), ev.Begin(), ev.Hello(FIRST, resumes=True), back)
        second.tell(ev.Hello(WorkerId(1)), ev.Ready(WorkerId(1), Layout(100)), ev.Live(2, 1, False, 1))
        form = only(second.out(0, step=5), ef.Form)
        second.tell(*(ev.JoinedRing(w, form.generation, 5) for w in form.members))
        (tmp_path / mode).mkdir()
        told = verdict(second, tmp_path / mode)
        assert "checkpoint" not in told
        assert (
            "; the first 5 steps were made under an earlier master, whose journal is not here: not proved"
        ) in told


def test_a_master_that_takes_over_before_the_first_ring_has_seen_all_steps(tmp_path: Path) -> None:
    story = Story(workers=1, joinDelaySeconds=0)
    story.job = new_job(config.parse(story.values))
    story.watchdog = Watchdog(story.job)
    story.tell(
        ev.Adopted((), 0, past=facts.Past({"starting": 3.0}, "starting"), active_seconds=3.0), ev.Begin()
    )
    assert "earlier master" not in verdict(story.running(0), tmp_path)


def test_a_master_that_only_ends_the_job_proves_nothing_by_itself(tmp_path: Path) -> None:
    """As in a cluster, if the master is lost between the decision and the end of the last worker."""
    first = Story(workers=1, joinDelaySeconds=0).running()
    only(first.out(0, step=10, digest="d"), ef.Export)
    first.tell(ev.Finished(FIRST, {}, "model.keras"))
    known = past.of(first.job)
    second = Story(workers=1, joinDelaySeconds=0)
    second.job = new_job(config.parse(second.values))
    second.watchdog, second.now = Watchdog(second.job), first.now
    second.tell(ev.Adopted(((FIRST, "a pod"),), 1, past=known), ev.Begin(), ev.Gone(FIRST, code=0))
    keep(second, tmp_path)
    told = audit.audit(tmp_path)
    assert told.startswith("exactly once: 100 records x 1 epoch in 10 steps, 0 rings; 1 worker ended")
    assert (
        "; the first 10 steps were made under an earlier master, whose journal is not here: not proved"
        in told
    )


def test_weights_that_differ_are_told(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 10))
    for w, digest in ((0, "one"), (1, "other")):
        story.out(w, step=10, digest=digest)
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, tmp_path)
    with pytest.raises(audit.AuditFailed, match="the weights differ between workers"):
        audit.audit(tmp_path)


def test_states_that_differed_are_given_up_for_a_checkpoint_and_the_verdict_says_so(tmp_path: Path) -> None:
    story = Story(workers=2, checkpoint={"dir": "d", "seconds": 10}, joinDelaySeconds=0.5)
    story.ready(0, 1)
    story.waits(0.6)
    story.up()
    generation, members = story.job.ring.generation, story.job.ring.members
    assert len(members) == 2
    story.tell(ev.Progress(generation, 6), ev.Checkpointed(FIRST, 3, "a", 1))
    story.tell(ev.PartsWritten(FIRST, 5, "b", members, generation, (("one", 1), ("other", 1))))
    story.out(*members, step=6, broken="cut")
    story.up(step=3)
    told = verdict(story, tmp_path)
    assert told.startswith("exactly once: 100 records x 1 epoch in 10 steps, 2 rings")
    assert "the newest state was lost once and training went on from what was left" in told


def test_a_checkpoint_of_different_states_and_states_that_are_given_up_for_nothing_are_found() -> None:
    parts = {"type": "PartsWritten", "step": 5, "states": [["one", 1], ["", 3], ["other", 1]]}
    with pytest.raises(AuditFailed, match="though its parts are of different states"):
        JournalProof().note({"event": parts, "effects": [{"type": "Commit"}]}, "line 1")
    form = {"type": "Form", "untrusted_up_to": 1}
    with pytest.raises(AuditFailed, match="line 2: the states of all members are given up, though none has"):
        JournalProof().note({"event": {"type": "Tick"}, "effects": [form]}, "line 2")


def test_checkpoints_of_the_job_that_are_still_there_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path / "checkpoints"))
    story = Story(workers=2, joinDelaySeconds=0.5, checkpoint={"dir": store.place.where}).running()
    for step, attempt in ((3, "removed"), (5, "a"), (8, "b")):
        story.tell(ev.PartsWritten(FIRST, step, attempt, story.job.ring.members))
    write(store, 5, attempt="a")
    last = write(store, 8, attempt="b")
    foreign = write(store, 9, attempt="of-another-job")
    damaged(store, foreign)
    assert "; 2 checkpoints as written (SHA-256); " in verdict(story, tmp_path)
    part = damaged(store, last)
    with pytest.raises(AuditFailed, match=rf"^a checkpoint is damaged: .*{part.name}"):
        audit.audit(tmp_path)
    listed = store.checkpoints()
    shutil.rmtree(store.place.where)
    assert "; 0 checkpoints as written (SHA-256); " in audit.audit(tmp_path)
    with monkeypatch.context() as patch:  # the job removes them after they were listed
        patch.setattr(Store, "checkpoints", lambda _: listed)
        assert "; 0 checkpoints as written (SHA-256); " in audit.audit(tmp_path)
    Path(store.place.where).touch()
    assert f"; checkpoints not verified: {store.place.where}: cannot list" in audit.audit(tmp_path)


def damaged(store: Store, checkpoint: Checkpoint) -> Path:
    """One of its parts, after a bit of it was changed."""
    part = Path(store.place.where, checkpoint.directory, checkpoint.manifest.parts[0].name)
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    return part


def stopped(story: Story, output: Path, *, step: int) -> str:
    """Stop the job after this step, and audit its journal."""
    story.tell(ev.StopAsked("stopped by edl stop"))
    story.out(*story.job.ring.members, step=step)
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, output)
    return audit.audit(output)


def test_a_stopped_job_has_its_steps_up_to_then(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    story.up(4)
    assert stopped(story, tmp_path, step=5).startswith(
        "Stopped (stopped by edl stop); 4 of 10 steps are trained: each of their records counted once; "
        "the journal ends with "
    )


def test_a_stopped_job_has_the_steps_of_its_last_checkpoint(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "checkpoints"))
    story = Story(workers=2, records=100, checkpoint={"dir": store.place.where}).running()
    generation, skipped = story.job.ring.generation, RangeSet.of([(4, 5)])
    story.tell(ev.Progress(generation, 3), ev.StopAsked("stopped by edl stop", checkpoint=True))
    asked = [
        effect
        for worker in story.job.ring.members
        for effect in story.tell(ev.LeftRing(worker, generation, 7, True, skipped, digest="d", bad={0: 2}))
    ]
    writer = only(asked, ef.WriteCheckpoint).worker
    last = write(store, 7, attempt="of-one-worker")
    story.tell(ev.Checkpointed(writer, 7, "of-one-worker", 1))
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, tmp_path)
    told = audit.audit(tmp_path)
    assert (
        "; 7 of 10 steps are trained: each of their records counted once, except 12 records that were left "
        "out; 1 checkpoint as written (SHA-256); the journal ends with "
    ) in told
    damaged(store, last)
    with pytest.raises(AuditFailed, match=r"^a checkpoint is damaged: "):
        audit.audit(tmp_path)


def test_a_checkpoint_that_a_later_ring_did_not_go_on_from_counts_no_steps(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    generation = story.job.ring.generation
    story.tell(ev.Progress(generation, 4), ev.Checkpointed(FIRST, 9, "a", 1))
    story.kill(0)
    only(story.out(1, step=4, broken="reset"), ef.Form)
    story.up(4)
    assert "; 4 of 10 steps are trained: " in stopped(story, tmp_path, step=5)


def test_a_job_that_was_stopped_before_its_first_step_is_not_said_to_have_trained(tmp_path: Path) -> None:
    assert stopped(Story(workers=2), tmp_path, step=0).startswith(
        "Stopped (stopped by edl stop); no step was trained; the journal ends with "
    )


def test_a_failed_job_has_its_steps_up_to_then_without_what_was_left_out(tmp_path: Path) -> None:
    story = Story(workers=2, records=100).running()
    story.tell(ev.Progress(story.job.ring.generation, 6))
    story.out(*story.job.ring.members, step=6)
    story.tell(ev.Failed(FIRST, "NameError: name 'x' is not defined", fatal=True))
    story.tell(*(ev.Gone(w.id, code=1) for w in list(story.job.pool)))
    assert story.job.phase == "Failed", story.job.reason
    keep(story, tmp_path)
    told = audit.audit(tmp_path)
    assert told.startswith("Failed (")
    assert "; 5 of 10 steps are trained: each of their records counted once; the journal" in told


def test_a_running_job_has_the_steps_so_far(tmp_path: Path) -> None:
    story = a_story_with_a_death()
    story.up(4)
    keep(story, tmp_path)
    (tmp_path / artifacts.SUMMARY).unlink()
    with open(tmp_path / artifacts.JOURNAL, "ab") as journal:
        journal.write(b'{"now":1.0,"event"')  # a line that is being written
    assert audit.audit(tmp_path).startswith(
        "the job has not ended; so far, 4 of 10 steps are trained: each of their records counted once; "
        "the journal so far ends with "
    )


def test_an_edited_line_of_a_running_job_is_found_out(tmp_path: Path) -> None:
    keep(a_story_with_a_death(), tmp_path)
    (tmp_path / artifacts.SUMMARY).unlink()
    path = tmp_path / artifacts.JOURNAL
    path.write_text(path.read_text().replace('"type":"Progress"', '"type":"Epilogue"'))
    with pytest.raises(JournalDamaged, match="the chain is broken"):
        audit.audit(tmp_path)


def test_new_epochs_do_not_concern_a_job_that_evaluates(tmp_path: Path) -> None:
    story = Story(workers=1, mode="evaluate")
    for worker in (WorkerId(0), WorkerId(1)):
        story.tell(ev.Hello(worker), ev.Ready(worker, Layout(0), held_out={"test": 40}))
        story.up()
        live(story, 7)
        story.kill(worker)
    keep(story, tmp_path)
    assert "no pass over all records was completed" in audit.audit(tmp_path)


def ended(output: Path, *digests: str, deterministic: bool = True, mae: float = 0.1) -> str:
    """A job of as many epochs as there are digests; returns the verdict of its audit.

    Args:
        mae: on the records held out, after the last epoch.
    """
    output.mkdir()
    story = Story(
        workers=1, training={"epochs": len(digests), "batchSize": 10, "deterministic": deterministic}
    ).running()
    generation = story.job.ring.generation
    story.tell(ev.JoinedRing(FIRST, generation, 0))
    for epoch, sha256 in enumerate(digests, 1):
        loss = facts.EpochLoss(epoch - 1, 100, 0.5)
        story.tell(ev.EpochEnded(FIRST, generation, epoch, loss, {"mae": 0.1}, sha256))
    story.tell(ev.Evaluated(FIRST, generation, 10 * len(digests), "validation", 10, {"mae": mae}))
    story.tell(ev.LeftRing(FIRST, generation, 10 * len(digests), True, digest="d"))
    return saved(story, output)


def test_deterministic_jobs_are_compared_and_the_epoch_is_named_in_which_they_part(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    assert "; deterministic: SHA-256 c3 after epoch 3; " in ended(first, "a1", "b2", "c3")
    assert "deterministic" not in ended(second, "", "", "", deterministic=False)
    with pytest.raises(AuditFailed, match=r"no epoch in common that training\.deterministic trained"):
        audit.same(first, second)
    shutil.rmtree(second)
    ended(second, "a1", "b2", "c3")
    assert audit.same(first, second) == f"the same bits after each of 3 epochs as {second}"
    ended(other, "a1", "b9", "c3")
    with pytest.raises(AuditFailed, match="part in epoch 2: SHA-256 b2, and b9"):
        audit.same(first, other)
    ended(tmp_path / "held out", "a1", "b2", "c3", mae=0.2)
    with pytest.raises(
        AuditFailed, match=r"part in the evaluation of data\('validation'\) after step 30: .*0\.2"
    ):
        audit.same(first, tmp_path / "held out")
