"""Stories of a job, told with events; what the core does about them, and what it says."""

from __future__ import annotations

import pytest

from edl import config, values
from edl.ids import Generation, WorkerId
from edl.ranges import Range, RangeSet
from master.core import events as ev
from master.core import view
from master.core.job import Job
from tests.invariants import Watchdog, replayed


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
        self.tell(ev.Begin())

    def tell(self, *events: ev.Event, after: float = 0.01) -> list[ev.Effect]:
        effects = []
        for event in events:
            self.now += after
            effects += self.watchdog.handle(event, self.now)
        return effects

    def waits(self, seconds: float) -> list[ev.Effect]:
        """Time passes: a Tick at each deadline, and at the end."""
        effects, until = [], self.now + seconds
        while (deadline := self.job.next_deadline()) is not None and deadline <= until:
            effects += self.tell(ev.Tick(), after=deadline - self.now)
        return effects + self.tell(ev.Tick(), after=until - self.now)

    def ready(self, *workers: int) -> list[ev.Effect]:
        return [
            e for w in workers for e in self.tell(ev.Hello(WorkerId(w)), ev.Ready(WorkerId(w), self.records))
        ]

    def up(self, step: int = 0) -> list[ev.Effect]:
        """The ring that was formed is up, with its first step made."""
        g, members = self.job.ring.generation, self.job.ring.members
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
                ev.Out(
                    WorkerId(w), self.job.ring.generation, step, True, ledger, broken=broken, digest=digest
                )
            )
        ]

    def running(self, *workers: int) -> Story:
        self.ready(*(workers or range(self.job.target)))
        self.up()
        return self

    def take_leases(self) -> None:
        """The members ask until nothing is left to lease."""
        while any(
            of(self.tell(ev.Want(m, self.job.ring.generation)), ev.Grant) for m in self.job.ring.members
        ):
            pass

    def kill(self, worker: int) -> list[ev.Effect]:
        return self.tell(
            ev.Closed(WorkerId(worker), "its stream ended"), ev.Gone(WorkerId(worker), signal="SIGKILL")
        )

    def beats(self, *workers: int, after: float = 0.0) -> None:
        for w in workers:
            self.tell(ev.Beat(WorkerId(w), self.job.ring.generation, 1), after=after)

    @property
    def said(self) -> str:
        history = self.watchdog.history
        return "\n".join(e.text for _, _, effects in history for e in effects if isinstance(e, ev.Say))


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
    g = story.job.ring.generation
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
    assert story.job.ring.changes[-1].planned
    assert "ring 3 -> 2 in 0.20 s, 0 records redone (worker 0 leaves)" in story.said


def test_the_last_holder_hands_the_state_over_before_it_may_go() -> None:
    story = Story(workers=1).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    assert not of(story.ready(1), ev.Stop)
    form = only(story.out(0, step=7), ev.Form)
    assert (form.members, form.root) == ((0, 1), 0)
    g = story.job.ring.generation
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


def test_scaling_in_prefers_whoever_holds_the_state_to_an_older_one_that_does_not() -> None:
    story = Story(workers=3, joinSeconds=0).running(2)
    story.ready(0)
    effects = story.tell(ev.Scale(1))
    assert {w.id for w in story.job.pool.staying} == {2}
    assert only(effects, ev.Delete).worker == 1


def test_a_silent_member_is_fenced_and_refused_when_it_thaws() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.beats(0, 1)
    for _ in range(6):
        story.beats(0, after=0.49)
    effects = story.waits(0.1)
    assert only(effects, ev.Fence).worker == 1
    assert only(effects, ev.Cut).members == (0,)
    before = story.job.stale
    assert only(story.tell(ev.Hello(WorkerId(1))), ev.Fence).worker == 1
    story.tell(ev.Out(WorkerId(1), story.job.ring.generation, 9, True, RangeSet()))
    assert story.job.stale == before + 2
    story.tell(ev.Gone(WorkerId(1), code=3))
    assert story.job.failures == []


def test_one_that_never_becomes_ready_is_given_up_and_charged() -> None:
    story = Story(workers=1)
    story.tell(ev.Seen(WorkerId(0), "pid"))
    effects = story.waits(60)
    assert only(effects, ev.Delete).worker == 0
    assert [f.why for f in story.job.failures] == ["worker 0 was not ready after 60 s (it was starting)"]
    assert of(story.waits(1), ev.Create)


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
            story.waits(0.25)
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
    story.tell(ev.Beat(WorkerId(0), story.job.ring.generation, 3, applied=RangeSet(((0, 30),))))
    story.kill(0)
    story.kill(1)
    assert story.job.phase == "Waiting"
    form = only([*story.ready(2), *story.ready(3)], ev.Form)
    assert form.leases == ((), ())
    assert "30 records of training are lost" in story.said
    assert story.job.leases.applied == RangeSet()
    assert story.job.restarts == 1


