# SPDX-License-Identifier: Apache-2.0
"""Conversion between protobuf messages and the core's events and effects, without streams.

The server uses it, and so does the simulator of the tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from edl.contract.heartbeats import Activity, Gpu, ServerWait, Staleness, Usage
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts


def event_of(worker: WorkerId, message: pb.FromWorker) -> ev.Event | facts.Heartbeat | None:
    """Convert a worker's message to an event or a heartbeat; None if it is not for the core."""
    g = Generation(message.generation)
    match message.WhichOneof("body"):
        case "hello":
            return hello_of(worker, message.hello)
        case "built":
            return ev.Built(worker, message.built.tables)
        case "ready":
            return _ready(worker, message.ready)
        case "resume":
            return _resume(worker, g, message.resume)
        case "joined_ring":
            return _joined_ring(worker, g, message.joined_ring)
        case "stepped":
            s = message.stepped
            return ev.Stepped(worker, g, s.step, s.stall_seconds, s.redone_records, s.wasted_seconds)
        case "epoch_ended":
            ended = message.epoch_ended
            loss_of = _epoch_loss(ended.loss) if ended.HasField("loss") else None
            return ev.EpochEnded(worker, g, ended.epochs, loss_of, _metrics(ended.metrics), ended.sha256)
        case "evaluated":
            e = message.evaluated
            return ev.Evaluated(worker, g, e.step, e.split, e.records, _metrics(e.metrics))
        case "bad_records":
            records = {r.index: r.why for r in message.bad_records.records}
            return ev.BadRecords(worker, g, message.bad_records.epoch, records)
        case "heartbeat":
            return _heartbeat(worker, g, message.heartbeat)
        case "left_ring":
            return _out(worker, g, message.left_ring)
        case "records_read":
            return ev.RecordsRead(worker)
        case "leaving":
            return ev.Leaving(worker, message.leaving.why)
        case "failed":
            f = message.failed
            return ev.Failed(worker, f.why, f.traceback, f.fatal, f.mistake, f.no_gpu_memory)
        case "saved":
            kept = message.saved
            return ev.Saved(worker, kept.model, kept.note, _failed(kept.failed), kept.step, kept.variables)
        case "finished":
            end = message.finished
            kept_as = end.model, end.note, _failed(end.failed), dict(end.exports), end.list_sha256.hex()
            return ev.Finished(worker, _metrics(end.metrics), *kept_as)
        case "rows_lost":
            return ev.RowsLost(worker, message.rows_lost.why, message.rows_lost.trained_on)
        case "checkpoint_failed":
            c = message.checkpoint_failed
            return ev.CheckpointFailed(worker, c.step, c.attempt, c.why)
        case "checkpointed":
            c = message.checkpointed
            return ev.Checkpointed(worker, c.step, c.attempt, c.nbytes)
        case "history":
            columns = json.loads(message.history.json)
            return ev.History(worker, {name: tuple(values) for name, values in columns.items()})
        case "warm_started":
            return ev.WarmStarted(worker, message.warm_started.text)
        case "warned":
            return ev.Warned(worker, message.warned.text)
    return None


def hello_of(worker: WorkerId, hello: pb.Hello) -> ev.Hello:
    """Return the event for a worker's first message."""
    return ev.Hello(worker, hello.resumes, hello.pid)


def ended_before(s: pb.Predecessor) -> ev.Gone:
    """Convert the exit of a pod's previous process; the id is that of the worker the pod was made for."""
    code = None if s.signal else s.code
    return ev.Gone(WorkerId(s.place), code=code, signal=s.signal, why=s.why)


def message_of(effect: ef.ForWorkers) -> tuple[Sequence[WorkerId], pb.ToWorker] | None:
    """Return the recipients and the message of an effect; None for a Commit, which needs more, or a Fence."""
    match effect:
        case ef.Form(generation, members):
            fields = asdict(effect)
            del fields["generation"]
            return members, pb.ToWorker(generation=generation, form=pb.Form(**fields))
        case ef.Train(generation, members, epochs):
            return members, pb.ToWorker(generation=generation, train=pb.Train(epochs=epochs))
        case ef.Leave(generation, members):
            return members, pb.ToWorker(generation=generation, leave=pb.Leave())
        case ef.Cut(generation, members):
            return members, pb.ToWorker(generation=generation, cut=pb.Cut())
        case ef.Export(worker):
            return (worker,), pb.ToWorker(export=pb.Export())
        case ef.Checkpoint(generation, worker):
            return (worker,), pb.ToWorker(generation=generation, checkpoint=pb.Checkpoint())
        case ef.WriteCheckpoint(worker):
            return (worker,), pb.ToWorker(write_checkpoint=pb.WriteCheckpoint())
        case ef.Stop(worker, why):
            return (worker,), pb.ToWorker(stop=pb.Stop(why=why))
    return None


