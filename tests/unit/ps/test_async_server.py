# SPDX-License-Identifier: Apache-2.0
"""A server whose steps come in any order: each counts once, as Keras would apply it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import server_of
from edl.ps.errors import Misplaced
from edl.ps.server import ParameterServer
from tests.support.models import counting_steps as counting
from tests.support.ps.async_server import (
    STEPS,
    Start,
    begin,
    begun,
    content,
    copied,
    counts,
    expect,
    push,
    steps,
)
from tests.support.ps.requests import RUN
from tests.support.ps.server_states import commit_manifest, write_part

# --- a job begins with the rows of another


def page(
    number: int, ids: Any, more: bool = True, attempt: str = "one", start: pb.Start | None = None
) -> bytes:
    """Rows of `user` with the values of their ids; with the last page come the dense places."""
    rows = np.array(ids, np.int64)
    values = [counting.gradients(1, rows, rows[:, None])] if more else list(counting.begin(STEPS).values)
    request = pb.BeginRequest(run_id=RUN, values=values, attempt=attempt, page=number, more=more, start=start)
    return request.SerializeToString()


def user(server: ParameterServer, ids: list[int]) -> list[float]:
    asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=1, ids=np.array(ids, np.int64).tobytes())])
    return list(server.pull(asked)[0].tolist())


def test_rows_that_a_job_begins_with_are_there_with_the_last_page_or_not_at_all(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    server.declare(counting.tables())
    calls = server.async_server
    calls.begin(page(0, [5, 7]))
    assert calls.begin(page(1, [9])).empty and calls.begin(page(1, [9])).empty, "it came twice"
    copied(tmp_path, "killed")
    half = start("killed")
    assert half.position().empty and not len(half.tables[1])
    with pytest.raises(Misplaced, match="page 2"):
        half.async_server.begin(page(2, [], more=False))
    with pytest.raises(Misplaced, match="another worker"):
        calls.begin(page(2, [], more=False, attempt="other"))
    for _ in range(2):
        assert not calls.begin(page(2, [], more=False)).empty
    assert user(server, [5, 6, 7, 9]) == [5, 0, 7, 9]
    push(server, 2)  # its ids are 6, 7 and 8
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert user(server, [5, 6, 7, 9]) == [5, 1, 8, 9]


def test_pages_of_another_worker_begin_anew(start: Start) -> None:
    server = start()
    server.declare(counting.tables())
    server.async_server.begin(page(0, [5, 7]))
    server.async_server.begin(page(0, [9], attempt="other"))
    server.async_server.begin(page(1, [], more=False, attempt="other"))
    assert user(server, [5, 7, 9]) == [0, 0, 9]


def test_servers_of_any_number_read_the_rows_of_another_jobs_checkpoint(start: Start, tmp_path: Path) -> None:
    others = [begun(start(f"other-{index}", index, 2)) for index in range(2)]
    for other in others:
        for step in range(4):
            push(other, step)
    parts = [write_part(other, 0, 4, "a") for other in others]
    commit_manifest(others[0], 4, "a", parts)
    server = start("new")
    server.declare(counting.tables())
    where = str(tmp_path / "checkpoints")
    server.async_server.begin(
        page(0, [], start=pb.Start(directory=where, step=4, attempt="a", tables=["user"]))
    )
    server.async_server.begin(page(1, [], more=False))
    shutil.rmtree(tmp_path / "checkpoints")
    assert counts(server) == ([0.0] * STEPS, expect(range(4))[1]), "dense weights come with the last page"
    shutil.copytree(tmp_path / "new", tmp_path / "killed")
    assert content(start("killed")) == content(server)


# --- each step counts once


def test_a_step_counts_once_however_often_it_comes_and_in_whatever_order(start: Start) -> None:
    server = begun(start())
    order = [step for step in range(STEPS) for _ in range(1 + step % 3)]
    random.Random(3).shuffle(order)
    for step in order:
        said = push(server, step, version=0)
    assert counts(server) == expect(range(STEPS))
    assert (said.version, said.step, said.accepted) == (STEPS, STEPS, STEPS)
    assert said.repeated == len(order) - STEPS
    assert said.records == 3 * STEPS and said.loss == 2.0 * 3 * STEPS


def test_the_first_values_are_right_and_nobody_elses_change_them(start: Start) -> None:
    server = start()
    server.declare(counting.tables())
    assert server.position().empty
    request = counting.begin(STEPS)
    request.values[0].values = np.arange(STEPS, dtype=np.float32).tobytes()
    incarnation = server.async_server.begin(request.SerializeToString()).incarnation
    push(server, 3)
    again = begin(server)
    assert again.incarnation == incarnation and again.version == 1 and not again.empty
    expected = np.arange(STEPS, dtype=np.float32)
    expected[3] += 1
    assert server.pull(counting.pull(STEPS))[0].tolist() == expected.tolist()


def test_a_step_that_was_skipped_counts_as_made_and_changes_nothing(start: Start) -> None:
    server = begun(start())
    said = push(server, 0, skipped=True, loss=float("nan"))
    assert (said.step, said.version, said.records, said.loss) == (1, 0, 0, 0.0)
    assert counts(server) == expect([])
    push(server, 0)
    assert counts(server) == expect([])


def test_rows_come_with_the_number_of_their_updates(start: Start) -> None:
    server = begun(start())
    assert server.version == 0
    push(server, 5)
    push(server, 2)
    assert server.version == 2 and server.describe(0.0).accepted == steps(2, 3, 5, 6)


# --- how they are taken


def test_synchronous_updates_are_the_mean_of_so_many_steps_and_a_drain_applies_the_rest(
    start: Start,
) -> None:
    server = begun(start(), grads_to_wait=4)
    for number, step in enumerate((3, 1, 2)):
        said = push(server, step)
        assert (said.version, said.accepted) == (0, number + 1)
    assert counts(server) == expect([])
    said = push(server, 9)
    assert said.version == 1
    dense, _ = counts(server)
    assert [dense[step] for step in (1, 2, 3, 9)] == [0.25] * 4
    push(server, 0)
    push(server, 4)
    push(server, 20)
    request = pb.DrainRequest(run_id=RUN, incarnation=server.incarnation, step=5)
    said = server.async_server.drain(request)
    assert said.version == 2
    dense, _ = counts(server)
    assert [dense[step] for step in (0, 4, 20)] == [0.5, 0.5, 0.0], "that one is of the next async phase"
    assert server.async_server.drain(request).version == 2
    with pytest.raises(Misplaced, match=r"lacks the steps \[5, 9\): expected all below 10"):
        server.async_server.drain(pb.DrainRequest(run_id=RUN, incarnation=server.incarnation, step=10))


def test_a_step_of_weights_that_are_too_old_is_refused_and_can_be_made_again(start: Start) -> None:
    server = begun(start(), max_staleness=2)
    for step in range(3):
        push(server, step)
    assert push(server, 3, version=0).refused
    assert counts(server) == expect(range(3)) and server.async_server.progress().accepted == 3
    assert not push(server, 2, version=0).refused, "it is there"
    assert not push(server, 4, version=0, skipped=True).refused, "it changes nothing"
    assert not push(server, 3, version=1).refused
    assert counts(server) == expect(range(4))


def test_the_learning_rate_is_divided_by_the_age_of_the_weights(start: Start, tmp_path: Path) -> None:
    server = begun(start(), scale_rate=True)
    for step in range(4):
        push(server, step, version=0)
    dense, rows = counts(server)
    assert dense[:4] == rows[:4]
    assert np.allclose(dense[:4], [1, 1, 1 / 2, 1 / 3])
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


# --- what is kept


def test_the_newest_of_what_is_kept_stays_and_the_loss_is_of_the_steps_since(start: Start) -> None:
    server = begun(start())
    assert server.async_server.kept.ledger == b""
    for step in range(3):
        push(server, step)

    def keep(order: int, ledger: bytes) -> pb.Progress:
        request = pb.KeepRequest(
            run_id=RUN, incarnation=server.incarnation, step=3, order=order, ledger=ledger
        )
        return server.async_server.keep(request)

    assert keep(2, b"two").records == 0
    push(server, 3)
    assert keep(1, b"one").records == 3
    assert keep(2, b"again").records == 3, "it came twice"
    kept = server.async_server.kept
    assert (kept.ledger, kept.order, kept.step) == (b"two", 2, 3)


# --- as Keras does it


@pytest.mark.parametrize(
    ("optimizer", "exact"),
    [
        (lambda: keras.optimizers.SGD(0.3), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), False),
        (lambda: keras.optimizers.Adagrad(0.1), False),
        (lambda: keras.optimizers.Adam(0.01), False),
        (lambda: keras.optimizers.Ftrl(0.1), False),
    ],
)
def test_one_workers_dense_variable_is_what_keras_makes_of_it(
    start: Start, optimizer: Any, exact: bool
) -> None:
    ours = optimizer()
    server = start()
    text = json.dumps(keras.optimizers.serialize(ours))
    server.declare(counting.tables(text))
    rng = np.random.default_rng(2)
    first = rng.normal(size=(STEPS // counting.DIM, counting.DIM)).astype(np.float32)
    ids = np.arange(len(first))
    request = pb.BeginRequest(run_id=RUN, values=[counting.gradients(0, ids, first)])
    server.async_server.begin(request.SerializeToString())
    theirs = keras.Variable(first)
    rate = float(ours.learning_rate)
    for step in range(20):
        change = rng.normal(size=first.shape).astype(np.float32)
        ours.apply([keras.ops.convert_to_tensor(change)], [theirs])
        push(server, step, learning_rate=rate, gradients=[counting.gradients(0, ids, change)])
    asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=0, ids=ids.tobytes())])
    found, expected = server.pull(asked)[0].reshape(first.shape), np.asarray(theirs)
    if exact:
        assert found.tobytes() == expected.tobytes()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rows_of_several_servers_are_those_of_one(start: Start) -> None:
    one, three = begun(start("one")), [begun(start(f"three-{i}", i, 3)) for i in range(3)]
    for step in range(STEPS):
        for server in (one, *three):
            push(server, step)
    assert counts(one) == counts(*three) == expect(range(STEPS))
    assert all((server_of(server.tables[1].copy(0).ids, 3) == server.index).all() for server in three)


# --- forgetting


def test_rows_are_admitted_and_forgotten_by_the_servers_own_updates(start: Start, tmp_path: Path) -> None:
    server = start()
    tables = counting.tables()
    tables.tables[1].min_count, tables.tables[1].ttl_steps = 2, 10
    server.declare(tables)
    begin(server)

    def learn(step: int, ids: Any) -> None:
        ids = np.asarray(ids)
        push(server, step, gradients=[counting.gradients(1, ids, -np.ones((len(ids), 1)))])

    def row(id: int) -> float:
        asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=1, ids=np.array([id]).tobytes())])
        return float(server.pull(asked)[0][0])

    learn(20, [1])
    assert row(1) == 0.0
    learn(7, [1])
    assert row(1) == 1.0, "the second step that has it"
    for step in range(8, 17):
        learn(step, [2])
    assert row(1) == 1.0
    learn(2, [2])
    learn(3, [2])
    assert row(1) == 0.0, "no update has had it for so long"
    assert row(2) == 10.0
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