def finish(story: Story, digests: tuple[str, str] = ("same", "same")) -> list[ev.Effect]:
    """Everything is applied, and the two members say so."""
    whole = (0, 100)
    story.take_leases()
    effects = story.tell(ev.Beat(WorkerId(0), story.job.ring.generation, 10, applied=RangeSet((whole,))))
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
    old = Generation(story.job.ring.generation - 1)
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


def test_the_history_replays_to_the_same_decisions_and_the_same_end() -> None:
    story = Story(workers=2, joinSeconds=0.5)
    story.running()
    story.take_leases()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.waits(2)
    assert view.summary(replayed(story.watchdog)) == view.summary(story.job)


# --- who dies, and when


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_whoever_is_killed_the_others_go_on_in_their_order(rank: int) -> None:
    story = Story(workers=4, joinSeconds=0.5).running()
    story.kill(rank)
    rest = [w for w in range(4) if w != rank]
    form = only(story.out(*rest, step=4, broken="reset"), ev.Form)
    assert (form.members, form.root, form.sync) == (tuple(rest), rest[0], False)


@pytest.mark.parametrize("dead", [(0, 1), (1, 3), (0, 1, 2), (1, 2, 3)])
def test_two_or_all_but_one_killed_at_once(dead: tuple[int, ...]) -> None:
    story = Story(workers=4, joinSeconds=0.5).running()
    cuts = [e for w in dead for e in of(story.kill(w), ev.Cut)]
    assert len(cuts) == 1, "one order is enough"
    rest = tuple(w for w in range(4) if w not in dead)
    assert only(story.out(*rest, step=4, broken="reset"), ev.Form).members == rest
    assert story.job.restarts == 0


def test_a_kill_while_the_ring_is_formed_cuts_those_who_wait_in_it() -> None:
    story = Story(workers=3, joinSeconds=0.5)
    story.ready(0, 1, 2)
    story.tell(ev.Up(WorkerId(0), story.job.ring.generation, 0))
    assert only(story.kill(2), ev.Cut).members == (0, 1)
    g = story.job.ring.generation
    story.tell(ev.Out(WorkerId(0), g, 0, True, RangeSet(), broken="cut"))
    form = only(story.tell(ev.Out(WorkerId(1), g, 0, False, RangeSet(), broken="cut")), ev.Form)
    assert (form.members, form.root, form.sync) == ((0, 1), 0, True), "worker 1 has not synced"


def test_the_root_dies_in_the_broadcast_and_who_has_its_state_is_the_next_root() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.kill(1)
    story.out(0, step=5, applied=(0, 50), broken="reset")
    assert only(story.out(2, step=4, applied=(0, 40), broken="reset"), ev.Form).root == 0
    story.tell(ev.Up(WorkerId(2), story.job.ring.generation, 5))  # it has taken the state over
    story.kill(0)
    form = only(story.out(2, step=5, applied=(0, 50), broken="cut"), ev.Form)
    assert (form.members, form.root) == ((2,), 2)
    assert story.job.leases.applied == RangeSet(((0, 50),))


def test_when_the_only_one_with_the_last_step_dies_the_ring_goes_on_from_the_step_before() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.kill(1)
    story.out(0, step=5, applied=(0, 50), broken="reset")
    story.out(2, step=4, applied=(0, 40), broken="reset")
    story.kill(0)
    form = only(story.out(2, step=4, applied=(0, 40), broken="cut"), ev.Form)
    assert form.root == 2
    assert story.job.leases.applied == RangeSet(((0, 40),)), "what worker 0 alone had is trained again"
    assert story.job.restarts == 0


def test_a_leave_that_breaks_is_cut_and_counts_as_unplanned() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    story.out(1)
    effects = story.kill(2)
    assert only(effects, ev.Cut).members == (0,)
    form = only(story.out(0, broken="cut"), ev.Form)
    assert form.members == (1,)
    assert not story.job.ring.changes[-1].planned


# --- who leaves


