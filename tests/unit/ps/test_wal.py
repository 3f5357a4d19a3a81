# SPDX-License-Identifier: Apache-2.0
"""A server that comes back: where it was, or empty; never anything in between."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Misplaced, Unavailable
from edl.ps.server import ParameterServer
from edl.ps.storage import wal as logs
from edl.ps.storage.records import FETCH, FETCHED
from tests.support.ps.async_server import Start
from tests.support.ps.requests import RUN, commit, pull, stage, start_generation, tables
from tests.support.ps.server_states import begin, content, copied, train, write_part

# --- coming back


def test_a_server_that_is_killed_comes_back_where_it_was(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    for step in range(6):
        for rank in (0, 1):
            server.mode.push(stage(1, step, rank).SerializeToString())
            copied(tmp_path, "killed")
            assert content(start("killed")) == content(server)
        server.pull(pull(1, step + 1, last=commit(step)))
        copied(tmp_path, "killed")
        assert content(start("killed")) == content(server)
    assert not server.position().empty


def test_a_log_with_an_impossible_transition_is_ignored(start: Start, tmp_path: Path) -> None:
    server, said = begin(start()), list[str]()
    server._storage.append(FETCH, pb.FetchRequest(run_id=RUN, generation=1).SerializeToString())
    server._storage.append(FETCHED)
    server._storage.append(FETCHED)
    copied(tmp_path, "killed")
    assert start("killed", warn=said.append).position().empty
    assert "has no transition for 'complete'" in said[0]


def test_an_undone_step_stays_undone(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 4)
    before = content(server)
    server.mode.push(stage(1, 4).SerializeToString())
    server.pull(pull(1, 5, last=commit(4)))
    server.mode.start_generation(start_generation(2, 4, commit(3)))
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert content(server)[2:] == before[2:]
    train(server, 4, 6, generation=2)
    straight = begin(start("straight"))
    train(straight, 0, 6)
    assert content(server)[2:] == content(straight)[2:]


def test_a_server_whose_log_is_gone_is_empty_and_takes_nothing(start: Start, tmp_path: Path) -> None:
    train(begin(start()), 0, 3)
    shutil.rmtree(tmp_path / "log")
    server = start()
    with pytest.raises(Misplaced, match="no tables are declared"):
        server.pull(pull(1, 3))
    assert server.declare(tables()).empty
    position = server.mode.start_generation(start_generation(2, 3, commit(2)))
    assert (position.generation, position.step, position.empty) == (2, 0, True)
    with pytest.raises(Misplaced, match="empty"):
        server.pull(pull(2, 3, last=commit(2)))


def test_a_log_of_another_run_server_or_format_does_not_count(start: Start, tmp_path: Path) -> None:
    train(begin(start()), 0, 3)
    said: list[str] = []
    for other in (
        lambda log: ParameterServer(0, 1, "another", log, warn=said.append),
        lambda log: ParameterServer(1, 2, RUN, log, warn=said.append),
    ):
        assert other(copied(tmp_path, "other")).position().empty
    assert len(said) == 1 and "another server" in said[0], "that one run follows another is no trouble"
    base = copied(tmp_path, "earlier") / "base.json"
    base.write_text(base.read_text().replace(', "format": 2', ""), "utf-8")  # as edl 0.1 wrote it
    assert start("earlier", warn=said.append).position().empty
    assert "has format 1, expected 2: another version of edl wrote it" in said[1]


def test_after_a_reboot_a_log_counts_only_if_it_was_closed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_torn_tail_is_cut_off_at_every_byte_and_the_log_goes_on(start: Start, tmp_path: Path) -> None:
    server = begin(start())
    train(server, 0, 1)
    before, size = content(server), segment(tmp_path / "log").stat().st_size
    server.mode.start_generation(start_generation(2, 1, commit(0)))
    after, whole = content(server), segment(tmp_path / "log").read_bytes()
    for length in range(size, len(whole) + 1):
        torn = segment(copied(tmp_path, "torn"))
        os.truncate(torn, length)
        found = start("torn")
        assert content(found) == (after if length == len(whole) else before), length
        assert torn.stat().st_size == (len(whole) if length == len(whole) else size)
    found.mode.start_generation(start_generation(3, 1))
    assert content(start("torn")) == content(found)


def test_a_changed_byte_anywhere_makes_the_server_empty_or_is_the_torn_end(
    start: Start, tmp_path: Path
) -> None:
    server = begin(start())
    server.mode.push(stage(1, 0).SerializeToString())
    server.pull(pull(1, 1, last=commit(0)))
    whole = segment(tmp_path / "log").read_bytes()
    positions = [*range(0, len(whole) - 120, 41), *range(len(whole) - 120, len(whole))]
    for at in positions:
        damaged = segment(copied(tmp_path, "damaged"))
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        said: list[str] = []
        assert start("damaged", warn=said.append).position().empty, at
        assert "is ignored" in said[0]


def test_a_missing_segment_or_base_makes_the_server_empty(start: Start, tmp_path: Path) -> None:
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


# --- a full disk, and a log that grows


def test_a_full_disk_refuses_with_words_and_changes_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begin(start())
    train(server, 0, 2)
    server.mode.push(stage(1, 2).SerializeToString())
    before, size = content(server), segment(tmp_path / "log").stat().st_size
    real = os.pwritev

    def short(file: int, pieces: Any, at: int) -> int:
        if at > size + 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [bytes(pieces[0])[:5]], at)

    monkeypatch.setattr(os, "pwritev", short)
    for call in (
        lambda: server.mode.push(stage(1, 2, 1).SerializeToString()),
        lambda: server.pull(pull(1, 3, last=commit(2))),
        lambda: server.mode.start_generation(start_generation(2, 2)),
    ):
        with pytest.raises(Unavailable, match=r"No space left.*nothing was changed"):
            call()
        assert content(server) == before
        assert segment(tmp_path / "log").stat().st_size == size
    monkeypatch.setattr(os, "pwritev", real)
    train(server, 2, 4)
    assert content(start("log")) == content(server)


def test_without_checkpoints_the_log_is_replaced_by_a_snapshot(start: Start, tmp_path: Path) -> None:
    server = begin(start(snapshot_bytes=1))
    train(server, 0, 3)
    while server.snapshot() is None:
        train(server, server.mode.state.step, server.mode.state.step + 1)
    capture = server._storage.snapshot
    assert capture is not None
    capture.copy()
    train(server, server.mode.state.step, server.mode.state.step + 1)
    before = server._log.nbytes
    server.use_snapshot(capture, server.write_snapshot(capture))
    assert server._log.nbytes < before
    assert len(list((tmp_path / "log").glob("log-*"))) == 1
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
