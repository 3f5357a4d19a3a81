# SPDX-License-Identifier: Apache-2.0
"""`edl.join`: begin the job of a user's own training loop, in the host that runs the loop.

    job = edl.join(data=..., state=...)
    for step in job.steps():                  # trainer/loop.py
        ...

The host is `Alone` for `python train.py`, and trainer/script.py's for a worker of a job.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl import config as config_module
from edl.config import values
from edl.data.objects.dataset import is_loader
from edl.errors import ModelError
from edl.trainer.loop import Host, Job
from edl.trainer.model.loop_state import Functions
from edl.trainer.parts.callbacks import CallbackCalls
from edl.trainer.parts.ring_steps import RingSteps
from edl.trainer.records.batches import Batches, Wait, patiently
from edl.trainer.ring.base import Ring, Vector
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.runtime.error_report import caller
from edl.trainer.runtime.watchdog import Watch, unwatched
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State
from edl.trainer.step.loop_learner import LoopLearner
from edl.trainer.step.loop_stop import LoopStop
from edl.trainer.worker import Worker

host: Host | None = None  # None: this process is no worker of a job


def join(
    data: Any,
    state: Any,
    seed: int | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
) -> Job:
    """Join the job of this process, or begin one alone.

    Args:
        data: the training's records: a reader, or what `edl.dataset` takes. A DataLoader of PyTorch also
            says the batch size, and whether records are shuffled.
        state: what a new worker is sent and a checkpoint holds, and all that the loop trains: modules,
            optimizers and schedulers of PyTorch, models and optimizers of Keras, tf.Variables, tf.Modules,
            writable NumPy arrays, `edl.State(...)`, `edl.state(get, set)`, and lists, tuples and dicts of
            these.
        seed, batch_size: of the order of the records, and the records of a step over all workers. In a job,
            its values training.seed and training.batchSize decide, and must be the same.
        epochs: for a loop that runs alone; in a job, training.epochs decides.

    Raises:
        EdlError: the data or the state cannot be used, or an argument is not the job's value.
        ModelError: this is the second call in this process, or an argument is not the job's value.
    """
    global host
    shuffle, owner = None, "edl.join()"
    if is_loader(data):
        owner = "the DataLoader"
        batch_size, shuffle = batch_size or data.batch_size, type(data.sampler).__name__ == "RandomSampler"
    found = host or Alone(seed, batch_size, epochs, shuffle)
    if found.job is not None:
        raise ModelError(f"{caller()}: edl.join() was called a second time in this process")
    training = found.config.training
    both = (
        ("seed", "training.seed", seed, training.seed),
        ("batch_size", "training.batchSize", batch_size, training.batch_size),
        ("shuffle", "data.shuffle", shuffle, found.config.data.shuffle),
    )
    if unlike := [each for each in both if each[2] not in (None, each[3])]:
        ours = " and ".join(f"{name}={given}" for name, _, given, _ in unlike)
        theirs = " and ".join(f"{key}={json.dumps(used)}" for _, key, _, used in unlike)
        sets = ",".join(f"{key}={json.dumps(given)}" for _, key, given, _ in unlike)
        raise ModelError(
            f"{caller()}: {owner} has {ours}, but the job has {theirs}; start it with --set {sets}, or "
            "change the script"
        )
    found.job = job = Job(found, data, state)
    host = found
    return job


def state(get: Callable[[], Any], set: Callable[[Any], object]) -> Functions:
    """State that edl cannot read itself, behind two functions.

    Args:
        get: returns an array, or a list, tuple or dict of arrays, nested if need be.
        set: takes the same structure with other values, as NumPy arrays.
    """
    return Functions(get, set)


class _RingOfOne(LocalRing):
    def reduce(self, vector: Vector) -> Vector:
        return vector


class Alone:
    """A loop that no master knows: a ring of one."""

    def __init__(
        self, seed: int | None, batch_size: int | None, epochs: int | None, shuffle: bool | None = None
    ):
        chosen = {
            "training.seed": seed,
            "training.batchSize": batch_size,
            "training.epochs": epochs,
            "data.shuffle": shuffle,
        }
        sets = [f"{key}={str(value).lower()}" for key, value in chosen.items() if value is not None]
        self.config = config_module.parse(values.load([], ["model.script=alone", *sets]))
        self._group_ring = _RingOfOne()
        self.ring: Ring = self._group_ring
        self.watch: Watch = unwatched
        self.wait: Wait = patiently
        self.job: Job | None = None
        self.output = Path.cwd()
        self.tries_whole = True

    def train(self, job: Job, learner: LoopLearner, batches: Batches) -> None:
        """Train in a ring of this process alone."""
        session = Session(0, lambda message: None, threading.Event())
        report = Telemetry(session, batches.steps, log=print, has_loss=learner.has_loss)
        state = State(learner, batches.steps)
        steps = RingSteps(self.config, session, state, batches, report)
        stop = CallbackCalls(LoopStop(lambda: job.asks_stop or learner.is_stopped), state, self.ring, report)
        worker = Worker(session, self.ring, state, report, steps, parts=[stop])
        self._group_ring.open(InProcessGroup(1))
        epochs, layout = self.config.training.epochs, batches.layout
        worker.run_ring(FormRing(1, (0,), 0, sync=True, epochs=epochs, shares=(1,), layout=layout))
        job.turns.end()
