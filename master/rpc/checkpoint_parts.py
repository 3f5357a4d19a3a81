"""The parts of checkpoints, as the workers tell of them, until all of one are there.

What a part is called, how large it is and what its SHA-256 is concerns only who writes the manifest. So the
core, and with it the journal, gets one event for all parts of a checkpoint, and the order to write the
manifest gets them from here. What the core is told is who has written them, and which state each of these
holds.

One attempt is kept at a time: ranks take part in the next one when they have written their parts of the last.
A part of another attempt begins it, and what is known of the one before is given up.
"""

from __future__ import annotations

from itertools import groupby

from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import effects as ef
from edl.master.core import events as ev

KEPT = 2  # attempts: the manifest of one may be on its way while the parts of the next come


class CheckpointParts:
    """What one master has heard of parts."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, str], dict[int, tuple[WorkerId, pb.CheckpointPart]]] = {}

    def hear(self, worker: WorkerId, message: pb.FromWorker) -> ev.PartsWritten | None:
        """A worker has written a part; what the core is to know, once that was the last one."""
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
        """The order to write the manifest; None: an earlier master has heard of the parts."""
        heard = self._heard.get((commit.step, commit.attempt))
        if heard is None:
            return None
        parts = [part for _, (_, part) in sorted(heard.items())]
        order = pb.CommitCheckpoint(step=commit.step, attempt=commit.attempt, parts=parts)
        return pb.ToWorker(commit_checkpoint=order)