def _ready(worker: WorkerId, r: pb.Ready) -> ev.Ready:
    held_out, forced = dict(r.held_out), tuple(r.forced)
    return ev.Ready(
        worker,
        _layout(r.layout),
        r.model,
        r.checkpoint,
        held_out,
        forced,
        r.tables,
        _sample_loss(r),
        dict(r.digests),
    )


def _resume(worker: WorkerId, g: Generation, b: pb.Resume) -> ev.Resume:
    members = tuple(WorkerId(m) for m in b.members)
    # If it left an earlier ring, the message does not contain that ring's generation.
    out = _out(worker, g if b.left else Generation(0), b.left_ring) if b.HasField("left_ring") else None
    as_in_ready = b.model, dict(b.held_out), tuple(b.forced), b.tables, _sample_loss(b), dict(b.digests)
    return ev.Resume(
        worker, _layout(b.layout), g, members, b.left, b.joined, out, *as_in_ready, leaving=b.leaving
    )


def _joined_ring(worker: WorkerId, g: Generation, joined: pb.JoinedRing) -> ev.JoinedRing:
    return ev.JoinedRing(
        worker,
        g,
        joined.step,
        joined.round,
        joined.callbacks_done,
        joined.rolled_back,
        joined.servers,
        tuple(joined.out),
        joined.servers_stay,
    )


def _heartbeat(worker: WorkerId, g: Generation, beat: pb.Heartbeat) -> facts.Heartbeat:
    loss = _finite(beat.loss) if beat.HasField("loss") else None
    epoch = _epoch_loss(beat.epoch_loss) if beat.HasField("epoch_loss") else None
    s, waits = beat.staleness, beat.waits
    aged = Staleness(s.steps, s.median, s.most, s.repeated) if beat.HasField("staleness") else None
    waited = None
    if beat.HasField("waits"):
        waited = ServerWait(waits.server, waits.call, waits.seconds, waits.why)
    return facts.Heartbeat(
        worker,
        g,
        beat.step,
        beat.rate,
        loss,
        Usage(beat.memory, _gpu(beat.gpu) if beat.HasField("gpu") else None),
        epoch,
        beat.speed,
        beat.round,
        aged,
        waited,
        Activity(beat.activity.what, beat.activity.seconds) if beat.HasField("activity") else None,
    )


def _out(worker: WorkerId, g: Generation, o: pb.LeftRing) -> ev.LeftRing:
    bad = {b.epoch: b.records for b in o.bad}
    return ev.LeftRing(
        worker,
        g,
        o.step,
        o.has_state,
        _ranges(o.skipped),
        o.broken,
        o.digest,
        bad,
        o.round,
        o.callbacks_done,
        o.stop,
        o.stopped_by,
        o.made_in,
        o.reads,
    )


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in metrics.items()}


def _epoch_loss(loss: pb.EpochLoss) -> facts.EpochLoss | None:
    mean = _finite(loss.mean)
    return None if mean is None else facts.EpochLoss(loss.epoch, loss.records, mean)


def _sample_loss(message: pb.Ready | pb.Resume) -> facts.SampleLoss | None:
    if not message.HasField("sample_loss") or (loss := _finite(message.sample_loss.loss)) is None:
        return None
    return facts.SampleLoss(loss, message.sample_loss.tolerance)


def _layout(layout: pb.Layout) -> Layout:
    return Layout(layout.records, layout.block, layout.shards)


def _gpu(gpu: pb.Gpu) -> Gpu:
    return Gpu(gpu.name, gpu.memory, gpu.memory_limit, _finite(gpu.busy) or 0.0)


def _failed(parts: Iterable[pb.PartFailed]) -> tuple[facts.PartFailed, ...]:
    return tuple(facts.PartFailed(p.part, p.why, p.traceback) for p in parts)


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, because JSON has only finite numbers."""
    return value if math.isfinite(value) else None


def _ranges(ranges: Iterable[pb.Range]) -> RangeSet:
    return RangeSet.of((r.start, r.stop) for r in ranges)