def test_one_that_leaves_stays_while_the_ring_would_be_too_small_without_it() -> None:
    story = Story(workers=2, least=2, joinSeconds=0).running()
    assert not of(story.tell(ev.Leaving(WorkerId(1), "SIGTERM")), ev.Leave), "2 are needed"
    only(story.ready(2), ev.Leave)
    effects = story.out(0, 1)
    assert only(effects, ev.Form).members == (0, 2)
    assert only(effects, ev.Stop).worker == 1


def test_one_polite_leave_and_one_frozen_peer_lose_nothing() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.beats(0, 1)
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    effects = story.out(0, step=8, applied=(0, 80))
    assert not of(effects, ev.Stop), "worker 1 has not said that it is out and well"
    for _ in range(8):
        story.beats(0, after=0.4)
    assert "worker 1 is lost: not heard of" in story.said
    assert story.job.ring.members == (0,), "it trains on until somebody else has the state"
    assert story.job.leases.applied == RangeSet(((0, 80),))
    assert story.job.restarts == 0


def test_a_newcomer_that_is_told_to_go_while_it_starts_is_let_go_at_once() -> None:
    story = Story(workers=2, joinSeconds=0).running(0)
    story.tell(ev.Hello(WorkerId(1)))
    effects = story.tell(ev.Leaving(WorkerId(1), "SIGTERM"))
    assert only(effects, ev.Stop).worker == 1
    assert only(effects, ev.Create).worker == 2


def test_one_that_was_told_to_end_is_not_charged_for_how_its_work_broke_off() -> None:
    story = Story(workers=2, joinSeconds=0).running(0)
    story.tell(ev.Hello(WorkerId(1)))
    story.tell(ev.Scale(1))
    story.tell(ev.Failed(WorkerId(1), "RingBroken: told to stop"), ev.Gone(WorkerId(1), code=1))
    assert story.job.failures == []


def test_one_that_does_not_end_when_told_to_is_ended_by_force() -> None:
    story = Story(workers=2, joinSeconds=0.5, graceSeconds=5).running()
    story.tell(ev.Scale(1))
    assert only(story.out(0, 1), ev.Stop).worker == 1
    for _ in range(12):
        story.beats(0, 1, after=0.2)
    assert not of(story.waits(0.1), ev.Delete)
    story.beats(0)
    assert only(story.waits(0.2), ev.Delete) == ev.Delete(WorkerId(1), 0.0)
    assert story.job.failures == []


def test_asked_to_stop_the_job_lets_all_go_and_says_why() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    effects = story.tell(ev.StopAsked("Ctrl-C"))
    assert {e.worker for e in of(effects, ev.Stop)} == {0, 1}
    effects = story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert only(effects, ev.End) == ev.End("Stopped", "Ctrl-C")
    assert story.job.failures == []


def test_scaled_down_and_up_again_at_once_nobody_comes_back_from_leaving() -> None:
    story = Story(workers=3, joinSeconds=0).running(0, 1, 2)
    story.tell(ev.Scale(2))
    leaving = {w.id for w in story.job.pool if w.state == "leaving"}
    effects = story.tell(ev.Scale(3))
    assert only(effects, ev.Create).worker == 3
    assert {w.id for w in story.job.pool if w.state == "leaving"} == leaving


# --- who is charged


def test_a_crash_is_charged_though_its_peers_said_first_that_the_ring_broke() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.out(0, step=2, broken="connection reset")
    story.tell(ev.Closed(WorkerId(1), "its stream ended"), ev.Gone(WorkerId(1), signal="SIGSEGV"))
    assert [f.why for f in story.job.failures] == ["worker 1 crashed (SIGSEGV)"]


def test_a_crash_in_the_next_ring_is_charged() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.kill(0)
    story.out(1, 2, step=2, broken="reset")
    story.up(2)
    story.tell(ev.Gone(WorkerId(1), signal="SIGSEGV"))
    assert len(story.job.failures) == 1


def test_code_that_crashes_whenever_it_trains_fails_the_job() -> None:
    story = Story(workers=2, joinSeconds=0, maxFailures=2).running(0, 1)
    for _ in range(20):
        if story.job.ending is None:
            newest = max(w.id for w in story.job.pool)
            story.tell(ev.Gone(newest, signal="SIGSEGV"))
            for w in [w.id for w in story.job.pool if w.in_ring]:
                story.out(w, step=2, broken="reset")
            story.waits(1)
            story.ready(*(w.id for w in story.job.pool if w.state == "asked"))
            story.out(*story.job.ring.members, step=2)
    assert story.job.ending is not None
    assert story.job.ending[0] == "Failed"
    assert len(story.job.failures) == 3


