# SPDX-License-Identifier: Apache-2.0
"""What a step of an own training loop costs beside a step of the Keras learner, in a ring of one.

    python -m benchmarks.own_loop [--model mlp-25m] [--optimizer adam] [--rounds 5] [--steps 6]

Both sides train the same model on the same data with one thread, in the environment of a worker. They take
turns: while one side makes its steps, the other waits for a line on stdin.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from edl.contract.workers import worker_environment

SIDES = ("keras", "loop")
WARM = 8  # steps that are not measured: the first three compare digests of the state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_loop", description=__doc__)
    parser.add_argument("--model", default="mlp-25m", help="of benchmarks/steady.py")
    parser.add_argument("--optimizer", default="adam", choices=("sgd", "adam"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="in a round")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(given.side, given.model, given.optimizer)
        return 0
    command = [sys.executable, "-m", "benchmarks.own_loop", *sys.argv[1:], "--side"]
    environment = {**os.environ, **worker_environment(os.environ)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    sides = {name: subprocess.Popen([*command, name], **pipes) for name in SIDES}  # type: ignore[call-overload]
    for child in sides.values():
        child.stdout.readline()  # warm
    for _ in range(given.rounds):
        for name, child in sides.items():
            print(given.steps, file=child.stdin, flush=True)
            cpu, wall, memory = map(float, child.stdout.readline().split())
            found[name].append((cpu, wall))
            if len(found[name]) == given.rounds:
                print(f"{name}: at most {memory:.0f} MiB", file=sys.stderr)
    for child in sides.values():
        child.communicate()
    print(f"{given.model}, {given.optimizer}: milliseconds of a step, the median of {given.rounds} rounds")
    for i, what in enumerate(("CPU time", "duration")):
        keras, loop = (statistics.median(each[i] for each in found[name]) * 1e3 for name in SIDES)
        print(f"{what}: Keras learner {keras:.1f}, own loop {loop:.1f}, ratio {loop / keras:.2f}")
    return 0


def side(name: str, model: str, optimizer: str) -> None:
    """Train with one side, as many steps as each line on stdin says."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import numpy as np
    import tensorflow as tf

    from benchmarks import steady
    from edl.trainer.ring.gloo import GlooRing
    from edl.trainer.ring.horovod import HorovodRing

    class Timing(steady.Timing):
        """Measures CPU time, too."""

        def __init__(self) -> None:
            super().__init__()
            self._many = WARM
            self._cpu: list[float] = []

        def begins(self) -> None:
            super().begins()
            self._used = time.process_time()

        def ends(self, wait: object = None) -> None:
            self._cpu.append(time.process_time() - self._used)
            self._seconds.append(time.perf_counter() - self._began)
            if len(self._seconds) < self._many:
                return
            print(statistics.median(self._cpu), statistics.median(self._seconds), steady.memory(), flush=True)
            if not (line := sys.stdin.readline()):
                os._exit(0)
            self._many, self._seconds, self._cpu = int(line), [], []

    steady.Timing = Timing  # type: ignore[misc]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    kind = steady.MODELS[model]
    chance = np.random.default_rng(1)
    x = chance.normal(size=(4 * kind.batch, *kind.shape)).astype("f4")
    y = chance.integers(0, steady.CLASSES, len(x))
    if name == "keras":
        ring = HorovodRing(1, "lo", name)
        steady.ours(steady.made(kind, optimizer), kind, ring, 0, 1, x, y)
    else:
        own_loop(kind, optimizer, GlooRing(1, "lo", name), x, y)


def own_loop(kind, optimizer, ring, x, y) -> None:  # type: ignore[no-untyped-def]
    """The loop of docs/custom-loops.md, in the worker's own loop with a session without a master."""
    import numpy as np
    import tensorflow as tf

    import edl
    from benchmarks import steady
    from edl import config
    from edl.config import values
    from edl.trainer import join
    from edl.trainer.parts.ring_steps import RingSteps
    from edl.trainer.runtime.watchdog import unwatched
    from edl.trainer.session.orders import FormRing
    from edl.trainer.session.state import Session
    from edl.trainer.state import State
    from edl.trainer.worker import Worker

    class Data:
        def __len__(self) -> int:
            return 1 << 40

        def read(self, start: int, stop: int):  # type: ignore[no-untyped-def]
            at = np.arange(start, stop) % len(x)
            return x[at], y[at]

    class Host:
        def __init__(self) -> None:
            merged = values.load([], ["model.script=train.py"])
            merged = values.merge(merged, {"training": {"batchSize": kind.batch}})
            self.config, self.ring, self.watch, self.job = config.parse(merged), ring, unwatched, None
            self.output = Path.cwd()

        def train(self, job, learner, batches) -> None:  # type: ignore[no-untyped-def]
            session = Session(0, lambda message: None, threading.Event())
            report = steady.Paced(session, steady.Timing(), kind.batch)
            state = State(learner, batches.steps)
            steps = RingSteps(self.config, session, state, batches, report)
            worker = Worker(session, ring, state, report, steps)
            layout = batches.layout
            worker.run_ring(FormRing(1, (0,), 0, sync=True, epochs=1, shares=(1,), layout=layout))

    join.host = Host()  # type: ignore[assignment]
    model = steady.made(kind, optimizer)
    model.optimizer.build(model.trainable_variables)
    job = edl.join(data=Data(), state=[model, model.optimizer])

    @tf.function
    def gradients(x, y):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def apply(mean):  # type: ignore[no-untyped-def]
        model.optimizer.apply(mean, model.trainable_variables)

    for step in job.steps():
        loss, found = gradients(*step.records)
        if (mean := step.mean(found, loss=loss)) is not None:
            apply(mean)


if __name__ == "__main__":
    sys.exit(main())
