"""Stories of a job, told with events; what the core does about them, and what it says."""

from __future__ import annotations

import pytest

from edl import config, values
from edl.ids import Generation, WorkerId
from edl.ranges import Range, RangeSet
from master.core import events as ev
from master.core import view
from master.core.job import Job
from tests.invariants import Watchdog


class Story:
    """A job whose workers do what the test says. Sizes: 100 records, 1 epoch, batches of 10."""

    def __init__(self, workers: int = 3, records: int = 100, **elastic: float):
        overrides = {
            "workers": workers,
            "minWorkers": int(elastic.pop("least", 1)),
            "training": {"epochs": 1, "batchSize": 10},
            "elastic": {"joinSeconds": 0, "silenceSeconds": 3, "startSeconds": 60, "maxFailures": 2}
            | elastic,
        }
        self.job = Job(config.parse(values.merge(values.defaults(), overrides)))
        self.watchdog = Watchdog(self.job)
        self.records, self.now = records, 100.0
        self.history: list[tuple[float, ev.Event, list[ev.Effect]]] = []
        self.tell(ev.Begin())

    def tell(self, *events: ev.Event, after: float = 0.01) -> list[ev.Effect]:
        effects = []
        for event in events:
            self.now += after
            effects += self.watchdog.handle(event, self.now)
            self.history.append((self.now, event, effects))
        return effects

    def ready(self, *workers: int) -> list[ev.Effect]:
        return [
            e for w in workers for e in self.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), self.records))
        ]

    def up(self, step: int = 0) -> list[ev.Effect]:
        """The ring that was formed is up, with its first step made."""
        g, members = self.job.generation, self.job.members
        effects = [e for m in members for e in self.tell(ev.Up(m, g, step))]
        return effects + [e for m in members for e in self.tell(ev.Stepped(m, g, step + 1, 0.2, 0, 0.0))]

    def out(
        self, *workers: int, step: int = 1, applied: Range = (0, 10), broken: str = "", digest: str = ""
    ) -> list:
        ledger = RangeSet.of([applied])
        return [
            e
            for w in workers
            for e in self.tell(
                ev.Out(WorkerId(w), self.job.generation, step, True, ledger, broken=broken, digest=digest)
            )
        ]

    def running(self, *workers: int) -> Story:
        self.ready(*(workers or range(self.job.target)))
        self.up()
        return self

    def take_leases(self) -> None:
        """The members ask until nothing is left to lease."""
        while any(of(self.tell(ev.Want(m, self.job.generation)), ev.Grant) for m in self.job.members):
            pass

    def kill(self, worker: int) -> list[ev.Effect]:
        return self.tell(
            ev.Closed(WorkerId(worker), "its stream ended"), ev.Gone(WorkerId(worker), signal="SIGKILL")
        )

    def beats(self, *workers: int, after: float = 0.0) -> None:
        for w in workers:
            self.tell(ev.Beat(WorkerId(w), self.job.generation, 1), after=after)

    @property
    def said(self) -> str:
        return "\n".join(e.text for _, _, effects in self.history for e in effects if isinstance(e, ev.Say))


def only(effects: list[ev.Effect], kind: type) -> ev.Effect:
    (found,) = [e for e in effects if isinstance(e, kind)]
    return found


def of(effects: list[ev.Effect], kind: type) -> list[ev.Effect]:
    return [e for e in effects if isinstance(e, kind)]


def test_a_job_asks_for_its_workers_and_forms_a_ring_of_those_that_are_ready() -> None:
    story = Story(workers=3)
    assert story.job.pool.born == 3
    form = only(story.ready(0, 1, 2), ev.Form)
    assert form.members == (0,), "with no time to wait for others the first begins alone"
    assert story.job.phase == "Training"


def test_those_who_are_late_for_the_start_get_a_moment() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    assert not of(story.ready(0, 1), ev.Form)
    assert only(story.ready(2), ev.Form).members == (0, 1, 2)
    waiting = Story(workers=3, joinSeconds=0.5)
    waiting.ready(0, 1)
    assert only(waiting.tell(ev.Tick(), after=0.6), ev.Form).members == (0, 1)


def test_a_newcomer_joins_at_a_step_boundary_and_takes_the_state() -> None:
    story = Story(workers=2).running(0)
    assert only(story.ready(1), ev.Leave).members == (0,)
    form = only(story.out(0), ev.Form)
    assert (form.members, form.root, form.sync) == ((0, 1), 0, True)


def test_a_killed_member_is_cut_out_replaced_and_never_charged() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    story.running()
    effects = story.kill(1)
    assert only(effects, ev.Cut).members == (0, 2)
    assert only(effects, ev.Create).worker == 3
    assert not of(story.out(0, step=4, broken="reset"), ev.Form), "worker 2 is still in the old ring"
    form = only(story.out(2, step=5, applied=(0, 50), broken="reset"), ev.Form)
    assert (form.members, form.root, form.sync) == ((0, 2), 2, True), "worker 2 alone has step 5"
    assert story.job.leases.applied == RangeSet(((0, 50),))
    assert story.job.failures == []


