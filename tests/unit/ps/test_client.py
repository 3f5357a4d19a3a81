# SPDX-License-Identifier: Apache-2.0
"""The client of parameter servers, over gRPC, against servers in dicts that are killed and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.ps_client import link
from edl.trainer.ps_client.calls import ServerAway, ServerRefused, TokenRefused
from edl.trainer.ring.base import RingBroken
from tests.support.fakes.parameter_server import FakeServer, Refused
from tests.support.ps.client_jobs import PLACES, SECONDS, Job


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_come_back_in_the_order_of_their_ids_whichever_server_has_them(
    begun: Callable[..., Job], servers: int
) -> None:
    job = begun(servers)
    words, places = np.array([5, -3, 2**62, 0, 9], np.int64), np.array([4, 1], np.int64)
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    job.client.pull(0, [words, places])
    job.client.stage(0, 0, [(words, -values), (places, np.ones((2, 3), np.float32))])
    job.last = Commit(0, False, 0.5, 0.1, 0)
    found = job.client.pull(1, [words[::-1].copy(), np.zeros(0, np.int64)])
    assert np.array_equal(found[0], values[::-1] / 2)
    assert found[1].shape == (0, 3)
    assert all(s.server.step == 1 for s in job.there)
    declared = job.there[0].server.tables[1]
    assert (declared.name, declared.dim, declared.min_count, declared.ttl_steps) == ("places", 3, 4, 5)


def test_every_server_hears_of_every_step_whoever_has_its_rows(begun: Callable[..., Job]) -> None:
    job = begun(3)
    job.takes_a_step(0, [1])
    job.client.pull(1, ())
    assert [s.server.step for s in job.there] == [1, 1, 1]
    staged = [sum(method == "Push" for method, _ in s.calls) for s in job.there]
    assert sorted(staged) == [0, 0, 1]


def test_a_step_that_was_left_out_changes_no_row(begun: Callable[..., Job]) -> None:
    job = begun(2)
    job.takes_a_step(0, [1, 2], skipped=True)
    assert not job.client.pull(1, [np.array([1, 2])])[0].any()


def test_a_server_that_is_killed_is_waited_for_and_has_all_that_it_had(begun: Callable[..., Job]) -> None:
    job = begun(2)
    ids = list(range(20))
    job.takes_a_step(0, ids)
    job.kill(1)
    pulling = job.beside(lambda: job.client.pull(1, [np.array(ids)]))
    job.there[0].comes_to("Pull")
    job.comes_back(1)
    assert np.array_equal(pulling.result(SECONDS)[0], np.full((20, 2), 0.5))


def test_it_is_known_for_which_server_a_worker_waits_and_for_what(begun: Callable[..., Job]) -> None:
    job = begun(2)
    ids = np.arange(20)
    job.client.pull(0, [ids])
    assert job.client.waiting() is None
    job.kill(1)
    pulling = job.beside(lambda: job.client.pull(0, [ids]))
    pause, until = threading.Event(), time.monotonic() + SECONDS
    while (waits := job.client.waiting()) is None and time.monotonic() < until:
        pause.wait(0.05)
    assert waits is not None and (waits.server, waits.call) == (1, "Pull") and waits.seconds >= 1
    job.comes_back(1)
    pulling.result(SECONDS)
    assert job.client.waiting() is None


def test_a_server_of_which_nobody_knows_that_it_has_rows_is_not_waited_for_without_limit(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(link.LIMITS, "Declare", 0.2)
    job = make(1)
    connection = job.client._links[0]
    job.kill(0)
    with pytest.raises(ServerAway, match=r"parameter server 0 \(.*\) is away for 0 s: "):
        connection.begin("Declare", pb.Tables()).result()
    waiting = job.beside(
        lambda: connection.begin("Declare", pb.Tables(run_id="a-run")).result(wait_forever=True)
    )
    job.comes_back(0)
    assert isinstance(waiting.result(SECONDS), pb.Position)


def test_a_cut_ends_the_waiting_for_a_server_that_is_away(begun: Callable[..., Job]) -> None:
    job = begun(2)
    job.kill(0)
    pulling = job.beside(lambda: job.client.pull(0, [np.arange(9)]))
    job.client.cut()
    with pytest.raises(RingBroken, match=r"the ring was cut while waiting for parameter server 0 \(.*\)"):
        pulling.result(SECONDS)
    with pytest.raises(RingBroken):  # as every later call in this ring
        job.client.pull(0, [np.arange(9)])


def test_a_cut_ends_a_call_that_a_server_does_not_answer(begun: Callable[..., Job]) -> None:
    job = begun(1)
    came, may = threading.Event(), threading.Event()

    def wait(method: str) -> None:
        if method == "Pull":
            came.set()
            may.wait(SECONDS)

    job.there[0].before = wait
    pulling = job.beside(lambda: job.client.pull(0, [np.arange(9)]))
    assert came.wait(SECONDS)
    job.client.cut()
    with pytest.raises(RingBroken):
        pulling.result(SECONDS)
    may.set()
    job.client.leave()  # out of the ring, calls are possible again
    assert len(job.client.pull(0, [np.arange(9)])[0]) == 9


@pytest.mark.parametrize("waits", [False, True], ids=["between two calls", "while it is waited for"])
def test_a_server_that_comes_back_without_its_log_breaks_the_ring(
    begun: Callable[..., Job], waits: bool
) -> None:
    job = begun(1)
    job.takes_a_step(0, [1])
    job.kill(0)
    if waits:
        pulling = job.beside(lambda: job.client.pull(1, [np.array([1])]))
    job.comes_back(0, lost=True)
    if not waits:
        pulling = job.beside(lambda: job.client.pull(1, [np.array([1])]))
    with pytest.raises(RingBroken, match="has come back with nothing: it has lost its log"):
        pulling.result(SECONDS)
    # The next root finds that out, and says why all have to go back.
    job.client.enter()
    job.client.claim(2)
    assert job.client.start_generation(1) == "parameter server 0 has lost its log and rows"


def test_the_root_brings_servers_to_the_rings_step_forward_or_back(begun: Callable[..., Job]) -> None:
    job = begun(2)
    job.takes_a_step(0, [1, 2])
    job.client.pull(1, ())
    before = job.last
    job.takes_a_step(1, [1, 2])  # it is applied where a server hears of it, and here none has
    job.client.claim(1)
    assert job.client.start_generation(2) == ""
    assert np.array_equal(job.client.pull(2, [np.array([1, 2])])[0], np.ones((2, 2)))
    # The only one that had the second step has died: the ring goes on from the first.
    job.last = before
    job.client.claim(2)
    assert job.client.start_generation(1) == ""
    assert np.array_equal(job.client.pull(1, [np.array([1, 2])])[0], np.full((2, 2), 0.5))


def test_a_server_that_is_further_than_the_ring_can_follow_is_named(begun: Callable[..., Job]) -> None:
    job = begun(1)
    for step in range(3):
        job.takes_a_step(step, [1])
    job.client.pull(3, ())
    job.last = Commit(0, False, 1.0, 0.1, 0)
    job.client.claim(1)
    assert job.client.start_generation(1) == "parameter server 0 is at step 3, the ring at step 1"


def test_a_last_step_whose_gradients_another_ring_has_dropped_is_not_applied_without_them(
    begun: Callable[..., Job],
) -> None:
    """As when a crashed worker has left a copy of the state that is one step ahead of the others."""
    job = begun(1)
    job.takes_a_step(0, [1])
    job.client.pull(1, ())
    job.takes_a_step(1, [1])
    ahead, job.last = job.last, Commit(0, False, 0.5, 0.1, 0, job.client.generation)
    job.client.claim(2)
    assert job.client.start_generation(1) == "", (
        "a worker with only the first step continues from there, and dies"
    )
    job.last = ahead
    job.client.claim(3)
    assert job.client.start_generation(2) == "parameter server 0 has dropped what was staged for step 2"


def test_nobody_is_waited_for_with_patience_after_another_server_has_refused(
    begun: Callable[..., Job],
) -> None:
    """As when the model is saved: the one that is away may have ended for good."""
    job = begun(2)
    job.takes_a_step(0, [1, 2])
    job.client.pull(1, ())
    job.kill(0)
    job.kill(1)
    job.comes_back(1, lost=True)
    with pytest.raises(RingBroken, match=r"parameter server 1 .*lost its log"):
        job.beside(lambda: job.client.rows_of(0, np.arange(9))).result(SECONDS)


def test_servers_that_went_back_are_not_taken_for_those_of_the_ring_before(begun: Callable[..., Job]) -> None:
    """Also if no worker was notified of it, and they had lost the generation that the same worker claimed."""
    job = begun(1)
    job.takes_a_step(0, [1])
    job.client.pull(1, ())
    job.kill(0)
    job.comes_back(0, lost=True)
    job.client.enter()
    job.client.claim(1)
    assert job.client.start_generation(1) == "parameter server 0 has lost its log and rows"
    job.client.restore(0, "")
    other = job.another()  # with the state of step 1: that root died before it had said that all go back
    other.claim(2)
    assert other.start_generation(1) == "parameter server 0 has dropped what was staged for step 1"


def test_each_ring_has_a_newer_generation_and_two_roots_never_the_same(make: Callable[..., Job]) -> None:
    job, other = make(2), None
    first = job.client.claim(1)
    job.client.generation = first
    job.client.restore(0, "")
    other = job.another()
    claimed = [job.client.claim(1), other.claim(2)]
    assert first < min(claimed) and len(set(claimed)) == 2
    other.generation = claimed[1]
    other.restore(0, "")
    with pytest.raises(RingBroken, match="is in generation"):  # the first ring is over
        job.client.pull(0, [np.arange(4)])


def test_rows_are_not_sent_before_the_generation_has_started(make: Callable[..., Job]) -> None:
    job = make(1)
    generation = job.client.claim(1)
    other = job.another()
    other.generation = generation
    pulling = job.beside(lambda: other.pull(0, [np.arange(3)]))
    job.there[0].comes_to("Pull")
    assert not pulling.done()
    job.client.generation = generation
    job.client.restore(0, "")
    assert len(pulling.result(SECONDS)[0]) == 3


def test_what_a_server_refuses_for_good_ends_the_job_in_its_own_words(begun: Callable[..., Job]) -> None:
    job = begun(1)
    words = "parameter server memory limit 1 GiB is reached: raise ps.resources"

    def refuse(method: str, request: Any) -> Any:
        if method == "Push":
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return FakeServer.handle(job.there[0].server, method, request)

    job.there[0].server.handle = refuse  # type: ignore[method-assign]
    with pytest.raises(ServerRefused, match=f"parameter server 0 .*: {words}"):
        job.takes_a_step(0, [1])
    other = job.another()
    other.declare((PLACES,), lambda: None)
    with pytest.raises(ServerRefused, match="the tables are others than before"):
        other.claim(3)


def test_a_worker_with_an_old_token_is_to_be_replaced(make: Callable[..., Job]) -> None:
    job = make(1)
    with pytest.raises(TokenRefused, match="the token is not the job's"):
        job.another(token="another").claim(1)


# --- rows that are asked for before they are needed


def test_rows_of_the_next_state_are_brought_before_the_step_is_in_this_workers_state(
    begun: Callable[..., Job],
) -> None:
    job = begun(2)
    ids = np.arange(6)
    job.takes_a_step(0, list(range(6)))
    after, job.last = job.last, None
    assert after is not None
    ahead = job.client.begin_pull(1, [ids], after)
    for server in job.there:
        server.reaches(1)
    job.last = after
    assert np.array_equal(ahead.result()[0], np.full((6, 2), 0.5))


def test_a_step_is_staged_while_something_else_is_done_and_not_before_a_server_says_so(
    begun: Callable[..., Job],
) -> None:
    job = begun(1)
    job.client.pull(0, ())
    may = threading.Event()
    job.there[0].before = lambda method: may.wait(SECONDS) if method == "Push" else None
    staged = job.client.begin_stage(0, 0, [(np.array([3]), -np.ones((1, 2), np.float32))])
    done = job.beside(staged.result)
    job.there[0].comes_to("Push")
    assert not done.done()
    may.set()
    done.result(SECONDS)
    job.last = Commit(0, False, 1.0, 0.1, 0)
    assert np.array_equal(job.client.pull(1, [np.array([3])])[0], [[1, 1]])


def test_a_call_is_answered_while_another_of_the_same_worker_waits(begun: Callable[..., Job]) -> None:
    job = begun(1)
    may = threading.Event()
    job.there[0].before = lambda method: may.wait(SECONDS) if method == "Pull" else None
    pulling = job.client.begin_pull(0, [np.arange(3)])
    job.there[0].comes_to("Pull")
    job.client.claim(1)  # Declare
    may.set()
    assert len(pulling.result()[0]) == 3


def test_who_is_not_waited_for_any_more_leaves_nothing_behind(begun: Callable[..., Job]) -> None:
    job = begun(1)
    may = threading.Event()
    job.there[0].before = lambda method: may.wait(SECONDS) if method == "Pull" else None
    job.client.begin_pull(0, [np.arange(3)]).forget()
    may.set()
    job.there[0].before = lambda method: None
    assert len(job.client.pull(0, [np.arange(4)])[0]) == 4


def test_a_request_says_of_which_step_the_worker_has_the_state(begun: Callable[..., Job]) -> None:
    job = begun(1)
    job.takes_a_step(0, [1])
    with pytest.raises(RuntimeError, match="rows of step 3 requested with the commit of step 0"):
        job.client.pull(3, ())
    job.client.pull(1, ())
    asked = [request for method, request in job.there[0].calls if method == "Pull"][-1]
    assert asked.last == pb.Commit(step=0, skipped=False, scale=0.5, learning_rate=0.1, iteration=0)


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_of_any_ids_are_those_of_the_state_that_the_worker_has(
    begun: Callable[..., Job], servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.trainer.ps_client.messages.PAGE_BYTES", 5 * (8 + 4 * 2))  # five rows a page
    job = begun(servers)
    ids = np.arange(23)
    job.takes_a_step(0, [2, 19])
    found = job.client.rows_of(0, ids)
    assert np.flatnonzero(found.any(1)).tolist() == [2, 19], "the step that was just taken is in them"
    assert found.shape == (23, 2) and job.client.rows_of(1, ids[:0]).shape == (0, 3)
