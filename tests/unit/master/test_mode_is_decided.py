# SPDX-License-Identifier: Apache-2.0
"""mode=auto: the first worker that has built the model says what the job is, and it is that from then on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edl import config
from edl.config import values
from edl.contract.ids import Generation, RunId, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.master.cluster.runs import Train, plan
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import snapshot, view
from edl.master.core.state import State
from edl.master.loop import Master
from edl.master.parameter_servers.base import NoServers
from edl.master.parameter_servers.deferred import DeferredServers
from edl.master.spec import JobSpec
from tests.support.jobs.invariants import replayed
from tests.support.jobs.new_master import NewMaster
from tests.support.jobs.stories import Story, of, only
from tests.unit.kubernetes.test_plan import MODEL, found

TWO = ev.ServersReady(2, ("a:1", "b:1"))


def a_spec(**changes: Any) -> JobSpec:
    return JobSpec.parse(values.merge(values.defaults(), changes))


def ready(worker: int, tables: int) -> tuple[ev.Event, ev.Event]:
    return ev.Hello(WorkerId(worker)), ev.Ready(WorkerId(worker), Layout(100), tables=tables)


def told(effects: list[ef.Effect], reason: Reason) -> list[str]:
    return [notice.text for notice in of(effects, ef.Notice) if notice.reason is reason]


def test_auto_is_the_default_and_has_no_servers_until_it_is_decided() -> None:
    spec = a_spec()
    assert (spec.config.mode, spec.config.task, spec.config.servers) == ("auto", "train", 0)
    hybrid = spec.decided("hybrid")
    assert (hybrid.config.servers, hybrid.values["mode"]) == (2, "hybrid")
    assert config.parse(hybrid.values) == hybrid.config
    assert spec.decided("train").config.servers == 0
    assert a_spec(mode="train").decided("hybrid").config.mode == "train", "the caller has decided it"


def test_a_model_with_tables_has_servers_and_the_ring_is_formed_when_they_listen() -> None:
    story = Story(workers=1, mode="auto")
    effects = story.tell(*ready(0, tables=2))
    assert only(effects, ef.ModeDecided).mode == "hybrid"
    [text] = told(effects, Reason.ModeDecided)
    assert text.startswith("the model has 2 edl.layers.Embedding: their rows are on 2 parameter servers")
    assert "mode=hybrid" in text and "mode=train" in text
    assert not of(effects + story.waits(2), ef.Form)
    assert view.status(story.job, story.now)["reason"] == "parameter servers are starting"
    form = only(story.tell(TWO), ef.Form)
    assert (form.servers, form.addresses) == (2, ("a:1", "b:1"))
    effects = story.tell(ev.JoinedRing(WorkerId(0), form.generation, 0, servers=2))
    assert not of(effects + story.waits(2), ef.Leave), "they are the servers that were awaited"
    assert view.status(story.job, story.now)["task"]["mode"] == "hybrid"
    assert view.summary(story.job)["task"]["mode"] == "hybrid"


def test_a_model_without_tables_is_trained_in_the_ring_at_once_and_nobody_is_told_of_servers() -> None:
    story = Story(workers=1, mode="auto")
    effects = story.tell(*ready(0, tables=0))
    assert only(effects, ef.ModeDecided).mode == "train"
    assert only(effects, ef.Form).servers == 0
    assert not told(effects, Reason.ModeDecided)


def test_added_servers_that_are_given_up_leave_those_before_them_while_the_first_ones_start() -> None:
    story = Story(workers=1, mode="auto")
    story.tell(*ready(0, tables=1))
    effects = story.tell(ev.ServersGivenUp(4, 2, "parameter server 3 does not listen after 60 s"))
    assert only(effects, ef.Assigned) == ef.Assigned(2, wanted=4)
    [text] = told(effects, Reason.ReshardFailed)
    assert text.startswith("4 parameter servers cannot have the rows: parameter server 3")
    assert only(story.tell(TWO), ef.Form).servers == 2


@pytest.mark.parametrize("mode", ["auto", "hybrid"])
def test_no_server_is_released_by_a_request_that_is_given_up_while_it_is_unknown_which_have_rows(
    mode: str,
) -> None:
    story = Story(workers=1, mode=mode)
    story.tell(*ready(0, tables=1))
    effects = story.tell(ev.ServersGivenUp(4, 0, "parameter server 3 does not answer"))
    assert told(effects, Reason.ReshardFailed) and not of(effects, ef.Assigned)


def test_servers_start_as_soon_as_a_model_is_built_and_before_its_worker_is_ready() -> None:
    story = Story(workers=1, mode="auto")
    assert only(story.tell(ev.Hello(WorkerId(0)), ev.Built(WorkerId(0), 1)), ef.ModeDecided)
    assert not of(story.tell(TWO), ef.Form), "no worker is ready"
    effects = story.tell(ev.Ready(WorkerId(0), Layout(100), tables=1))
    assert not of(effects, ef.ModeDecided)
    assert only(effects, ef.Form).servers == 2


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (1, 0, "worker 1 found no edl.layers.Embedding in the model, and the workers before it found some"),
        (0, 3, "worker 1 found 3 edl.layers.Embedding in the model, and the workers before it found none"),
    ],
)
def test_it_is_decided_once_and_a_worker_with_another_model_is_refused(
    first: int, second: int, words: str
) -> None:
    story = Story(workers=2, mode="auto")
    story.tell(*ready(0, first))
    effects = story.tell(*ready(1, second))
    assert not of(effects, ef.ModeDecided)
    [why] = told(effects, Reason.WorkerFailed)
    assert words in why and "model() must return the same" in why
    assert story.job.mode == ("hybrid" if first else "train")


def test_what_was_decided_is_in_the_journal_and_in_the_state_at_its_head() -> None:
    story = Story(workers=1, mode="auto")
    story.tell(*ready(0, tables=1))
    kept = snapshot.load(json.loads(json.dumps(snapshot.dump(story.job))), story.job.config)
    assert (kept.mode, kept.servers.state) == ("hybrid", "starting")
    story.tell(TWO)
    story.up()
    assert view.summary(replayed(story.watchdog)) == view.summary(story.job)


def test_a_job_that_says_its_mode_decides_nothing() -> None:
    for mode, tables in (("train", 0), ("hybrid", 1)):
        story = Story(workers=1, mode=mode)
        effects = story.tell(*ready(0, tables))
        assert not of(effects, ef.ModeDecided)
        assert of(effects, ef.Form), "nothing is waited for: its workers know the servers"


def test_a_new_master_learns_it_from_the_workers_and_their_ring_trains_on() -> None:
    master = NewMaster(0, next_id=1, workers=1)
    w = WorkerId(0)
    resume = ev.Resume(w, Layout(100), Generation(7), (w,), False, True, None, tables=1)
    effects = master.tell(ev.Hello(w, resumes=True), resume)
    assert only(effects, ef.ModeDecided).mode == "hybrid"
    assert not of(effects + master.tell(TWO), ef.Leave)
    assert master.job.ring.members == (w,)
    master.out(0, step=4, broken="reset")
    assert master.job.ring.generation == 8, "nothing is waited for any more"


def test_a_ring_that_is_left_under_a_new_master_waits_for_the_servers_that_it_had() -> None:
    master = NewMaster(0, next_id=1, workers=1)
    w = WorkerId(0)
    out = ev.LeftRing(w, Generation(7), 4, True)
    resume = ev.Resume(w, Layout(100), Generation(7), (w,), True, True, out, tables=1)
    assert not of(master.tell(ev.Hello(w, resumes=True), resume), ef.Form)
    assert only(master.tell(TWO), ef.Form).servers == 2


# --- the values


def test_a_run_keeps_what_was_decided_whatever_its_values_leave_open() -> None:
    left_open, hybrid = a_spec(), a_spec().decided("hybrid")
    assert hybrid.frozen_changes(left_open) == []
    assert hybrid.frozen_changes(a_spec(ps={"servers": 3})) == []
    assert left_open.decided("train").frozen_changes(left_open) == []
    assert hybrid.frozen_changes(a_spec(mode="train")) == ["mode"]
    assert left_open.decided("train").frozen_changes(a_spec(ps={"servers": 3})) == ["ps.servers"]
    assert a_spec(mode="ps").frozen_changes(left_open) == ["mode"]
    for spec in (hybrid, left_open.decided("train")):
        what = plan(found(spec), a_spec(workers=3), RunId("new"))
        assert isinstance(what, Train)
        assert (what.run_id, what.spec.config.mode, what.spec.config.workers) == ("old", spec.config.mode, 3)
    what = plan(found(hybrid), a_spec(model={"source": MODEL}, runId="2"), RunId("new"))
    assert isinstance(what, Train)
    assert (what.run_id, what.spec.config.mode) == ("new", "auto"), "another run decides anew"


async def test_the_number_of_servers_can_be_changed_once_there_are_some() -> None:
    master = Master(a_spec(), RunId("a-run"))
    with pytest.raises(ConfigError, match="no worker has built its model yet"):
        master.scale(None, 3)
    master.spec = master.spec.decided("hybrid")
    assert "-> 3" in master.scale(None, 3)
    master.take(a_spec(ps={"servers": 3}, workers=2))
    assert (master.spec.config.servers, master.spec.config.workers) == (3, 2)
    assert isinstance(master.inbox.get_nowait(), ev.Begin) and isinstance(master.inbox.get_nowait(), ev.Live)


# --- the servers


class Two(NoServers):
    """Two servers, which listen on request."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.listen, self.ended = broken, asyncio.Event(), False

    async def start(self) -> None:
        if self.broken:
            raise OSError(self.broken)

    async def listening(self) -> tuple[str, ...]:
        await self.listen.wait()
        return TWO.addresses

    @property
    def wanted(self) -> int:
        return 2

    async def close(self, ended: bool) -> None:
        self.ended = ended


