# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose servers or store fail, or are away: what the workers do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edl.checkpoints import CheckpointError, CheckpointFile, Store, Writing
from edl.contract.proto import edl_pb2 as pb
from edl.errors import StoreUnavailable
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.runtime.retry import tried_again
from tests.support.jobs.checkpoint_writers import LAYOUT, Writer, saves, write
from tests.support.jobs.workers import come_to_sum, ring_of


class OneServer:
    """A server that goes away so often before its part is written, and comes back unless it does not."""

    def __init__(self, store: Store, away: int, comes_back: bool = True):
        self.count, self._store, self._away, self._comes_back = 1, store, away, comes_back
        self.asked, self.committed_at = 0, list[int]()
        self.given_up = 0

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], list[CheckpointFile]]]:
        self.asked += 1
        if self.asked <= self._away:
            raise PartNotWritten("parameter server 0 (nowhere) did not write its part: UNAVAILABLE")
        return self._being_written(step, attempt, first)

    @contextmanager
    def _being_written(
        self, step: int, attempt: str, first: int
    ) -> Iterator[Callable[[], list[CheckpointFile]]]:
        try:
            yield lambda: [self._store.begin(step, attempt).write_part(first, first + 1, {})]
        except BaseException:
            self.given_up += 1
            raise

    def answer_within(self, seconds: float) -> bool:
        return self._comes_back

    def committed(self, step: int, attempt: str) -> None:
        self.committed_at.append(step)


def saved_with(server: Callable[[Store], OneServer], where: Path) -> tuple[OneServer, Writer]:
    """The worker that saves the model, and the server that has a part of the last checkpoint."""
    w = Writer(0, where, servers=server, changes={"checkpoint": {"seconds": 1000}})
    saves(w)
    assert isinstance(w.servers, OneServer)
    return w.servers, w


def test_a_server_that_goes_away_while_the_last_state_is_written_is_asked_again(tmp_path: Path) -> None:
    server, w = saved_with(lambda store: OneServer(store, away=2), tmp_path)
    (made,) = Store.open(str(tmp_path)).checkpoints()
    assert made.step == w.says("checkpointed", 0).step == 6
    assert not made.wrong()
    assert server.committed_at == [6]


@pytest.mark.parametrize(
    ("away", "comes_back", "asked"), [(1, False, 1), (9, True, 3)], ids=["not back", "again and again"]
)
def test_a_server_that_stays_away_is_not_asked_for_ever(
    tmp_path: Path, away: int, comes_back: bool, asked: int
) -> None:
    server, w = saved_with(lambda store: OneServer(store, away, comes_back), tmp_path)
    assert server.asked == asked
    assert "parameter server 0 (nowhere) did not write" in w.says("checkpoint_failed", 0).why
    assert Store.open(str(tmp_path)).checkpoints() == []


def test_a_store_that_fails_is_told_and_nothing_else_happens(tmp_path: Path) -> None:
    w = Writer(0, tmp_path / "a file")
    ring_of(w)
    come_to_sum(1, w)
    (tmp_path / "a file").touch()
    w.hears(1, checkpoint=pb.Checkpoint())
    w.ring.free()
    assert w.says("left_ring", 1).step == 6
    w.beside.does()
    failed = w.says("checkpoint_failed", 0)
    assert "a file: cannot write the checkpoint of step" in failed.why
    w.stop()
    assert (w.learner.weights == 1).all()


@pytest.mark.parametrize("alone", [False, True], ids=["in a ring", "with the last state"])
def test_a_worker_that_cannot_write_its_part_gives_up_those_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def fails(*_: Any) -> CheckpointFile:
        raise CheckpointError("disk full")

    monkeypatch.setattr(Writing, "write_part", fails)
    server: OneServer
    if alone:
        server, w = saved_with(lambda store: OneServer(store, away=0), tmp_path)
    else:
        w = Writer(0, tmp_path, servers=lambda store: OneServer(store, away=0))
        ring_of(w)
        come_to_sum(1, w)
        w.hears(1, checkpoint=pb.Checkpoint())
        come_to_sum(3, w)
        w.beside.does()
        w.ring.free()
        w.stop()
        assert isinstance(w.servers, OneServer)
        server = w.servers
    assert w.says("checkpoint_failed", 0).why == "disk full"
    assert (server.asked, server.given_up) == (1, 1)


class Away:
    """What reads a store that does not answer so often."""

    def __init__(self, times: float, error: type[CheckpointError] = StoreUnavailable):
        self.left, self.error = times, error

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.error("s3://b: cannot list the checkpoints: Slow Down")
        return "read"


def test_a_store_that_is_away_is_asked_again_and_one_that_refuses_is_not() -> None:
    told = list[str]()
    assert tried_again(Away(1), 60, told.append) == "read"
    assert told == ["s3://b: cannot list the checkpoints: Slow Down; it is tried again for 60 s"]
    with pytest.raises(StoreUnavailable, match=r"Slow Down \(tried for 0 s\)"):
        tried_again(Away(9), 0, told.append)
    with pytest.raises(StoreUnavailable):
        tried_again(Away(9), 60, told.append, must_end=lambda: True)
    refused = Away(9, CheckpointError)
    with pytest.raises(CheckpointError):
        tried_again(refused, 60, told.append)
    assert (refused.left, len(told)) == (8, 1)


def test_who_begins_waits_for_a_store_that_is_away_for_a_moment(
    pair: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pair, 2)
    new = Writer(3, tmp_path)
    away, listed = Away(1), Store.checkpoints
    monkeypatch.setattr(Store, "checkpoints", lambda store: listed(store) if away() else [])
    assert new.checkpoints.newest(LAYOUT) == (2, LAYOUT)
    away.left = 1
    assert new.checkpoints.restore(expected=2) is not None


def test_who_may_not_remove_old_checkpoints_has_written_the_new_ones(
    pair: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise CheckpointError("s3://b: cannot remove the checkpoint of step 2: Access Denied")

    monkeypatch.setattr(Store, "prune", refused)
    write(pair, 2)
    pair[-1].checkpoints._prune()  # after a different one
    said = [m for w in pair for m in w.said]
    assert not any(m.HasField("checkpoint_failed") for m in said)
    (warned,) = [m.warned.text for m in said if m.HasField("warned")]
    assert warned.startswith("old checkpoints are not removed, and take room: s3://b: cannot remove")
