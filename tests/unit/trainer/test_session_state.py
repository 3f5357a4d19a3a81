# SPDX-License-Identifier: Apache-2.0
"""What a worker reports to a new master: `trainer.session.state`."""

from __future__ import annotations

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.session.state import SessionState

DATA = pb.Layout(records=100, block=7, shards=64)


def said(generation: int = 0, **what: object) -> pb.FromWorker:
    return pb.FromWorker(generation=generation, **what)  # type: ignore[arg-type]


def a_ready_worker() -> SessionState:
    told = SessionState()
    assert not told.ready
    told.note(said(ready=pb.Ready(layout=DATA)))
    assert told.ready
    return told


def test_one_that_was_in_no_ring_tells_how_its_records_lie() -> None:
    assert a_ready_worker().resume() == pb.Resume(layout=DATA)


def test_the_sample_loss_is_reported_again_if_there_was_one() -> None:
    told = SessionState()
    found = pb.SampleLoss(loss=0.0, tolerance=0.001)
    told.note(said(ready=pb.Ready(layout=DATA, sample_loss=found)))
    assert told.resume() == pb.Resume(layout=DATA, sample_loss=found)
    assert not a_ready_worker().resume().HasField("sample_loss")


def test_one_in_a_ring_tells_of_it() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    assert told.resume() == pb.Resume(layout=DATA, members=(0, 2))
    told.note(said(7, joined_ring=pb.JoinedRing(step=3)))
    assert told.resume() == pb.Resume(layout=DATA, members=(0, 2), joined=True)
    assert told.generation == 7


def test_what_it_said_of_an_older_ring_is_not_said_of_this_one() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    told.note(said(6, joined_ring=pb.JoinedRing(step=3)))
    out = pb.LeftRing(step=3, has_state=True)
    told.note(said(6, left_ring=out))
    assert told.resume() == pb.Resume(layout=DATA, members=(0, 2), left_ring=out)


def test_one_whose_reads_have_returned_since_it_left_can_make_steps() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    told.note(said(7, left_ring=pb.LeftRing(step=9, reads=True)))
    assert told.resume().left_ring.reads
    told.note(said(records_read=pb.RecordsRead()))
    assert not told.resume().left_ring.reads


def test_when_it_has_left_what_it_said_then_counts_until_the_next_time() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    told.note(said(7, joined_ring=pb.JoinedRing(step=3)))
    out = pb.LeftRing(step=9, has_state=True)
    told.note(said(7, left_ring=out))
    assert told.resume() == pb.Resume(layout=DATA, members=(0, 2), joined=True, left=True, left_ring=out)
    told.form(8, (0,))
    assert told.resume() == pb.Resume(layout=DATA, members=(0,), left_ring=out)
