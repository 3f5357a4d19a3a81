# SPDX-License-Identifier: Apache-2.0
"""What a worker reports to a new master: `trainer.session.state`."""

from __future__ import annotations

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.session.state import REPEATED, REPEATED_IN_RING, SessionState

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
    told.note(said(ready=pb.Ready(layout=DATA, digests={"train": "a"})))
    assert told.resume() == pb.Resume(layout=DATA, digests={"train": "a"})
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


# The messages that a new master does not need to receive again: `resume` has their contents ...
IN_RESUME = {"ready", "joined_ring", "left_ring", "records_read"}
# ... or the worker says them again in any case: at intervals, or when the new master orders it ...
SAID_AGAIN = {"hello", "resume", "heartbeat", "finished", "history", "rows_lost"}
# ... or they are about an attempt that ends with its master, and is begun anew.
OF_AN_ATTEMPT = {"addresses", "key_value", "checkpoint_part", "checkpoint_failed", "checkpointed"}


def test_each_kind_of_message_is_one_that_a_new_master_hears_again_or_does_not_need() -> None:
    kinds = [field.name for field in pb.FromWorker.DESCRIPTOR.oneofs_by_name["body"].fields]
    sorts = [REPEATED, REPEATED_IN_RING, IN_RESUME, SAID_AGAIN, OF_AN_ATTEMPT]
    assert sorted(kinds) == sorted(kind for sort in sorts for kind in sort)


def test_what_a_master_may_not_have_heard_is_said_to_the_next_one_and_the_one_after() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    reports = [
        said(warned=pb.Warned(text="the metric is not exact")),
        said(warm_started=pb.WarmStarted(text="m.keras")),
        said(7, stepped=pb.Stepped(step=4, redone_records=7)),
        said(7, bad_records=pb.BadRecords(epoch=0, records={3: "no number"})),
        said(7, bad_records=pb.BadRecords(epoch=0, records={9: "no number"})),
        said(7, epoch_ended=pb.EpochEnded(epochs=1)),
        said(7, evaluated=pb.Evaluated(step=4, split="test")),
        said(leaving=pb.Leaving(why="SIGTERM")),
        said(saved=pb.Saved(model="model.keras")),
        said(failed=pb.Failed(why="ValueError: bad")),
    ]
    for message in reports:
        told.note(message)
    assert told.reports() == reports == told.reports()
    assert told.resume().leaving == "SIGTERM"


def test_the_last_report_about_a_thing_replaces_the_one_before() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    for epochs in 1, 2:
        told.note(said(7, epoch_ended=pb.EpochEnded(epochs=epochs)))
        told.note(said(warned=pb.Warned(text="the metric is not exact")))
    assert [message.WhichOneof("body") for message in told.reports()] == ["epoch_ended", "warned"]
    assert told.reports()[0].epoch_ended.epochs == 2


def test_reports_about_a_ring_end_with_it() -> None:
    told = a_ready_worker()
    told.form(7, (0, 2))
    told.note(said(6, stepped=pb.Stepped(step=3)))
    assert told.reports() == []
    told.note(said(7, stepped=pb.Stepped(step=4)))
    told.note(said(leaving=pb.Leaving(why="SIGTERM")))
    told.form(8, (0,))
    assert [message.WhichOneof("body") for message in told.reports()] == ["leaving"]


def test_a_model_that_was_built_is_reported_until_the_worker_is_ready() -> None:
    told = SessionState()
    told.note(said(built=pb.Built(tables=2)))
    assert told.reports() == [said(built=pb.Built(tables=2))]
    told.note(said(ready=pb.Ready(layout=DATA, tables=2)))
    assert told.reports() == []
