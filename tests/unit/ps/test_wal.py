# SPDX-License-Identifier: Apache-2.0
"""A server that comes back: where it was, or empty; never anything in between."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.checkpoints import Manifest, Store
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import server_of
from edl.ps.errors import Invalid, Misplaced, OutOfMemory, Unavailable, Unreadable
from edl.ps.server import Server
from edl.ps.storage import wal as logs
from tests.support.ps.requests import RUN, SGD, UNIFORM, commit, pull, stage, start_generation, tables

Content = tuple[Any, ...]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Server]:
    def make(directory: str = "log", index: int = 0, servers: int = 1, **more: Any) -> Server:
        return Server(index, servers, RUN, tmp_path / directory, str(tmp_path / "checkpoints"), **more)

    return make


def content(server: Server) -> Content:
    """All that is in a server, bit for bit, whatever the order."""
    found: list[Any] = [
        server.position().SerializeToString(),
        server.incarnation,
        sorted(server.steps.staged),
    ]
    for table in server.tables:
        copy = table.copy(server.steps.step)
        order = np.argsort(copy.ids)
        found += [
            getattr(copy, name)[order].tobytes() for name in ("ids", "steps", "counts", "rows", "slots")
        ]
    return tuple(found)


def begin(server: Server) -> Server:
    server.declare(tables())
    server.start_generation(start_generation(1, 0))
    return server


def train(server: Server, start: int, stop: int, generation: int = 1) -> None:
    for step in range(start, stop):
        for rank in (1, 0):
            server.stage(stage(generation, step, rank).SerializeToString())
        server.pull(pull(generation, step + 1, last=commit(step, skipped=step % 5 == 4)))


def copied(tmp_path: Path, name: str) -> Path:
    """As a machine finds it when the process is killed now."""
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    return Path(shutil.copytree(tmp_path / "log", tmp_path / name))


def checkpoint(server: Server, generation: int, step: int, attempt: str = "a") -> None:
    """The part of one server alone, and the manifest."""
    part = write_part(server, generation, step, attempt)
    commit_manifest(server, step, attempt, [part])


def write_part(server: Server, generation: int, step: int, attempt: str) -> Any:
    request = pb.WritePartRequest(
        run_id=RUN, generation=generation, step=step, attempt=attempt, index=server.index, of=server.servers
    )
    capture = server.capture(request)
    capture.copy()
    return server.write(capture, request)


def commit_manifest(server: Server, step: int, attempt: str, found: list[Any]) -> None:
    Store.open(server._storage.checkpoints).begin(step, attempt).commit(
        Manifest(
            step=step,
            run=RUN,
            attempt=attempt,
            epoch=0,
            records=0,
            model="",
            variables=(),
            parts=tuple(found),
            state={"servers": {"parts": [part.name for part in found], "count": len(found)}},
        )
    )


# --- coming back


def test_a_server_that_is_killed_comes_back_where_it_was(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    for step in range(6):
        for rank in (0, 1):
            server.stage(stage(1, step, rank).SerializeToString())
            copied(tmp_path, "killed")
            assert content(start("killed")) == content(server)
        server.pull(pull(1, step + 1, last=commit(step)))
        copied(tmp_path, "killed")
        assert content(start("killed")) == content(server)
    assert not server.position().empty


def test_an_undone_step_stays_undone(start: Callable[..., Server], tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 4)
    before = content(server)
    server.stage(stage(1, 4).SerializeToString())
    server.pull(pull(1, 5, last=commit(4)))
    server.start_generation(start_generation(2, 4, commit(3)))
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert content(server)[2:] == before[2:]
    train(server, 4, 6, generation=2)
    straight = begin(start("straight"))
    train(straight, 0, 6)
    assert content(server)[2:] == content(straight)[2:]


def test_a_server_whose_log_is_gone_is_empty_and_takes_nothing(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    train(begin(start()), 0, 3)
    shutil.rmtree(tmp_path / "log")
    server = start()
    with pytest.raises(Misplaced, match="no tables are declared"):
        server.pull(pull(1, 3))
    assert server.declare(tables()).empty
    position = server.start_generation(start_generation(2, 3, commit(2)))
    assert (position.generation, position.step, position.empty) == (2, 0, True)
    with pytest.raises(Misplaced, match="empty"):
        server.pull(pull(2, 3, last=commit(2)))


def test_a_log_of_another_run_or_place_does_not_count(start: Callable[..., Server], tmp_path: Path) -> None:
    train(begin(start()), 0, 3)
    said: list[str] = []
    for other in (
        lambda log: Server(0, 1, "another", log, warn=said.append),
        lambda log: Server(1, 2, RUN, log, warn=said.append),
    ):
        assert other(copied(tmp_path, "other")).position().empty
    assert len(said) == 1 and "another server" in said[0], "that one run follows another is no trouble"


def test_after_a_reboot_a_log_counts_only_if_it_was_closed(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begin(start())
    train(server, 0, 3)
    copied(tmp_path, "crashed")
    expected = content(server)
    server.close()
    copied(tmp_path, "closed")
    monkeypatch.setattr(logs, "boot_id", lambda: "another")
    said: list[str] = []
    assert start("crashed", warn=said.append).position().empty
    assert "restarted" in said[0]
    assert content(start("closed")) == expected


# --- damage


def test_a_torn_tail_is_cut_off_at_every_byte_and_the_log_goes_on(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 1)
    before, size = content(server), segment(tmp_path / "log").stat().st_size
    server.start_generation(start_generation(2, 1, commit(0)))
    after, whole = content(server), segment(tmp_path / "log").read_bytes()
    for length in range(size, len(whole) + 1):
        torn = segment(copied(tmp_path, "torn"))
        os.truncate(torn, length)
        found = start("torn")
        assert content(found) == (after if length == len(whole) else before), length
        assert torn.stat().st_size == (len(whole) if length == len(whole) else size)
    found.start_generation(start_generation(3, 1))
    assert content(start("torn")) == content(found)


def test_a_changed_byte_anywhere_makes_the_server_empty_or_is_the_torn_end(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    server.stage(stage(1, 0).SerializeToString())
    server.pull(pull(1, 1, last=commit(0)))
    whole = segment(tmp_path / "log").read_bytes()
    positions = [*range(0, len(whole) - 120, 41), *range(len(whole) - 120, len(whole))]
    for at in positions:
        damaged = segment(copied(tmp_path, "damaged"))
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        said: list[str] = []
        assert start("damaged", warn=said.append).position().empty, at
        assert "is ignored" in said[0]


def test_a_missing_segment_or_base_makes_the_server_empty(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 2)
    write_part(server, 1, 2, "a")
    train(server, 2, 3)
    names = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert names == ["base.json", "log-000000000001", "log-000000000002"]
    for name in names[:2]:
        (copied(tmp_path, "less") / name).unlink()
        assert start("less").position().empty
    copied(tmp_path, "whole")
    assert content(start("whole")) == content(server)


def segment(directory: Path) -> Path:
    return sorted(directory.glob("log-*"))[-1]


# --- a full disk


def test_a_full_disk_refuses_with_words_and_changes_nothing(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begin(start())
    train(server, 0, 2)
    server.stage(stage(1, 2).SerializeToString())
    before, size = content(server), segment(tmp_path / "log").stat().st_size
    real = os.pwritev

    def short(file: int, pieces: Any, at: int) -> int:
        if at > size + 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [bytes(pieces[0])[:5]], at)

    monkeypatch.setattr(os, "pwritev", short)
    for call in (
        lambda: server.stage(stage(1, 2, 1).SerializeToString()),
        lambda: server.pull(pull(1, 3, last=commit(2))),
        lambda: server.start_generation(start_generation(2, 2)),
    ):
        with pytest.raises(Unavailable, match=r"No space left.*nothing was changed"):
            call()
        assert content(server) == before
        assert segment(tmp_path / "log").stat().st_size == size
    monkeypatch.setattr(os, "pwritev", real)
    train(server, 2, 4)
    assert content(start("log")) == content(server)


# --- checkpoints


def test_a_whole_checkpoint_replaces_the_log_before_it(start: Callable[..., Server], tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    server.stage(stage(1, 3).SerializeToString())  # another rank is ahead of the one that writes the manifest
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
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    server.committed(pb.CommittedRequest(run_id=RUN, step=3, attempt="a"))
    copied(tmp_path, "killed")
    for one in (server, start("killed")):
        assert one.start_generation(start_generation(2, 2, commit(1))).step == 3, (
            "the ring rolls back to the checkpoint"
        )


def test_a_checkpoint_of_an_undone_step_is_no_base(start: Callable[..., Server], tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    server.start_generation(start_generation(2, 2, commit(1)))
    train(server, 2, 3, generation=2)
    server.committed(pb.CommittedRequest(run_id=RUN, step=3, attempt="a"))
    assert len(list((tmp_path / "log").glob("log-*"))) == 2
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


def test_all_go_back_to_a_checkpoint_and_make_the_same_of_it(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    train(server, 3, 5)
    expected = content(server)
    restore = pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="a")
    lost = start("lost")
    lost.declare(tables())
    for one in (server, lost):
        one.start_generation(start_generation(2, 4))
        assert one.restore(restore).step == 3
        train(one, 3, 5, generation=2)
        assert content(one)[2:] == expected[2:]
        assert one.restore(restore).step == 5, "late: it is done"
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


def test_going_back_to_the_beginning_is_beginning_anew(start: Callable[..., Server], tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 3)
    server.start_generation(start_generation(2, 7))
    position = server.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=0))
    assert position.step == 0 and not any(len(table) for table in server.tables)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_takes_over_every_row_once(
    start: Callable[..., Server], tmp_path: Path, count: int
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
                server.stage(request.SerializeToString())
            server.pull(pull(1, step + 1, last=commit(step)))
    commit_manifest(two[0], 3, "b", [write_part(server, 1, 3, "b") for server in two])
    rows = {}
    for index in range(count):
        server = start(f"new-{count}-{index}", index, count)
        server.declare(tables())
        server.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="b"))
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
    start: Callable[..., Server], tmp_path: Path, everything: bool
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
        assert server.restore(request).step == 0 and not server.position().empty
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
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    ids, rows = np.array([5, -7]), np.arange(8, dtype=np.float32)
    request = pb.LoadRequest(
        run_id=RUN, generation=1, values=[pb.Gradients(table=0, ids=ids.tobytes(), values=rows.tobytes())]
    ).SerializeToString()
    server.load(request)
    server.load(request)
    assert server.pull(pull(1, 0, ids))[0].tolist() == rows.tolist() and len(server.tables[0]) == 2
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    train(server, 0, 1)
    server.pull(pull(1, 1, last=commit(0)))
    with pytest.raises(Misplaced):
        server.load(request)


def test_a_start_that_does_not_fit_is_refused_by_the_tables_name(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    other = begin(start("other"))
    checkpoint(other, 1, 0)
    server = start()
    server.declare(tables(pb.Table(name="item", dim=3, initializer=UNIFORM, optimizer=SGD)))
    for name, words in (("item", "'item' has rows of length 2, and .* length 3"), ("shop", "step 9")):
        step = 9 if name == "shop" else 0
        begins = pb.Start(directory=str(tmp_path / "checkpoints"), step=step, attempt="a", tables=[name])
        with pytest.raises(Unreadable, match=words):
            server.restore(pb.RestoreRequest(run_id=RUN, generation=2, start=begins))
        assert server.position().empty


def test_a_checkpoint_that_cannot_be_read_leaves_the_server_empty_and_is_named(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start())
    train(server, 0, 3)
    checkpoint(server, 1, 3)
    part = next((tmp_path / "checkpoints").glob("*/part-*"))
    os.truncate(part, part.stat().st_size - 1)
    server.start_generation(start_generation(2, 9))
    with pytest.raises(Unavailable, match=part.name):
        server.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="a"))
    assert server.position().empty
    with pytest.raises(Unavailable, match=r"there is no checkpoint of step .*, attempt 'other'"):
        server.restore(pb.RestoreRequest(run_id=RUN, generation=2, step=3, attempt="other"))
    copied(tmp_path, "killed")
    assert start("killed").position().empty


def test_rows_that_are_not_finite_are_not_kept(start: Callable[..., Server]) -> None:
    server = begin(start())
    request = stage(1, 0)
    request.gradients[0].values = np.full(len(request.gradients[0].values) // 4, np.nan, np.float32).tobytes()
    server.stage(request.SerializeToString())
    server.pull(pull(1, 1, last=commit(0)))
    with pytest.raises(Exception, match=r"ps\.0\.0\.rows.* not finite"):
        write_part(server, 1, 1, "a")


def test_without_checkpoints_the_log_is_replaced_by_a_snapshot(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = begin(start(snapshot_bytes=1))
    train(server, 0, 3)
    while server.snapshot() is None:
        train(server, server.steps.step, server.steps.step + 1)
    capture = server._storage.snapshot
    assert capture is not None
    capture.copy()
    train(server, server.steps.step, server.steps.step + 1)
    before = server._log.nbytes
    server.use_snapshot(capture, server.write_snapshot(capture))
    assert server._log.nbytes < before
    assert len(list((tmp_path / "log").glob("log-*"))) == 1
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


# --- what is refused


def test_other_tables_than_the_declared_ones_are_refused_by_what_differs(
    start: Callable[..., Server],
) -> None:
    server = begin(start())
    other = tables()
    other.tables[1].dim = 3
    with pytest.raises(Misplaced, match="'item': dim is 3, not 2"):
        server.declare(other)
    with pytest.raises(Misplaced, match="seed is 8, not 7"):
        server.declare(tables(seed=8))
    with pytest.raises(Misplaced, match="run"):
        server.declare(pb.Tables(run_id="other"))
    with pytest.raises(Invalid, match="each name once"):
        start("fresh").declare(tables(tables().tables[0], tables().tables[0]))


def test_gradients_that_do_not_fit_their_table_are_refused(start: Callable[..., Server]) -> None:
    server = begin(start())
    for change in (
        lambda g: setattr(g, "values", g.values[4:]),
        lambda g: setattr(g, "ids", g.ids[1:]),
        lambda g: setattr(g, "table", 2),
        lambda g: setattr(g, "table", 1),
    ):
        request = stage(1, 0)
        change(request.gradients[0])
        with pytest.raises(Invalid):
            server.stage(request.SerializeToString())
    whole = stage(1, 0).SerializeToString()
    for raw in (
        whole[:-1],
        b"\xff" + whole,
        pb.StageRequest(run_id=RUN).SerializeToString() + b"\x2a\x01\x0b",
    ):
        with pytest.raises(Invalid, match="cannot be read"):
            server.stage(raw)
    assert not server.steps.staged


def test_more_rows_than_the_memory_holds_are_refused_before_anything_is_changed(
    start: Callable[..., Server],
) -> None:
    server = begin(start(memory_limit=2 << 20))
    ids = np.arange(20_000)
    request = pb.StageRequest(
        run_id=RUN,
        generation=1,
        step=0,
        gradients=[
            pb.Gradients(table=0, ids=ids.tobytes(), values=np.zeros((len(ids), 4), np.float32).tobytes())
        ],
    )
    before = content(server)
    with pytest.raises(OutOfMemory, match=r"server 0 .* 2 MiB: use more servers \(ps\.servers\)"):
        server.stage(request.SerializeToString())
    assert content(server) == before
    train(server, 0, 30)  # with what fits it goes on
    assert server.describe(0.0).memory < 2 << 20
