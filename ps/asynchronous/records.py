# SPDX-License-Identifier: Apache-2.0
"""Serialization of `AppliedSteps`: at the head of the log, in checkpoint shards, in messages.

The JSON keys are a file format. Those of earlier releases (`EARLIER`) are read, too, so checkpoints
outlive an upgrade.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.ps.asynchronous.applied_steps import AppliedSteps, Kept
from edl.ps.errors import Invalid, Unavailable
from edl.ps.phase import Phase

EARLIER = {
    "line": "incarnation",
    "taken": "accepted",
    "reopened": "rescheduled",
    "still": "quiesced",
    "arranged": "assigned_in",
}
"""Keys of earlier releases, with today's names."""


def kept_from_proto(request: pb.KeepRequest) -> Kept:
    """Read the job's progress from a request to keep it."""
    return Kept(request.step, request.order, request.ledger, request.repeated)


def ranges_from_proto(steps: pb.Steps) -> RangeSet:
    """Read a set of steps from a message.

    Raises:
        Invalid: the bounds are not pairs of rising numbers from 0.
    """
    bounds = steps.bounds
    if len(bounds) % 2 or any(a > b for a, b in pairwise(bounds)) or (bounds and bounds[0] < 0):
        raise Invalid(f"steps {[*bounds][:20]}: expected start, stop, start, stop ..., rising from 0")
    return RangeSet.of(zip(bounds[::2], bounds[1::2], strict=True))


def steps_to_proto(ranges: RangeSet) -> pb.Steps:
    """Write a set of steps into a message: the bounds of its ranges, start and stop in turn."""
    return pb.Steps(bounds=[bound for one in ranges for bound in one])


def applied_to_json(applied: AppliedSteps) -> dict[str, Any]:
    """The JSON for a log head or a checkpoint shard: all but the waiting gradients."""
    kept = applied.kept
    ledger = kept and [kept.step, kept.order, base64.b64encode(kept.ledger).decode()]
    return {
        "asynchronous": {
            "incarnation": applied.incarnation,
            "version": applied.version,
            "accepted": [*applied.accepted],
            "rescheduled": [*applied.rescheduled],
            "repeated": applied.repeated,
            "loss": applied.loss,
            "records": applied.records,
            "kept": ledger,
            "restored": [*applied.restored],
            "others": applied.others,
            "generation": applied.generation,
            "quiesced": applied.phase.is_quiesced,
            "assigned_in": applied.assigned_in,
        }
    }


def applied_from_json(about: Mapping[str, Any]) -> AppliedSteps:
    """Read the result of `applied_to_json`.

    Raises:
        LookupError, TypeError, ValueError: it is not the result of `applied_to_json`.
    """
    said = {EARLIER.get(key, key): value for key, value in about["asynchronous"].items()}
    generation, step, attempt = said["restored"]
    kept = said["kept"]
    phase = Phase.SERVING if said["incarnation"] else Phase.EMPTY
    return AppliedSteps(
        phase.after("quiesce") if said.get("quiesced") else phase,
        incarnation=said["incarnation"],
        version=said["version"],
        accepted=RangeSet.of((a, b) for a, b in said["accepted"]),
        rescheduled=RangeSet.of((a, b) for a, b in said["rescheduled"]),
        repeated=said["repeated"],
        loss=said["loss"],
        records=said["records"],
        kept=Kept(kept[0], kept[1], base64.b64decode(kept[2])) if kept else None,
        restored=(generation, step, attempt),
        others=tuple((server, incarnation) for server, incarnation in said["others"]),
        generation=said.get("generation", 0),
        assigned_in=said.get("assigned_in", 0),
    )


def applied_from_shards(parts: Sequence[Mapping[str, Any]], index: int, step: int) -> AppliedSteps:
    """The steps from which a server resumes after reading `parts` of a checkpoint.

    Args:
        parts: the JSON of this server's own shard, or of all shards if the number of servers has changed.

    Raises:
        Invalid: the shards have different steps, so they cannot be combined.
        Unavailable: a shard's JSON is missing or damaged.
    """
    try:
        found = {int(about["server"]): applied_from_json(about) for about in parts}
    except (LookupError, TypeError, ValueError) as error:
        raise Unavailable(
            f"the checkpoint of step {step} does not list the steps in its rows: it was written in "
            "mode=hybrid, or is damaged"
        ) from error
    if index in found and len(found) == 1:
        return found[index]
    lowest = min(found)
    first = found[lowest]
    for server, other in found.items():
        if (first.accepted, first.rescheduled) != (other.accepted, other.rescheduled):
            raise Invalid(
                f"the checkpoint of step {step} was written by {len(found)} servers, and only as many can "
                f"load it: server {lowest} had accepted the steps {first.accepted}, and server {server} the "
                f"steps {other.accepted}, so a moved row would lack a step or have it twice; checkpoints "
                "written at an evaluation or at the end of an epoch have the same steps on all servers"
            )
    return replace(first, version=max(one.version for one in found.values()), repeated=0)