async def test_servers_are_made_when_it_is_decided_and_told_when_they_listen() -> None:
    events: asyncio.Queue[ev.Event] = asyncio.Queue()
    two = Two()
    made: list[Two] = []

    def make() -> Two:
        made.append(two)
        return two

    servers = DeferredServers(events.put_nowait, make)
    await servers.start()
    assert (await servers.addresses(), servers.status(), servers.wanted) == ((), [], 0)
    assert not made
    servers.perform(ef.ModeDecided("hybrid"))
    assert made and servers.wanted == 2
    two.listen.set()
    assert await events.get() == TWO
    await servers.close(ended=True)
    assert two.ended


async def test_servers_that_cannot_be_started_are_told_and_those_that_never_listen_are_left() -> None:
    events: asyncio.Queue[ev.Event] = asyncio.Queue()
    servers = DeferredServers(events.put_nowait, lambda: Two("No space left on device"))
    servers.perform(ef.ModeDecided("hybrid"))
    exited = await events.get()
    assert isinstance(exited, ev.ServerExited) and exited.fatal and "No space left" in exited.why
    silent = DeferredServers(events.put_nowait, Two)
    silent.perform(ef.ModeDecided("hybrid"))
    await silent.close(ended=False)
    assert events.empty()


async def test_without_servers_nothing_is_told() -> None:
    events: asyncio.Queue[ev.Event] = asyncio.Queue()
    servers = DeferredServers(events.put_nowait, NoServers)
    servers.perform(ef.ModeDecided("train"))
    assert servers._starting is not None
    await servers._starting
    assert events.empty()


def test_the_core_keeps_the_values_as_they_were_given() -> None:
    """What was decided stands beside them: a journal's head has values, and its state what became of them."""
    state = State(a_spec().config)
    assert (state.mode, state.config.mode) == ("auto", "auto")