def test_a_failure_is_charged_once_though_it_is_heard_of_three_times() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.tell(ev.Failed(WorkerId(1), "ValueError: no", "Traceback"))
    story.tell(ev.Closed(WorkerId(1), "its stream ended"), ev.Gone(WorkerId(1), code=1))
    assert [f.why for f in story.job.failures] == ["ValueError: no"]


def test_a_thousand_early_deaths_are_no_number_too_large() -> None:
    story = Story(workers=1)
    for _ in range(1100):
        story.waits(30)
        for w in list(story.job.pool):
            story.tell(ev.Gone(w.id, signal="SIGKILL"))
    assert of(story.waits(30), ev.Create)
    assert story.job.failures == []


# --- silence


def test_after_a_stall_of_its_own_the_master_reads_first_what_it_was_told_meanwhile() -> None:
    story = Story(workers=3, joinSeconds=0.5).running()
    story.beats(0, 1, 2)
    assert not of(story.tell(ev.Tick(), after=5), ev.Fence), "the timer is seen before the messages"
    story.beats(0, 1)
    effects = story.waits(1)
    assert [e.worker for e in of(effects, ev.Fence)] == [2], "there was nothing from worker 2 to be read"


def test_when_all_are_silent_the_master_gives_them_up_a_moment_later() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.beats(0, 1)
    assert {e.worker for e in of(story.waits(3.8), ev.Fence)} == {0, 1}


def test_the_next_deadline_is_the_first_time_at_which_time_alone_matters() -> None:
    story = Story(workers=1, joinSeconds=0.5, startSeconds=60, silenceSeconds=3)
    assert story.job.next_deadline() is None, "capacity may take for ever"
    story.tell(ev.Seen(WorkerId(0), "pid"))
    started = story.now
    assert story.job.next_deadline() == started + 60
    story.tell(ev.Hello(WorkerId(0)))
    assert story.job.next_deadline() == started + 60, "saying hello is not being ready"
    story.ready(0)
    assert story.job.next_deadline() == story.now + 3
    story.tell(ev.Scale(2))
    story.ready(1)
    assert story.job.next_deadline() == story.now + 0.5, "when the ring makes room for the newcomer"


# --- the end


def test_an_empty_dataset_is_done_as_soon_as_somebody_can_save_the_model() -> None:
    story = Story(workers=2, records=0, joinSeconds=0.5)
    effects = story.ready(0, 1)
    assert not of(effects, ev.Form)
    assert only(effects, ev.Export).worker == 0
    story.tell(ev.Finished(WorkerId(0), {}, "model.keras"))
    story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert story.job.phase == "Succeeded"
    assert view.summary(story.job)["records"]["per_epoch"] == [0]


def test_one_holder_is_enough_to_save_the_model_whatever_the_least_size() -> None:
    story = Story(workers=2, least=2, joinSeconds=0.5).running()
    story.take_leases()
    story.tell(ev.Beat(WorkerId(0), story.job.ring.generation, 10, applied=RangeSet(((0, 100),))))
    story.out(0, step=10, applied=(0, 100), digest="d")
    assert only(story.kill(1), ev.Export).worker == 0


def test_when_the_exporter_alone_had_the_last_step_the_ring_trains_that_step_again() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.take_leases()
    story.tell(ev.Out(WorkerId(0), 1, 10, True, RangeSet(((0, 100),)), broken="reset", digest="d"))
    assert only(story.out(1, step=9, applied=(0, 90), broken="reset"), ev.Export).worker == 0
    form = only(story.kill(0), ev.Form)
    assert (form.members, form.root) == ((1,), 1)
    assert story.job.leases.applied == RangeSet(((0, 90),))
    assert story.job.phase == "Training"


def test_finished_from_one_that_was_not_asked_is_no_end() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    finish(story)
    story.tell(ev.Finished(WorkerId(1), {}, "other.keras"))
    assert story.job.ending is None
    assert story.job.stale == 1


def test_evaluating_is_useful_time_and_every_second_is_of_one_kind() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    finish(story)
    before = story.job.goodput.at(story.now)
    for _ in range(10):
        story.beats(0, 1, after=1.0)
    after = story.job.goodput.at(story.now)
    assert after["useful"] - before["useful"] == pytest.approx(20)
    assert sum(after.values()) == pytest.approx(story.now - story.job.began_at)


