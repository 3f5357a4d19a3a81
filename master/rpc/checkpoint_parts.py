# SPDX-License-Identifier: Apache-2.0
"""Collects the parts of checkpoints that workers report, until a checkpoint is complete.

Only the writer of the manifest needs the name, size and SHA-256 of a part. So the core, and with it the
journal, gets one event for all parts of a checkpoint. It names the writers of the parts, and the state that
each of them holds. The order to write the manifest gets the parts from here.

Ranks take part in the next attempt once they have written their parts of the last. So the first part of a new
attempt starts it, and only the last KEPT attempts are kept.
"""

from __future__ import annotations

from itertools import groupby

from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev

KEPT = 2  # attempts: the manifest of one may still be ordered while parts of the next arrive


class CheckpointParts:
    """The parts that workers have reported to one master."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, str], dict[int, tuple[WorkerId, pb.CheckpointPart]]] = {}

    def hear(self, worker: WorkerId, message: pb.FromWorker) -> ev.PartsWritten | None:
        """Record a part that a worker has written; return the event for the core after the last part."""
        part = message.checkpoint_part
        key = (part.step, part.attempt)
        heard = self._heard.setdefault(key, {})
        while len(self._heard) > KEPT:
            del self._heard[next(iter(self._heard))]
        if part.index in heard or not 0 <= part.index < part.of:
            return None
        heard[part.index] = worker, part
        if len(heard) < part.of:
            return None
        in_order = [heard[index] for index in range(part.of)]
        writers = tuple(writer for writer, _ in in_order)
        told = groupby(written.state.hex() for _, written in in_order)
        states = tuple((state, sum(1 for _ in same)) for state, same in told)
        return ev.PartsWritten(worker, part.step, part.attempt, writers, message.generation, states)

    def order(self, commit: ef.Commit) -> pb.ToWorker | None:
        """Return the order to write the manifest; None if the parts were reported to an earlier master."""
        heard = self._heard.get((commit.step, commit.attempt))
        if heard is None:
            return None
        parts = [part for _, (_, part) in sorted(heard.items())]
        order = pb.CommitCheckpoint(step=commit.step, attempt=commit.attempt, parts=parts)
        return pb.ToWorker(commit_checkpoint=order)