def test_survivors_at_the_same_step_need_no_broadcast() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    story.running()
    story.kill(1)
    assert not only(story.out(0, 2, broken="reset"), ev.Form).sync


def test_the_leases_of_the_dead_are_handed_out_again_but_for_what_is_applied() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    g = story.job.generation
    first = only(story.tell(ev.Want(WorkerId(0), g)), ev.Grant).lease
    second = only(story.tell(ev.Want(WorkerId(1), g)), ev.Grant).lease
    story.kill(1)
    form = only(story.out(0, step=3, applied=(first[0], second[0] + 5), broken="reset"), ev.Form)
    assert form.leases == ((),)
    assert second[0] + 5 in {a for a, _ in story.job.leases.todo}


def test_one_that_is_told_to_go_leaves_with_nothing_redone() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    story.running()
    effects = story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    assert only(effects, ev.Leave).members == (0, 1, 2)
    assert only(effects, ev.Create).worker == 3
    effects = story.out(0, 1, 2)
    assert only(effects, ev.Form).members == (1, 2)
    assert only(effects, ev.Stop).worker == 0
    story.up(1)
    assert story.job.changes[-1].planned
    assert "ring 3 -> 2 in 0.20 s, 0 records redone (worker 0 leaves)" in story.said


def test_the_last_holder_hands_the_state_over_before_it_may_go() -> None:
    story = Story(workers=1).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    assert not of(story.ready(1), ev.Stop)
    form = only(story.out(0, step=7), ev.Form)
    assert (form.members, form.root) == ((0, 1), 0)
    g = story.job.generation
    story.tell(ev.Up(WorkerId(0), g, 7), ev.Up(WorkerId(1), g, 7))
    effects = story.out(0, 1, step=8)
    assert only(effects, ev.Form).members == (1,)
    assert only(effects, ev.Stop).worker == 0


def test_scaling_in_keeps_the_oldest_and_lets_the_starting_go_first() -> None:
    story = Story(workers=4, joinSeconds=0.5)
    story.ready(0, 1, 2)
    story.tell(ev.Tick(), after=1)
    story.up()
    effects = story.tell(ev.Scale(2))
    assert only(effects, ev.Delete).worker == 3, "nobody listens there yet"
    assert only(effects, ev.Leave)
    assert only(story.out(0, 1, 2), ev.Form).members == (0, 1)


def test_a_silent_member_is_fenced_and_refused_when_it_thaws() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.beats(0, 1)
    for _ in range(6):
        story.beats(0, after=0.49)
    effects = story.tell(ev.Tick(), after=0.1)
    assert only(effects, ev.Fence).worker == 1
    assert only(effects, ev.Cut).members == (0,)
    before = story.job.stale
    assert only(story.tell(ev.Hello(WorkerId(1))), ev.Fence).worker == 1
    story.tell(ev.Out(WorkerId(1), story.job.generation, 9, True, RangeSet()))
    assert story.job.stale == before + 2
    story.tell(ev.Gone(WorkerId(1), code=3))
    assert story.job.failures == []


def test_one_that_never_becomes_ready_is_given_up_and_charged() -> None:
    story = Story(workers=1)
    story.tell(ev.Seen(WorkerId(0), "pid"))
    effects = story.tell(ev.Tick(), after=61)
    assert only(effects, ev.Delete).worker == 0
    assert [f.why for f in story.job.failures] == ["worker 0 was not ready after 60 s (it was starting)"]
    assert of(story.tell(ev.Tick(), after=1), ev.Create)


def test_one_that_waits_for_capacity_is_not_given_up() -> None:
    story = Story(workers=1)
    assert not of(story.tell(ev.Tick(), after=10_000), ev.Delete)


@pytest.mark.parametrize(
    ("gone", "charged"),
    [
        (ev.Gone(WorkerId(1), code=0), ["worker 1 ended by itself with exit code 0"]),
        (ev.Gone(WorkerId(1), code=2), ["worker 1 ended by itself with exit code 2"]),
        (ev.Gone(WorkerId(1), signal="SIGSEGV"), ["worker 1 crashed (SIGSEGV)"]),
        (ev.Gone(WorkerId(1), signal="SIGKILL"), []),
        (ev.Gone(WorkerId(1), signal="SIGTERM"), []),
        (ev.Gone(WorkerId(1), code=75, free=True), []),
    ],
    ids=str,
)
def test_an_end_is_charged_to_its_cause(gone: ev.Gone, charged: list[str]) -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.tell(gone)
    assert [f.why for f in story.job.failures] == charged


def test_a_survivor_that_a_peers_death_aborted_is_not_charged() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    story.running()
    story.kill(0)
    story.tell(ev.Gone(WorkerId(1), signal="SIGABRT"))
    assert story.job.failures == []