# --- what is said


def test_an_epoch_that_ends_as_the_ring_breaks_is_told_too() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.take_leases()
    story.kill(1)
    story.out(0, step=10, applied=(0, 100), broken="reset")
    assert "epoch 1 of 1 is applied" in story.said


def test_what_a_broken_ring_cost_is_told_in_one_line() -> None:
    story = Story(workers=4, joinSeconds=0.5).running()
    story.kill(3)
    story.out(0, 1, 2, step=4, broken="reset")
    g = story.job.ring.generation
    story.tell(*(ev.Up(WorkerId(w), g, 4) for w in range(3)))
    story.tell(*(ev.Stepped(WorkerId(w), g, 5, 0.1 * (w + 1), 8, 0.05) for w in range(3)))
    line = "ring 4 -> 3 in 0.30 s, 24 records redone (worker 3 is lost (its stream ended))"
    assert story.said.count(line) == 1
    story.tell(ev.Stepped(WorkerId(0), g, 5, 9.0, 8, 0.05))
    assert story.job.ring.changes[-1].stall_seconds == pytest.approx(0.3), "the first step is told once"


def test_a_ring_after_a_wait_is_there_because_workers_are_back() -> None:
    story = Story(workers=2, least=2, joinSeconds=0.5).running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    assert "no ring: 1 ready, need 2" in story.said
    story.ready(2)
    change = story.job.ring.changes[-1]
    assert (change.cause, change.from_size) == ("workers are back", 0)


def test_the_ordinary_end_of_a_stream_is_not_a_stale_message() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    story.tell(ev.Gone(WorkerId(1), signal="SIGKILL"), ev.Closed(WorkerId(1), "its stream ended"))
    assert story.job.stale == 0


def test_a_pause_keeps_the_state_and_a_resume_goes_on_from_it() -> None:
    story = Story(workers=2, joinSeconds=0.5).running()
    assert only(story.tell(ev.Live(2, 1, True)), ev.Leave).members == (0, 1)
    assert not of(story.out(0, 1, step=3), ev.Form)
    assert story.job.phase == "Paused"
    story.beats(0, 1, after=2)
    effects = story.kill(1) + story.tell(ev.Tick(), after=0.1)
    assert not of(effects, ev.Create) + of(effects, ev.Form), "who rests needs no replacement"
    story.beats(0, after=1)
    effects = story.tell(ev.Live(2, 1, False))
    form = only(effects, ev.Form)
    assert (form.members, form.root) == ((0,), 0)
    assert only(effects, ev.Create).worker == 2
    story.up(step=3)
    assert "(resumed)" in story.said
    assert story.job.goodput.at(story.now)["paused"] > 2


def test_a_job_that_is_paused_from_the_start_asks_for_nobody() -> None:
    job = Job(config.parse(values.merge(values.defaults(), {"paused": True})))
    assert not of(job.handle(ev.Begin(), 1.0), ev.Create)
    assert len(of(job.handle(ev.Live(4, 1, False), 2.0), ev.Create)) == 4


def test_all_that_is_trained_is_exported_though_paused() -> None:
    story = Story(workers=1).running()
    story.tell(ev.Live(1, 1, True))
    assert only(story.out(0, step=9, applied=(0, 100), digest="d"), ev.Export).worker == 0


def test_fewer_and_more_workers_by_live_values() -> None:
    story = Story(workers=2).running()
    story.tell(ev.Live(3, 1, False))
    assert story.job.pool.born == 3
    assert "workers 2 -> 3" in story.said
    story.tell(ev.Live(3, 3, False))
    story.kill(0)
    story.out(1, broken="reset")
    assert story.job.phase == "Waiting", "fewer than minWorkers are left"


def test_why_a_worker_does_not_run_is_told_once_and_shown() -> None:
    story = Story(workers=3)
    why = "0/2 nodes are available: 2 Insufficient cpu"
    for w in (0, 1, 2, 1):
        story.tell(ev.Delayed(WorkerId(w), why))
    assert story.said.count(why) == 1
    shown = [w["delay"] for w in view.status(story.job, story.now)["workers"]]
    assert shown == [why] * 3
    story.tell(ev.Seen(WorkerId(1), "pod-1"), ev.Delayed(WorkerId(2), ""))
    assert [w["delay"] for w in view.status(story.job, story.now)["workers"]] == [why, "", ""]
