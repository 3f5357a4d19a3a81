# SPDX-License-Identifier: Apache-2.0
"""What a server whose steps come in any order refuses: it says why, and changes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Invalid, Misplaced, OutOfMemory, Unavailable
from tests.support.models import counting_steps as counting
from tests.support.ps.async_server import Start, begun, content, copied, push, steps, take
from tests.support.ps.requests import RUN, stage
from tests.support.ps.requests import tables as ring_tables
from tests.support.ps.server_states import write_part


def test_an_async_server_refuses_synchronous_calls_and_a_sync_server_asynchronous_ones(start: Start) -> None:
    server = begun(start())
    for call in (
        lambda: server.mode.push(stage(1, 0).SerializeToString()),
        lambda: server.pull(pb.PullRequest(run_id=RUN, generation=1, step=0)),
        lambda: write_part(server, 3, 0, "a"),
    ):
        with pytest.raises(Misplaced, match="mode=ps"):
            call()
    ring = start("ring")
    with pytest.raises(Misplaced, match="no tables are declared"):
        _ = ring.async_server
    ring.declare(ring_tables())
    with pytest.raises(Misplaced, match="mode=hybrid"):
        _ = ring.async_server
    with pytest.raises(Misplaced, match="they are of mode=hybrid, not of mode=ps"):
        server.declare(ring_tables())
    with pytest.raises(Misplaced, match="max_staleness is 3, not 0"):
        server.declare(counting.tables(max_staleness=3))
    with pytest.raises(Invalid, match="grads_to_wait"):
        start("bad").declare(counting.tables(grads_to_wait=-1))


def test_calls_of_a_stale_incarnation_and_invalid_calls_are_refused_and_change_nothing(start: Start) -> None:
    server = begun(start())
    push(server, 0)
    before = content(server)
    other = f"{RUN}/other"
    call = server.async_server
    for refused in (
        lambda: push(server, 1, incarnation=other),
        lambda: call.lease(pb.LeaseRequest(run_id=RUN, incarnation=other, most=1, limit=5)),
        lambda: call.drain(pb.DrainRequest(run_id=RUN, incarnation=other, step=1)),
        lambda: call.reschedule(pb.RescheduleRequest(run_id=RUN, incarnation=other, steps=steps(0, 1))),
        lambda: call.keep(pb.KeepRequest(run_id=RUN, incarnation=other, step=1, order=1)),
    ):
        with pytest.raises(Misplaced, match="stale incarnation 'run/other'"):
            refused()
    for wrong in (
        lambda: push(server, -1, gradients=[]),
        lambda: push(server, 1, gradients=[pb.Gradients(table=9)]),
        lambda: push(server, 1, gradients=[pb.Gradients(table=0, ids=bytes(8), values=bytes(4))]),
        lambda: take(server, 0, most=0),
        lambda: call.reschedule(
            pb.RescheduleRequest(run_id=RUN, incarnation=server.incarnation, steps=steps(3, 2))
        ),
        lambda: call.reschedule(
            pb.RescheduleRequest(run_id=RUN, incarnation=server.incarnation, steps=steps(3))
        ),
    ):
        with pytest.raises(Invalid):
            wrong()
    one = begun(start("one", 1, 2))
    with pytest.raises(Misplaced, match="server 0; this is server 1"):
        take(one, 0)
    assert content(server) == before


def test_more_rows_than_the_memory_holds_are_refused_before_anything_is_changed(start: Start) -> None:
    server = begun(start(memory_limit=1 << 20), grads_to_wait=2)
    push(server, 0)
    before = content(server)
    ids = np.arange(20_000)
    large = [counting.gradients(1, ids, np.zeros((len(ids), 1)))]
    with pytest.raises(OutOfMemory, match=r"server 0 .* 1 MiB"):
        push(server, 1, gradients=large)
    assert content(server) == before
    push(server, 1)
    assert server.version == 1


def test_a_full_disk_refuses_with_words_and_changes_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begun(start(), grads_to_wait=2)
    for step in (0, 1, 2):
        push(server, step)
    before, real = content(server), os.pwritev

    def full(file: int, pieces: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    incarnation, call = server.incarnation, server.async_server
    for refused in (
        lambda: push(server, 3),
        lambda: push(server, 0),
        lambda: call.drain(pb.DrainRequest(run_id=RUN, incarnation=incarnation, step=3)),
        lambda: call.reschedule(pb.RescheduleRequest(run_id=RUN, incarnation=incarnation, steps=steps(0, 2))),
        lambda: call.keep(pb.KeepRequest(run_id=RUN, incarnation=incarnation, step=3, order=1)),
        lambda: write_part(server, 0, 3, "a"),
    ):
        with pytest.raises(Unavailable, match=r"No space left.*nothing was changed"):
            refused()
        assert content(server) == before
    assert take(server, 5) == [3, 4]
    monkeypatch.setattr(os, "pwritev", real)
    push(server, 3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
