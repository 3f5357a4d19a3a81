# SPDX-License-Identifier: Apache-2.0
"""Servers and checkpoints: they write them, go back to them, and begin with those of other jobs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import server_of
from edl.ps.errors import Misplaced, Unavailable, Unreadable
from tests.support.ps.async_server import Start
from tests.support.ps.requests import RUN, SGD, UNIFORM, commit, pull, stage, start_generation, tables
from tests.support.ps.server_states import (
    begin,
    checkpoint,
    commit_manifest,
    content,
    copied,
    train,
    write_part,
)


def test_a_whole_checkpoint_replaces_the_log_before_it(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    server.mode.push(
        stage(1, 3).SerializeToString()
    )  # another rank is ahead of the one that writes the manifest
    checkpoint(server, 1, 3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server), "it is whole, though not committed yet"
    server.committed(pb.CommittedRequest(run_id=RUN, step=3, attempt="a"))
    assert [path.name for path in sorted((tmp_path / "log").glob("log-*"))] == ["log-000000000002"]
    for step in range(3, 6):
        copied(tmp_path, "killed")
        assert content(start("killed")) == content(server)
        train(server, step, step + 1)
    straight = begin(start("straight"))
    train(straight, 0, 6)
    assert content(server) == content(straight)


def test_after_that_the_step_before_it_cannot_be_undone_here_nor_after_a_kill(
    start: Start, tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    server.committed(pb.CommittedRequest(run_id=RUN, step=3, attempt="a"))
    copied(tmp_path, "killed")
    for one in (server, start("killed")):
        assert one.mode.start_generation(start_generation(2, 2, commit(1))).step == 3, (
            "the ring rolls back to the checkpoint"
        )


def test_a_checkpoint_of_an_undone_step_is_no_base(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    server.mode.start_generation(start_generation(2, 2, commit(1)))
    train(server, 2, 3, generation=2)
    server.committed(pb.CommittedRequest(run_id=RUN, step=3, attempt="a"))
    assert len(list((tmp_path / "log").glob("log-*"))) == 2
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


def test_all_go_back_to_a_checkpoint_and_make_the_same_of_it(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    train(server, 3, 5)
    expected = content(server)
    restore = pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="a")
    lost = start("lost")
    lost.declare(tables())
    for one in (server, lost):
        one.mode.start_generation(start_generation(2, 4))
        assert one.mode.restore(restore).step == 3
        train(one, 3, 5, generation=2)
        assert content(one)[2:] == expected[2:]
        assert one.mode.restore(restore).step == 5, "late: it is done"
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


def test_going_back_to_the_beginning_is_beginning_anew(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    server.mode.start_generation(start_generation(2, 7))
    position = server.mode.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=0))
    assert position.step == 0 and not any(len(table) for table in server.tables)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_takes_over_every_row_once(
    start: Start, tmp_path: Path, count: int
) -> None:
    whole = begin(start("whole"))
    train(whole, 0, 3)
    two = [begin(start(f"two-{n}", n, 2)) for n in range(2)]
    for index, server in enumerate(two):
        for step in range(3):
            for rank in (0, 1):
                request = stage(1, step, rank)
                for g, dim in zip(request.gradients, (4, 2), strict=True):
                    ids = np.frombuffer(g.ids, np.int64)
                    mine = server_of(ids, 2) == index
                    g.values = np.frombuffer(g.values, np.float32).reshape(-1, dim)[mine].tobytes()
                    g.ids = ids[mine].tobytes()
                server.mode.push(request.SerializeToString())
            server.pull(pull(1, step + 1, last=commit(step)))
    commit_manifest(two[0], 3, "b", [write_part(server, 1, 3, "b") for server in two])
    rows = {}
    for index in range(count):
        server = start(f"new-{count}-{index}", index, count)
        server.declare(tables())
        server.mode.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="b"))
        copy = server.tables[1].copy(3)
        assert (server_of(copy.ids, count) == index).all()
        for i, row, slots in zip(copy.ids.tolist(), copy.rows, copy.slots, strict=True):
            assert i not in rows
            rows[i] = row.tobytes() + slots.tobytes()
    copy = whole.tables[1].copy(3)
    expected = {
        i: r.tobytes() + s.tobytes() for i, r, s in zip(copy.ids.tolist(), copy.rows, copy.slots, strict=True)
    }
    assert rows == expected


@pytest.mark.parametrize("everything", [False, True])
def test_a_job_begins_with_the_rows_of_another_and_keeps_them(
    start: Start, tmp_path: Path, everything: bool
) -> None:
    other = begin(start("other"))
    train(other, 0, 3)
    checkpoint(other, 1, 3)
    theirs = other.tables[1].copy(3)
    order = np.argsort(theirs.ids)
    request = pb.RestoreRequest(
        run_id=RUN,
        generation=2,
        start=pb.Start(
            directory=str(tmp_path / "checkpoints"),
            step=3,
            attempt="a",
            everything=everything,
            tables=["item"],
        ),
    )
    servers = [start(f"new-{index}", index, 2) for index in range(2)]
    for server in servers:
        server.declare(tables())
        assert server.mode.restore(request).step == 0 and not server.position().empty
        assert not len(server.tables[0]), "a table that was not asked for has rows"
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "new-0", tmp_path / "killed")
    assert content(start("killed", 0, 2)) == content(servers[0])
    found = [server.tables[1].copy(0) for server in servers]
    ids = np.concatenate([copy.ids for copy in found])
    by_id = np.argsort(ids)
    np.testing.assert_array_equal(ids[by_id], theirs.ids[order])
    for name in ("rows", "slots"):
        values = np.concatenate([getattr(copy, name) for copy in found])[by_id]
        expected = getattr(theirs, name)[order]
        if name == "slots" and not everything:
            assert expected.any()
            expected = np.zeros_like(expected)  # as Adam begins
        np.testing.assert_array_equal(values, expected)
    train(servers[0], 0, 2, generation=2)


def test_rows_that_are_brought_one_by_one_are_there_once_and_outlive_the_process(
    start: Start, tmp_path: Path
) -> None:
    server = begin(start())
    ids, rows = np.array([5, -7]), np.arange(8, dtype=np.float32)
    request = pb.BeginRequest(
        run_id=RUN, generation=1, values=[pb.Gradients(table=0, ids=ids.tobytes(), values=rows.tobytes())]
    ).SerializeToString()
    server.mode.begin(request)
    server.mode.begin(request)
    assert server.pull(pull(1, 0, ids))[0].tolist() == rows.tolist() and len(server.tables[0]) == 2
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    train(server, 0, 1)
    server.pull(pull(1, 1, last=commit(0)))
    with pytest.raises(Misplaced):
        server.mode.begin(request)


def test_a_start_that_does_not_fit_is_refused_by_the_tables_name(start: Start, tmp_path: Path) -> None:
    other = begin(start("other"))
    checkpoint(other, 1, 0)
    server = start()
    server.declare(tables(pb.Table(name="item", dim=3, initializer=UNIFORM, optimizer=SGD)))
    for name, words in (("item", "'item' has rows of length 2, and .* length 3"), ("shop", "step 9")):
        step = 9 if name == "shop" else 0
        begins = pb.Start(directory=str(tmp_path / "checkpoints"), step=step, attempt="a", tables=[name])
        with pytest.raises(Unreadable, match=words):
            server.mode.restore(pb.RestoreRequest(run_id=RUN, generation=2, start=begins))
        assert server.position().empty


def test_a_checkpoint_that_cannot_be_read_leaves_the_server_empty_and_is_named(
    start: Start, tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    part = next((tmp_path / "checkpoints").glob("*/part-*"))
    os.truncate(part, part.stat().st_size - 1)
    server.mode.start_generation(start_generation(2, 9))
    with pytest.raises(Unavailable, match=part.name):
        server.mode.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="a"))
    assert server.position().empty
    with pytest.raises(Unavailable, match=r"there is no checkpoint of step .*, attempt 'other'"):
        server.mode.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="other"))
    copied(tmp_path, "killed")
    assert start("killed").position().empty


def test_rows_that_are_not_finite_are_not_kept(start: Start) -> None:
    server = begin(start())
    request = stage(1, 0)
    request.gradients[0].values = np.full(len(request.gradients[0].values) // 4, np.nan, np.float32).tobytes()
    server.mode.push(request.SerializeToString())
    server.pull(pull(1, 1, last=commit(0)))
    with pytest.raises(Exception, match=r"ps\.0\.0\.rows.* not finite"):
        write_part(server, 1, 1, "a")
