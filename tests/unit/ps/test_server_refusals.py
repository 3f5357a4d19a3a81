# SPDX-License-Identifier: Apache-2.0
"""What a server refuses in words: tables, gradients and rows that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Invalid, Misplaced, OutOfMemory
from tests.support.ps.async_server import Start
from tests.support.ps.requests import RUN, stage, tables
from tests.support.ps.server_states import begin, content, train


def test_other_tables_than_the_declared_ones_are_refused_by_what_differs(
    start: Start,
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


def test_gradients_that_do_not_fit_their_table_are_refused(start: Start) -> None:
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
            server.mode.push(request.SerializeToString())
    whole = stage(1, 0).SerializeToString()
    for raw in (
        whole[:-1],
        b"\xff" + whole,
        pb.PushRequest(run_id=RUN).SerializeToString() + b"\x3a\x01\x0b",
    ):
        with pytest.raises(Invalid, match="cannot be read"):
            server.mode.push(raw)
    assert not server.mode.state.staged


def test_more_rows_than_the_memory_holds_are_refused_before_anything_is_changed(
    start: Start,
) -> None:
    server = begin(start(memory_limit=2 << 20))
    ids = np.arange(20_000)
    request = pb.PushRequest(
        run_id=RUN,
        generation=1,
        step=0,
        gradients=[
            pb.Gradients(table=0, ids=ids.tobytes(), values=np.zeros((len(ids), 4), np.float32).tobytes())
        ],
    )
    before = content(server)
    with pytest.raises(OutOfMemory, match=r"server 0 .* 2 MiB: use more servers \(ps\.servers\)"):
        server.mode.push(request.SerializeToString())
    assert content(server) == before
    train(server, 0, 30)  # with what fits it goes on
    assert server.describe(0.0).memory < 2 << 20
