"""Stories of parameter servers that come and go: when the ring is formed anew for them."""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from master.core import events as ev
from tests.stories import Story, of, only


def told(effects: list[ev.Effect], reason: Reason) -> list[str]:
    return [notice.text for notice in of(effects, ev.Notice) if notice.reason is reason]


def a_ring_with_two_servers() -> tuple[Story, ev.Form]:
    """One worker, and servers that became two while it trained."""
    story = Story(workers=1).running(0)
    assert of(story.tell(ev.ServersReady(2, ("a:1", "b:1"))), ev.Leave)
    return story, only(story.out(0, step=4), ev.Form)


def joined(form: ev.Form, servers: int, out: tuple[int, ...] = (), stay: str = "") -> ev.JoinedRing:
    return ev.JoinedRing(WorkerId(0), form.generation, 4, servers=servers, out=out, stay=stay)


def test_servers_that_listen_have_the_ring_formed_anew_with_their_addresses() -> None:
    story, form = a_ring_with_two_servers()
    assert (form.servers, form.addresses) == (2, ("a:1", "b:1"))
    effects = story.tell(joined(form, 2))
    assert only(effects, ev.Arranged).servers == 2
    assert not of(effects, ev.Leave)


def test_rows_that_cannot_be_moved_stay_and_nobody_tries_again_and_again() -> None:
    story, form = a_ring_with_two_servers()
    effects = story.tell(joined(form, 1, stay="no memory"))
    assert only(effects, ev.Arranged).servers == 1
    (said,) = told(effects, Reason.ServersStay)
    assert "stay on 1 parameter server, not 2: no memory" in said
    assert not of(effects + story.waits(60), ev.Leave)


def test_a_number_that_is_asked_for_while_rows_move_is_the_next_one() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1")))
    effects = story.tell(joined(form, 2))
    assert not of(effects, ev.Arranged), "the third one is needed"
    assert of(effects, ev.Leave)
    assert only(story.out(0, step=5), ev.Form).servers == 3


def test_a_server_that_is_out_is_brought_in_when_it_is_back() -> None:
    story, form = a_ring_with_two_servers()
    effects = story.tell(joined(form, 2, out=(1,)))
    assert "without parameter server 1" in told(effects, Reason.ServerOut)[0]
    assert not of(story.tell(ev.ServerAnswers(0)), ev.Leave), "it was never away"
    assert of(story.tell(ev.ServerAnswers(1)), ev.Leave)
    form = only(story.out(0, step=4), ev.Form)
    assert "have their rows again" in told(story.tell(joined(form, 2)), Reason.ServersMoved)[0]


def test_a_server_that_is_back_before_the_ring_has_said_that_it_is_out_is_not_forgotten() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(ev.ServerListens(1, 0.5, again=True))
    assert of(story.tell(joined(form, 2, out=(1,))), ev.Leave)


def test_a_ring_that_forms_for_the_servers_that_its_members_know_is_cut_when_others_are_ready() -> None:
    story = Story(workers=1)
    form = only(story.ready(0), ev.Form)
    assert form.servers == 0
    effects = story.tell(ev.ServersReady(1, ("a:1", "b:1")))
    assert only(effects, ev.Cut).generation == form.generation, "it may wait for one that has ended"
    form = only(story.out(0, step=0), ev.Form)
    assert (form.servers, form.addresses) == (1, ("a:1", "b:1"))


def test_an_order_that_is_taken_back_while_rows_move_ends_no_server() -> None:
    story, form = a_ring_with_two_servers()
    story.tell(joined(form, 2))
    assert of(story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1"))), ev.Leave)
    form = only(story.out(0, step=5), ev.Form)
    assert not of(story.tell(ev.ServersReady(2, ("a:1", "b:1", "c:1"))), ev.Arranged), "they may be on three"
    effects = story.tell(joined(form, 3))
    assert not of(effects, ev.Arranged) and of(effects, ev.Leave)
    form = only(story.out(0, step=6), ev.Form)
    assert only(story.tell(joined(form, 2)), ev.Arranged).servers == 2


def test_that_the_rows_are_where_they_are_wanted_is_told_once() -> None:
    story, form = a_ring_with_two_servers()
    assert of(story.tell(joined(form, 2)), ev.Arranged)
    story.kill(0)
    form = only(story.ready(1), ev.Form)
    assert not of(story.tell(ev.JoinedRing(WorkerId(1), form.generation, 0, servers=2)), ev.Arranged)
