"""What is written of the steps that a server has taken in any order: beside a request in its log, at the head
of the log and in its part of a checkpoint, and in messages."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.ps.asynchronous.applied_steps import Kept, Taking
from edl.ps.errors import Invalid, Unavailable

_LENGTH = struct.Struct("<I")


def decided(**said: Any) -> bytes:
    """What a server has decided about a request whose bytes come next: JSON, its length before it."""
    text = json.dumps(said).encode()
    return _LENGTH.pack(len(text)) + text


def read_decided(text: bytes) -> tuple[dict[str, Any], bytes]:
    """What was decided, and the request."""
    end = _LENGTH.size + _LENGTH.unpack_from(text)[0]
    return json.loads(text[_LENGTH.size : end]), text[end:]


def kept_of(request: pb.KeepRequest) -> Kept:
    return Kept(request.step, request.order, request.ledger, request.repeated)


def ranges_of(steps: pb.Steps) -> RangeSet:
    bounds = steps.bounds
    if len(bounds) % 2 or any(a > b for a, b in pairwise(bounds)) or (bounds and bounds[0] < 0):
        raise Invalid(f"steps {[*bounds][:20]}: expected start, stop, start, stop ..., rising from 0")
    return RangeSet.of(zip(bounds[::2], bounds[1::2], strict=True))


def steps_told(ranges: RangeSet) -> pb.Steps:
    return pb.Steps(bounds=[bound for one in ranges for bound in one])


def taking_told(taking: Taking) -> dict[str, Any]:
    """What a log or a checkpoint has to say of it, but for the gradients that wait."""
    kept = taking.kept
    ledger = kept and [kept.step, kept.order, base64.b64encode(kept.ledger).decode()]
    return {"any_order": {
        "line": taking.line, "version": taking.version, "taken": [*taking.taken],
        "reopened": [*taking.reopened], "repeated": taking.repeated, "loss": taking.loss,
        "records": taking.records, "kept": ledger, "restored": [*taking.restored],
        "others": taking.others, "generation": taking.generation, "still": taking.still,
        "arranged": taking.arranged,
    }}  # fmt: skip


def taking_of(about: Mapping[str, Any]) -> Taking:
    """
    Raises:
        LookupError, TypeError, ValueError: it is not what `taking_told` has said.
    """
    said = about["any_order"]
    generation, step, attempt = said["restored"]
    kept = said["kept"]
    return Taking(
        line=said["line"], version=said["version"], taken=RangeSet.of((a, b) for a, b in said["taken"]),
        reopened=RangeSet.of((a, b) for a, b in said["reopened"]), repeated=said["repeated"],
        loss=said["loss"], records=said["records"],
        kept=Kept(kept[0], kept[1], base64.b64decode(kept[2])) if kept else None,
        restored=(generation, step, attempt),
        others=tuple((server, line) for server, line in said["others"]),
        generation=said.get("generation", 0), still=said.get("still", False),
        arranged=said.get("arranged", 0),
    )  # fmt: skip


def taking_of_parts(parts: Sequence[Mapping[str, Any]], index: int, step: int) -> Taking:
    """What a server goes on from, of the parts that it has read: its own one, or, of a checkpoint of another
    number of servers, all.

    Raises:
        Invalid: they do not fit together, and never will.
        Unavailable: one of them cannot be read.
    """
    try:
        found = {int(about["server"]): taking_of(about) for about in parts}
    except (LookupError, TypeError, ValueError) as error:
        raise Unavailable(
            f"the checkpoint of step {step} does not say which steps are in its rows: it is of a ring "
            "(mode=hybrid), or damaged"
        ) from error
    if index in found and len(found) == 1:
        return found[index]
    lowest = min(found)
    first = found[lowest]
    for server, other in found.items():
        if (first.taken, first.reopened) != (other.taken, other.reopened):
            raise Invalid(
                f"the checkpoint of step {step} is of {len(found)} servers, and only as many can go on from "
                f"it: server {lowest} had taken the steps {first.taken}, and server {server} the steps "
                f"{other.taken}, so a row that is moved would lack a step or have it twice; one that was "
                "written at an evaluation or at the end of an epoch has the same steps on all servers"
            )
    return replace(first, version=max(one.version for one in found.values()), repeated=0)
