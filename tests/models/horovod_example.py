# SPDX-License-Identifier: Apache-2.0
"""Run one of Horovod's own scripts, unchanged, with made data in place of MNIST.

    horovod_example.py NAME SIGNAL COMMITS [ARGS]

NAME is of tests/process/jobs/horovod_examples. The first worker whose state commits for the COMMITS-th time
sends itself SIGNAL, once in a job, and the training is slow until it has ended. COMMITS 0: none does.

The scripts have 10,000 and 12,000 steps. EDL_TEST_SHORTER=100 makes a hundredth of these, by shorter data
and epochs.
"""

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

SCRIPTS = Path(__file__).parents[1] / "process" / "jobs" / "horovod_examples"
SIDE, RECORDS = 6, 512  # the smallest images that two convolutions and a pool leave something of


def load_data(path: str) -> Any:
    """Images whose brightness is their label, as keras.datasets.mnist.load_data returns them."""
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 10, RECORDS).astype("uint8")
    images = labels[:, None, None] * 25 + chance.integers(0, 6, (RECORDS, SIDE, SIDE))
    return (images.astype("uint8"), labels), (images[:0].astype("uint8"), labels[:0])


tf.keras.datasets.mnist.load_data = load_data
if times := int(os.environ.get("EDL_TEST_SHORTER", "0")):
    take, fit = tf.data.Dataset.take, tf.keras.Model.fit

    def fit_shorter(model: Any, *args: Any, steps_per_epoch: int, **options: Any) -> Any:
        return fit(model, *args, steps_per_epoch=max(steps_per_epoch // times, 1), **options)

    tf.data.Dataset.take = lambda dataset, count: take(dataset, max(count // times, 1))
    tf.keras.Model.fit = fit_shorter
name, number, commits = sys.argv[1], signal.Signals[sys.argv[2]], int(sys.argv[3])
if commits:
    from horovod.tensorflow.elastic import State

    commit, made = State.commit, 0

    def counted(state: Any) -> None:
        global made
        made += 1
        if made >= commits:
            with contextlib.suppress(FileExistsError), open("signalled", "x") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.kill(os.getpid(), number)
            with open("signalled") as file:
                if psutil.pid_exists(int(file.read() or os.getpid())):
                    time.sleep(0.5)  # the ring must change before the training has ended
        commit(state)

    State.commit = counted
print("Keras is", tf.keras.Model.__module__.partition(".")[0], flush=True)
sys.argv = [str(SCRIPTS / name), *sys.argv[4:]]
runpy.run_path(sys.argv[0], run_name="__main__")
