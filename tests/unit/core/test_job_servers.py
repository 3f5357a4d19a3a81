# SPDX-License-Identifier: Apache-2.0
"""Stories of parameter servers that come and go: when a ring is formed for them, and for which it waits."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from tests.support.jobs.stories import Story, of, only

NEVER_SILENT = {"heartbeatTimeoutSeconds": 10**6}


def told(effects: list[ef.Effect], reason: Reason) -> list[str]:
    return [notice.text for notice in of(effects, ef.Notice) if notice.reason is reason]


def a_ring_with_two_servers(**values: Any) -> tuple[Story, ef.Form]:
    """One worker, and servers that became two while it trained."""
    story = Story(workers=1, **values).running(0)
    assert of(story.tell(ev.ServersReady(2, ("a:1", "b:1"))), ef.Leave)
    return story, only(story.out(0, step=4), ef.Form)


def joined(form: ef.Form, servers: int, out: tuple[int, ...] = (), stay: str = "") -> ev.JoinedRing:
    return ev.JoinedRing(WorkerId(0), form.generation, 4, servers=servers, out=out, stay=stay)


def test_servers_that_listen_have_the_ring_formed_anew_with_their_addresses() -> None:
    story, form = a_ring_with_two_servers()
    assert (form.servers, form.addresses) == (2, ("a:1", "b:1"))
    effects = story.tell(joined(form, 2))
    assert only(effects, ef.Assigned) == ef.Assigned(2, wanted=2)
    assert not of(effects, ef.Leave)


def test_rows_that_cannot_be_moved_stay_and_nobody_tries_again_and_again() -> None:
    story, form = a_ring_with_two_servers()
    effects = story.tell(joined(form, 1, stay="no memory"))
    assert only(effects, ef.Assigned) == ef.Assigned(1, wanted=2)
    (said,) = told(effects, Reason.ReshardFailed)
    assert "stay on 1 parameter server, not 2: no memory" in said
    assert not of(effects + story.waits(60), ef.Leave)


def test_a_number_that_is_asked_for_while_rows_move_is_the_next_one() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    effects = story.tell(joined(form, 2))
    assert not of(effects, ef.Assigned), "the third one is needed"
    assert of(effects, ef.Leave)
    assert only(story.out(0, step=5), ef.Form).servers == 3


def test_no_server_is_released_while_a_broken_ring_may_have_moved_the_rows_to_it() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2), ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    form = only(story.out(0, step=5), ef.Form)
    assert form.servers == 3
    story.kill(0)  # perhaps after the rows had moved
    assert not of(story.tell(ev.ServersReady(2, ("a:1", "b:1", "c:1"))), ef.Assigned)
    form = only(story.ready(1), ef.Form)
    assert (form.servers, form.released_from) == (2, 0)
    there = ev.JoinedRing(WorkerId(1), form.generation, 0, servers=2)
    assert only(story.tell(there), ef.Assigned) == ef.Assigned(2, wanted=2)


def test_a_server_that_is_out_is_brought_in_when_it_is_back() -> None:
    story, form = a_ring_with_two_servers()
    effects = story.tell(joined(form, 2, out=(1,)))
    assert "without parameter server 1" in told(effects, Reason.ServerRemoved)[0]
    assert not of(story.tell(ev.ServerRecovered(0)), ef.Leave), "it was never away"
    assert of(story.tell(ev.ServerRecovered(1)), ef.Leave)
    form = only(story.out(0, step=4), ef.Form)
    assert "have their rows again" in told(story.tell(joined(form, 2)), Reason.Resharded)[0]


def test_a_server_that_is_back_before_the_ring_has_said_that_it_is_out_is_not_forgotten() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(ev.ServerListens(1, 0.5, again=True))
    assert of(story.tell(joined(form, 2, out=(1,))), ef.Leave)


def test_servers_that_do_not_come_to_listen_are_given_up_and_the_rows_stay() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2))
    effects = story.tell(ev.ServersGivenUp(3, 2, "parameter server 2 cannot be started: exit code 1"))
    assert only(effects, ef.Assigned).servers == 2
    (said,) = told(effects, Reason.ReshardFailed)
    assert said == view.status(story.job, story.now)["servers_stay"]
    assert said == (
        "the rows stay on 2 parameter servers, not 3: parameter server 2 cannot be started: exit code 1"
    )
    assert not of(effects + story.waits(60), ef.Leave), "the ring trains on"
    story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    assert not view.status(story.job, story.now)["servers_stay"], "they are tried once more"


def test_servers_that_are_given_up_release_none_that_a_broken_ring_may_have_moved_the_rows_to() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2), ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    form = only(story.out(0, step=5), ef.Form)
    story.kill(0)  # perhaps after the rows had moved
    effects = story.tell(ev.ServersGivenUp(4, 2, "parameter server 3 cannot be started: exit code 1"))
    assert only(effects, ef.Assigned) == ef.Assigned(3, wanted=4)
    assert "4 parameter servers cannot have the rows" in told(effects, Reason.ReshardFailed)[0]
    form = only(story.ready(1), ef.Form)
    assert (form.servers, form.addresses) == (3, ("a:1", "b:1", "c:1"))


def test_a_move_that_is_given_up_by_the_ring_leaves_no_address_that_nobody_is_at() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 1, stay="parameter server 1 (b:1) is away for 60 s"))
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    form = only([*story.out(0, step=5), *story.ready(1)], ef.Form)
    assert (form.servers, form.addresses, form.released_from) == (1, ("a:1",), 1)


def test_no_ring_is_told_of_servers_that_have_ended() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2), ev.ServersReady(1, ("a:1", "b:1")))
    form = only(story.out(0, step=4), ef.Form)
    assert (form.servers, form.addresses) == (1, ("a:1", "b:1")), "the rows are still on both"
    assert only(story.tell(joined(form, 1)), ef.Assigned).servers == 1
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    form = only([*story.out(0, step=5), *story.ready(1)], ef.Form)
    assert (form.servers, form.addresses) == (1, ("a:1",))


# --- which servers are awaited


def waits(story: Story, after: float = 0.0) -> str:
    return str(view.status(story.job, story.now + after)["waits"])


@pytest.mark.parametrize("mode", ["hybrid", "ps"])
def test_the_ring_is_said_to_wait_for_a_server_until_that_answers(mode: str) -> None:
    story = Story(workers=1, mode=mode).running(0)
    effects = story.tell(ev.ServerAway(0, 1.0, "restarting"))
    (said,) = told(effects, Reason.ServerUnavailable)
    expected = (
        "the ring waits for parameter server 0 (restarting for 1.0 s): it goes on by itself as soon as that "
        "answers; if this lasts, see edl logs ps-0"
    )
    assert said == waits(story) == expected
    assert "restarting for 3.5 s" in waits(story, after=2.5)
    assert not told(story.waits(30), Reason.ServerUnavailable), "once"
    (said,) = told(story.tell(ev.ServerRecovered(0)), Reason.ServerRecovered)
    assert said.startswith("parameter server 0 can be called again, after 31.0")
    assert not waits(story)


def test_the_status_says_when_a_process_that_hangs_is_restarted() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2), ev.ServerAway(0, 2.0, "restarting"))
    story.tell(ev.ServerAway(1, 1.0, "not answering"))
    assert "servers 0 (restarting for 2.0 s), 1 (not answering for 1.0 s): " in waits(story)
    said = "see edl logs ps-0 and edl logs ps-1. A process that answers nothing for 30 s is restarted"
    assert waits(story).endswith(said)


def unanswered(story: Story, probes: int, after: float) -> list[ef.RestartServer]:
    effects = story.tell(ev.ProbeUnanswered(1, probes), after=after)
    restarts = of(effects, ef.RestartServer)
    assert len(told(effects, Reason.ServerRestarted)) == len(restarts)
    return restarts


def test_a_server_whose_process_answers_nothing_is_restarted() -> None:
    story, form = a_ring_with_two_servers(**NEVER_SILENT)
    story.tell(joined(form, 2))
    found = [unanswered(story, probe, after=3.5) for probe in range(1, 22)]
    assert [probe for probe, restarts in enumerate(found, 1) if restarts] == [10, 19], "after 31.5 s and 63 s"
    assert found[9] == [ef.RestartServer(1)]


def test_no_server_is_restarted_that_answers_meanwhile_or_that_the_master_has_not_asked() -> None:
    story, form = a_ring_with_two_servers(**NEVER_SILENT)
    story.tell(joined(form, 2))
    assert not unanswered(story, 1, after=3.5)
    assert not unanswered(story, 2, after=100.0), "the master was stopped: it has asked twice"
    assert not unanswered(story, 1, after=3.5), "a call was answered in between"
    assert not any(unanswered(story, probe, after=3.5) for probe in range(2, 9))
    story.tell(ev.ServerExited(1, "SIGSEGV"), ev.ServerListens(1, 0.5, again=True))
    assert not any(unanswered(story, probe, after=3.5) for probe in range(1, 10))


@pytest.mark.parametrize(("replicas", "out", "restarted"), [(1, (), 602), (2, (), 31.5), (2, (0,), 602)])
def test_a_process_whose_memory_alone_holds_rows_is_restarted_later(
    replicas: int, out: tuple[int, ...], restarted: float
) -> None:
    story, form = a_ring_with_two_servers(ps={"replicas": replicas, "log": False}, **NEVER_SILENT)
    story.tell(joined(form, 2, out=out))
    probes = (probe for probe in range(1, 200) if unanswered(story, probe, after=3.5))
    assert (next(probes) - 1) * 3.5 == restarted


def test_a_server_that_is_out_is_not_waited_for() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(ev.ServerAway(1, 1.0, "not answering"))
    assert "parameter server 1" in waits(story), "to form it"
    effects = story.tell(joined(form, 2, out=(1,)))
    assert not waits(story)
    assert not told(effects, Reason.ServerRecovered)


def test_a_server_that_is_to_have_rows_is_waited_for_only_while_these_move() -> None:
    story = Story(workers=1).running(0)
    story.tell(ev.ServerAway(1, 5.0, "restarting"))
    story.tell(ev.ServersReady(1, ("a:1",)))
    story.tell(joined(only(story.out(0, step=4), ef.Form), 1))
    assert not waits(story), "it has no rows"
    story.tell(ev.ServerRecovered(1), ev.ServersReady(2, ("a:1", "b:1")), ev.ServerAway(1, 1.0, "restarting"))
    form = only(story.out(0, step=5), ef.Form)
    assert "parameter server 1 (restarting" in waits(story)
    story.tell(joined(form, 1, stay="it is away"))
    assert not waits(story)


def test_a_ring_that_forms_for_the_servers_that_its_members_know_is_cut_when_others_are_ready() -> None:
    story = Story(workers=1)
    form = only(story.ready(0), ef.Form)
    assert form.servers == 0
    effects = story.tell(ev.ServersReady(1, ("a:1", "b:1")))
    assert only(effects, ef.Cut).generation == form.generation, "it may wait for one that has ended"
    form = only(story.out(0, step=0), ef.Form)
    assert (form.servers, form.addresses) == (1, ("a:1", "b:1"))


def test_an_order_that_is_taken_back_while_rows_move_ends_no_server() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2))
    assert of(story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1"))), ef.Leave)
    form = only(story.out(0, step=5), ef.Form)
    assert not of(story.tell(ev.ServersReady(2, ("a:1", "b:1", "c:1"))), ef.Assigned), "they may be on three"
    effects = story.tell(joined(form, 3))
    assert not of(effects, ef.Assigned) and of(effects, ef.Leave)
    form = only(story.out(0, step=6), ef.Form)
    assert only(story.tell(joined(form, 2)), ef.Assigned).servers == 2


def test_that_the_rows_are_where_they_are_wanted_is_told_once() -> None:
    story, form = a_ring_with_two_servers()
    assert of(story.tell(joined(form, 2)), ef.Assigned)
    story.kill(0)
    form = only(story.ready(1), ef.Form)
    assert not of(story.tell(ev.JoinedRing(WorkerId(1), form.generation, 0, servers=2)), ef.Assigned)
