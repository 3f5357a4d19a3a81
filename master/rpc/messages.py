# SPDX-License-Identifier: Apache-2.0
"""Conversion between protobuf messages and the core's events and effects, without streams.

A message and its event or effect have one name, and the same fields. The server uses this module, and so does
the simulator of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from edl.contract.converted import converted
from edl.contract.heartbeats import Gpu, Usage
from edl.contract.ids import Generation, WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts

# By the name of a message's body: the event that it is. Other bodies are not for the core.
EVENTS: dict[str, Callable[..., ev.Event]] = {
    body.name: getattr(ev, body.message_type.name)
    for body in pb.FromWorker.DESCRIPTOR.oneofs_by_name["body"].fields
    if hasattr(ev, body.message_type.name)
}
# By the name of an effect: the body of its message.
BODIES = {body.message_type.name: body for body in pb.ToWorker.DESCRIPTOR.oneofs_by_name["body"].fields}


def event_of(worker: WorkerId, message: pb.FromWorker) -> ev.Event | facts.Heartbeat | None:
    """Convert a worker's message to an event or a heartbeat; None if it is not for the core."""
    body, g = message.WhichOneof("body") or "", Generation(message.generation)
    match body:
        case "heartbeat":
            beat = message.heartbeat
            usage = Usage(beat.memory, converted(Gpu, beat.gpu) if beat.HasField("gpu") else None)
            return converted(facts.Heartbeat, beat, worker=worker, generation=g, usage=usage)
        case "resume":
            resume, out = message.resume, None
            if resume.HasField("left_ring"):
                # If it left an earlier ring, the message does not contain that ring's generation.
                left = g if resume.left else Generation(0)
                out = converted(ev.LeftRing, resume.left_ring, worker=worker, generation=left)
            return converted(ev.Resume, resume, worker=worker, generation=g, left_ring=out)
        case "finished":
            sha256 = message.finished.list_sha256.hex()
            return converted(ev.Finished, message.finished, worker=worker, list_sha256=sha256)
        case "history":
            columns = json.loads(message.history.json)
            return ev.History(worker, {name: tuple(values) for name, values in columns.items()})
    if body not in EVENTS:
        return None
    return converted(EVENTS[body], getattr(message, body), worker=worker, generation=g)


def hello_of(worker: WorkerId, hello: pb.Hello) -> ev.Hello:
    """Return the event for a worker's first message."""
    return converted(ev.Hello, hello, worker=worker)


def ended_before(s: pb.Predecessor) -> ev.Gone:
    """Convert the exit of a pod's previous process; the id is that of the worker the pod was made for."""
    code = None if s.signal else s.code
    return ev.Gone(WorkerId(s.place), code=code, signal=s.signal, why=s.why)


def message_of(effect: ef.ForWorkers) -> tuple[Sequence[WorkerId], pb.ToWorker] | None:
    """Return the recipients and the message of an effect; None for a Commit, which needs more, or a Fence."""
    if (body := BODIES.get(type(effect).__name__)) is None:
        return None
    fields = asdict(effect)
    to: Sequence[WorkerId] = fields["members"] if "members" in fields else (fields["worker"],)
    of_message = {name: fields[name] for name in body.message_type.fields_by_name if name in fields}
    inner = getattr(pb, body.message_type.name)(**of_message)
    return to, pb.ToWorker(generation=fields.get("generation", 0), **{body.name: inner})