def test_failures_beyond_the_budget_fail_the_job_with_the_traceback() -> None:
    story = Story(workers=1, maxFailures=1)
    story.tell(ev.Hello(WorkerId(0)), ev.Failed(WorkerId(0), "ValueError: no", "Traceback: line 1"))
    assert story.job.ending is None
    story.tell(ev.Tick(), after=1)
    story.tell(ev.Hello(WorkerId(1)), ev.Failed(WorkerId(1), "ValueError: no", "Traceback: line 2"))
    assert story.job.ending == ("Failed", "ValueError: no")
    assert story.job.traceback == "Traceback: line 2"
    story.tell(ev.Gone(WorkerId(1), code=1))
    assert story.job.phase == "Failed"


def test_a_fatal_failure_is_not_tried_again() -> None:
    story = Story(workers=2)
    effects = story.tell(
        ev.Hello(WorkerId(0)), ev.Failed(WorkerId(0), "the model is not compiled", fatal=True)
    )
    assert story.job.ending == ("Failed", "the model is not compiled")
    assert not of(effects, ev.Create)


def test_workers_that_die_early_are_not_replaced_in_a_hot_loop() -> None:
    story = Story(workers=1)
    pauses = []
    for worker in range(4):
        story.tell(ev.Seen(WorkerId(worker), "pid"), ev.Gone(WorkerId(worker), signal="SIGKILL"))
        died = story.now
        while story.job.pool.born == worker + 1:
            deadline = story.job.next_deadline()
            assert deadline is not None
            story.tell(ev.Tick(), after=deadline - story.now)
        pauses.append(round(story.now - died, 3))
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_below_the_least_size_the_job_waits_and_keeps_its_state() -> None:
    story = Story(workers=2, least=2, joinSeconds=0.5)
    story.running()
    story.kill(1)
    assert not of(story.out(0, step=4, applied=(0, 40), broken="reset"), ev.Form)
    assert (story.job.phase, story.job.reason) == ("Waiting", "1 ready, need 2")
    form = only(story.ready(2), ev.Form)
    assert (form.members, form.root) == ((0, 2), 0)
    assert story.job.leases.applied == RangeSet(((0, 40),))


def test_when_all_holders_are_gone_the_job_says_so_and_starts_again() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.take_leases()
    story.tell(ev.Beat(WorkerId(0), story.job.generation, 3, applied=RangeSet(((0, 30),))))
    story.kill(0)
    story.kill(1)
    assert story.job.phase == "Waiting"
    form = only([*story.ready(2), *story.ready(3)], ev.Form)
    assert form.leases == ((), ())
    assert "30 records of training are lost" in story.said
    assert story.job.leases.applied == RangeSet()
    assert story.job.restarts == 1


def finish(story: Story, digests: tuple[str, str] = ("same", "same")) -> list[ev.Effect]:
    whole = (0, 100)
    story.take_leases()
    effects = story.tell(ev.Beat(WorkerId(0), story.job.generation, 10, applied=RangeSet((whole,))))
    assert only(effects, ev.Leave)
    return [
        *story.out(0, step=10, applied=whole, digest=digests[0]),
        *story.out(1, step=10, applied=whole, digest=digests[1]),
    ]


def test_a_job_succeeds_when_every_record_is_applied_and_the_model_is_saved() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    assert only(finish(story), ev.Export).worker == 0
    assert story.job.phase == "Finishing"
    effects = story.tell(ev.Finished(WorkerId(0), {"accuracy": 0.9}, "model.keras"))
    assert {e.worker for e in of(effects, ev.Stop)} == {0, 1}
    effects = story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert only(effects, ev.End).phase == "Succeeded"
    summary = view.summary(story.job)
    assert summary["records"]["per_epoch"] == [100]
    assert summary["metrics"] == {"accuracy": 0.9}


def test_another_holder_exports_when_the_first_dies_at_it() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    finish(story)
    assert only(story.kill(0), ev.Export).worker == 1


def test_different_weights_fail_the_job() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    assert not of(finish(story, ("one", "other")), ev.Export)
    assert story.job.ending is not None
    assert story.job.ending[0] == "Failed"
    assert "weights differ" in story.job.ending[1]


def test_a_worker_that_counts_other_records_is_refused() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.ready(0)
    story.tell(ev.Hello(WorkerId(1)), ev.Ready(WorkerId(1), 99))
    assert [f.why for f in story.job.failures] == ["worker 1 counts 99 records in the data, the job has 100"]


def test_messages_of_an_older_ring_change_nothing_and_are_counted() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    before = view.summary(story.job)
    old = Generation(story.job.generation - 1)
    effects = story.tell(
        ev.Out(WorkerId(0), old, 9, True, RangeSet(), broken="late"),
        ev.Up(WorkerId(1), old, 9),
        ev.Want(WorkerId(0), old),
    )
    assert effects == []
    assert view.summary(story.job) == before | {"stale_messages": before["stale_messages"] + 3}


def test_goodput_accounts_for_every_second() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.beats(0, 1, after=1.0)
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.up(4)
    seconds = story.job.goodput.at(story.now)
    assert sum(seconds.values()) == pytest.approx(story.now - story.job.began_at)
    assert seconds["useful"] > 2
    assert seconds["re-forming"] > 0


def test_the_history_replays_to_the_same_end() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    again = Job(story.job.config)
    for now, event, _ in story.history:
        again.handle(event, now)
    assert view.summary(again) == view.summary(story.job)
