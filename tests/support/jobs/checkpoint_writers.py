# SPDX-License-Identifier: Apache-2.0
"""Workers that write checkpoints, and a test in their master's place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl import config
from edl.checkpoints import Store
from edl.config import values
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.checkpoint.checkpointing import Checkpointing
from tests.support.jobs.workers import BATCH, SIZE, A, Held, come_to_sum, ring_of

LAYOUT = Layout(SIZE)


def configured(where: Path, **changes: Any) -> config.Config:
    checkpoint = {"dir": str(where), "seconds": 0, "keep": 2} | changes.pop("checkpoint", {})
    own = {"checkpoint": checkpoint, "training": {"batchSize": BATCH} | changes.pop("training", {})}
    return config.parse(values.merge(values.defaults(), own | changes))


class Queue:
    """Work beside the training, done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    def __call__(self, work: Callable[[], None]) -> None:
        with self._changed:
            self.waiting.append(work)
            self._changed.notify_all()

    def does(self) -> None:
        """The next piece of it, as soon as there is one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.waiting, 60), "there is nothing to be done"
            work = self.waiting.pop(0)
        work()


class Writer(A[Held]):
    """A worker that writes checkpoints, and what a test does in its master's place."""

    def __init__(
        self,
        number: int,
        where: Path,
        run_id: str = "run-1",
        servers: Callable[[Store], Any] | None = None,
        **named: Any,
    ):
        changes, classes = named.pop("changes", {}), named.pop("classes", ())
        super().__init__(number, ring=Held(), config=configured(where, **changes), **named)
        self.beside, store = Queue(), Store.open(str(where))
        self.servers = servers(store) if servers is not None else None
        self.checkpoints = Checkpointing(
            self.config,
            self.session,
            self.learner,
            store,
            run_id,
            self.beside,
            servers=self.servers,
            classes=classes,
        )
        self.rebuild(checkpoints=self.checkpoints)


def part_of(w: Writer) -> pb.CheckpointPart:
    return w.says("checkpoint_part", 1)


def write(workers: list[Writer], step: int) -> None:
    """Have a checkpoint of this step written, from the master's order to the manifest."""
    come_to_sum(step - 1, *workers)
    workers[0].hears(1, checkpoint=pb.Checkpoint())
    come_to_sum(step + 1, *workers)
    for w in workers:
        w.beside.does()
    parts = [part_of(w) for w in workers]
    order = pb.CommitCheckpoint(step=step, attempt=parts[0].attempt, parts=parts)
    workers[-1].hears(commit_checkpoint=order)
    workers[-1].beside.does()
    assert workers[-1].says("checkpointed", 0).step == step


def saves(w: Writer) -> None:
    """It trains alone, and then saves the model."""
    ring_of(w)
    w.ring.free()
    w.says("left_ring", 1)
    w.hears(export=pb.Export())
    w.says("finished", 0)
    w.stop()
