# SPDX-License-Identifier: Apache-2.0
"""Servers that a cluster runs, as the master knows them: how many run, and what is reported to the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.remote import RemoteServers


class A:
    """A master's side of servers, which answer when the test says so."""

    def __init__(self, servers: int, running: Callable[[], int | None] = lambda: 0):
        self.told: list[Any] = []
        self.scaled: list[int] = []
        self.named = RemoteServers(
            self.told.append, str, "ps-{}".format, servers, self.scaled.append, running=running
        )

    def answers(self, have: int, running: int) -> None:
        """So many servers run, and the first one says that so many have the rows."""
        of = pb.ShardAssignment(servers=have, replicas=1) if have else None
        for server in self.named._watch._servers[:running]:
            server.note(pb.Description(assignment=of), 1.0)
            self.named._looked()

    @property
    def ready(self) -> list[tuple[int, int]]:
        """How many are to have the rows, and of how many there are addresses."""
        return [
            (event.servers, len(event.addresses)) for event in self.told if isinstance(event, ev.ServersReady)
        ]


def test_servers_that_have_got_rows_since_the_first_one_was_asked_are_not_ended() -> None:
    a = A(3)
    a.answers(3, 3)
    a.named.resize(4)
    a.answers(3, 4)
    assert a.ready == [(4, 4)]
    a.named.resize(2)  # the ring may be moving rows to the fourth one now
    assert a.scaled[-1] == 4
    assert a.ready[-1] == (2, 4)
    a.answers(4, 4)
    a.named.perform(ef.Assigned(2, wanted=2))
    assert a.scaled[-1] == 2


def test_an_order_that_comes_while_rows_move_is_not_forgotten() -> None:
    a = A(2)
    a.answers(2, 2)
    a.named.resize(3)
    a.answers(2, 3)
    a.named.resize(4)
    a.named.perform(ef.Assigned(3, wanted=3))  # the answer to the order before
    assert a.named.wanted == 4 and a.scaled[-1] == 4
    a.answers(3, 4)
    assert a.ready == [(3, 3), (4, 4)]


def test_an_order_before_servers_have_told_of_the_last_move_is_judged_by_what_the_ring_has_said() -> None:
    a = A(1)
    a.answers(1, 1)
    a.named.resize(2)
    a.answers(1, 2)
    a.named.perform(ef.Assigned(2, wanted=2))
    a.named.resize(1)  # servers are asked once a second: as far as they have told, one has all rows
    assert a.ready == [(2, 2), (1, 2)]
    assert a.scaled[-1] == 2, "the second one has rows that the first has not"


def test_servers_that_the_ring_has_not_heard_of_when_rows_are_assigned_are_not_ended() -> None:
    a = A(1)
    a.answers(1, 1)
    a.named.resize(3)
    a.answers(1, 3)
    a.named.perform(ef.Assigned(1, wanted=1))  # decided before `ServersReady` had its turn
    assert a.named.wanted == 3 and a.scaled[-1] == 3, "the next ring waits for three"
    a.answers(3, 3)
    a.named.perform(ef.Assigned(3, wanted=3))
    assert a.ready == [(3, 3)] and a.scaled[-1] == 3


def test_an_order_that_is_taken_back_is_told_too() -> None:
    a = A(2)
    a.answers(2, 2)
    a.named.resize(3)
    a.answers(2, 3)
    a.named.resize(2)
    a.answers(2, 3)
    assert a.ready == [(3, 3), (2, 3)], "the ring is on its way to three"
    assert a.scaled[-1] == 3


def test_fewer_servers_before_any_has_rows_are_told() -> None:
    a = A(3)
    a.answers(0, 3)
    assert not a.ready, "the workers know these"
    a.named.resize(2)
    assert a.ready == [(2, 3)]


@pytest.mark.parametrize(("running", "before"), [(0, 2), (2, 2), (3, 3), (None, 0)])
async def test_added_servers_that_do_not_listen_before_any_has_rows_leave_those_before_them(
    running: int | None, before: int
) -> None:
    """An earlier master may have had rows moved to more servers than the values request."""
    told: asyncio.Queue[ev.Event] = asyncio.Queue()
    there, scaled = [running], list[int]()
    servers = RemoteServers(told.put_nowait, str, "ps-{}".format, 2, scaled.append, 0.05, lambda: there[0])
    servers.resize(4)
    there[0] = 4
    given_up = await asyncio.wait_for(told.get(), 60)
    assert given_up == ev.ServersGivenUp(4, before, "parameter server 0 does not answer at ps-0 after 0 s")
    if before:
        servers.perform(ef.Assigned(before, wanted=4))
    assert servers.wanted == scaled[-1] == (before or 4)
    await servers.close(ended=False)


def test_a_server_that_missed_the_last_move_does_not_say_where_the_rows_are() -> None:
    a = A(3)
    a.answers(3, 3)
    a.named.resize(4)
    a.answers(3, 4)
    # The ring continues without the first, because others have copies of its rows.
    first, *others = a.named._watch._servers
    for server in others:
        newer = pb.Description(
            assignment=pb.ShardAssignment(servers=4, replicas=2, out=[0]), position=pb.Position(generation=6)
        )
        server.note(newer, 2.0)
    a.named.perform(ef.Assigned(4, wanted=4))
    a.named.resize(3)
    assert first.told is not None and first.told.assignment.servers == 3
    a.named._looked()
    assert a.scaled[-1] == 4, "rows are on the fourth one"
    assert a.ready == [(4, 4), (3, 4)]


def test_a_new_master_ends_no_server_before_a_ring_has_said_that_it_needs_it_no_longer() -> None:
    there: list[int | None] = [None]
    a = A(1, lambda: there[0])
    a.answers(1, 1)
    assert not a.scaled and not a.ready, "how many there are is not known yet"
    there[0] = 3  # an earlier master had the ring formed for these, and died; the order was taken back
    a.answers(1, 3)
    assert a.ready == [(1, 3)] and a.scaled == [3]
    a.answers(1, 3)
    assert a.scaled == [3] and len(a.ready) == 1
    a.named.perform(ef.Assigned(1, wanted=1))
    assert a.scaled == [3, 1]


def test_a_new_master_of_as_many_servers_as_there_are_to_be_has_no_ring_formed() -> None:
    a = A(2, lambda: 2)
    a.answers(2, 2)
    assert not a.ready and a.scaled == [2]


def test_a_new_master_believes_no_server_that_has_slept_through_the_last_move() -> None:
    a = A(3, running=lambda: 3)
    *others, third = a.named._watch._servers
    third.note(
        pb.Description(assignment=pb.ShardAssignment(servers=3), position=pb.Position(generation=5)), 1.0
    )
    a.named._looked()
    for server in others:
        newer = pb.Description(assignment=pb.ShardAssignment(servers=2), position=pb.Position(generation=7))
        server.note(newer, 2.0)
        a.named._looked()
    assert a.ready == [(3, 3)]


def test_a_worker_that_comes_before_servers_have_told_hears_of_all_that_run() -> None:
    a = A(2, running=lambda: 3)
    assert asyncio.run(a.named.addresses()) == ("ps-0", "ps-1", "ps-2")
