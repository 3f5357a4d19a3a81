# SPDX-License-Identifier: Apache-2.0
"""Messages of workers become events, and effects become messages, field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from edl.contract.heartbeats import Activity, Gpu, Usage
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.rpc.messages import BODIES, EVENTS, event_of, message_of

NAN = float("nan")
WORKER, G = WorkerId(3), Generation(7)


@pytest.mark.parametrize("name", [*EVENTS, "heartbeat"])
def test_each_field_of_an_event_comes_from_its_message(name: str) -> None:
    kind: Any = EVENTS.get(name, facts.Heartbeat)
    known = pb.FromWorker.DESCRIPTOR.fields_by_name[name].message_type.fields_by_name
    lacks = {field.name for field in fields(kind)} - {*known, "worker", "generation"}
    assert lacks == {"history": {"epochs"}, "heartbeat": {"usage"}}.get(name, set())


@pytest.mark.parametrize("name", [cls.__name__ for cls in ef.ForWorkers.__args__])
def test_each_field_of_a_message_comes_from_its_effect(name: str) -> None:
    if name in ("Commit", "Fence"):
        return
    kind = getattr(ef, name)
    assert {*BODIES[name].message_type.fields_by_name} <= {field.name for field in fields(kind)}


def test_values_arrive_as_they_were_sent() -> None:
    left = pb.LeftRing(step=5, has_state=True, skipped=[pb.Range(start=1, stop=3)], bad={0: 4}, made_in=6)
    event = ev.LeftRing(WORKER, G, 5, True, RangeSet.of([(1, 3)]), bad={0: 4}, made_in=6)
    assert event_of(WORKER, pb.FromWorker(generation=7, left_ring=left)) == event
    resume = pb.Resume(
        layout=pb.Layout(records=9, block=1, shards=1), members=[3], joined=True, left_ring=left
    )
    found = event_of(WORKER, pb.FromWorker(generation=7, resume=resume))
    assert isinstance(found, ev.Resume) and found.layout == Layout(9) and found.members == (3,)
    assert found.left_ring is not None and found.left_ring.generation == 0, "it left an earlier ring"
    bad = pb.BadRecords(epoch=1, records={8: "too long"})
    assert event_of(WORKER, pb.FromWorker(generation=7, bad_records=bad)) == ev.BadRecords(
        WORKER, G, 1, {8: "too long"}
    )
    end = pb.Finished(metrics={"loss": NAN}, failed=[pb.PartFailed(part="saving")], list_sha256=b"\1\2")
    assert event_of(WORKER, pb.FromWorker(finished=end)) == ev.Finished(
        WORKER, {"loss": None}, "", failed=(facts.PartFailed("saving", ""),), list_sha256="0102"
    )
    assert event_of(WORKER, pb.FromWorker(key_value=pb.KeyValue(key="a"))) is None


def test_numbers_that_are_not_finite_are_none() -> None:
    ended = pb.EpochEnded(epochs=1, loss=pb.EpochLoss(mean=NAN), metrics={"mae": NAN, "acc": 0.5})
    assert event_of(WORKER, pb.FromWorker(generation=7, epoch_ended=ended)) == ev.EpochEnded(
        WORKER, G, 1, None, {"mae": None, "acc": 0.5}
    )
    beat = pb.Heartbeat(step=4, loss=NAN, memory=5, gpu=pb.Gpu(name="A", busy=0.5))
    beat.activity.CopyFrom(pb.Activity(what="reads", seconds=2.0))
    assert event_of(WORKER, pb.FromWorker(generation=7, heartbeat=beat)) == facts.Heartbeat(
        WORKER, G, 4, usage=Usage(5, Gpu("A", 0, 0, 0.5)), activity=Activity("reads", 2.0)
    )


def test_an_effect_is_sent_to_its_workers() -> None:
    form = ef.Form(G, (WORKER, WorkerId(4)), WORKER, True, 2, (1, 1), Layout(9), addresses=("a:1",))
    to, message = message_of(form) or ((), pb.ToWorker())
    assert (to, message.generation, message.form.members[:]) == ((3, 4), 7, [3, 4])
    assert (message.form.layout.records, message.form.addresses[:]) == (9, ["a:1"])
    assert message_of(ef.Cut(G, (WORKER,))) == ((3,), pb.ToWorker(generation=7, cut=pb.Cut()))
    assert message_of(ef.Stop(WORKER, "why")) == ((3,), pb.ToWorker(stop=pb.Stop(why="why")))
    assert message_of(ef.Commit(WORKER, 1, "a")) is None
