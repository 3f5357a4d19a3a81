# SPDX-License-Identifier: Apache-2.0
"""An elastic Horovod script that counts: element i is raised by one each time record i is applied.

A step is one all-reduce, and a commit follows each COMMIT_STEPS steps. So each ring must begin at a commit,
with the counts of exactly the steps before it. Orders are those of counting_faulty. At the end each rank
writes its counts to the directory EDL_FAULTS, as Keras writes weights.
"""

import os
import zipfile
from pathlib import Path

import counting_faulty
import h5py
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

RECORDS, EPOCHS = int(os.environ["EDL_COUNTING_RECORDS"]), int(os.environ["EDL_COUNTING_EPOCHS"])
BATCH, COMMIT_STEPS = 32, 5
PER_EPOCH = -(-RECORDS // BATCH)

hvd.init()
count = tf.Variable(tf.zeros([RECORDS]))


def expected(step: int) -> np.ndarray:
    """The counts after so many steps, float32 [RECORDS]."""
    epochs, within = divmod(step, PER_EPOCH)
    return epochs + (np.arange(RECORDS) < within * BATCH).astype(np.float32)


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowState) -> None:
    print(f"in a ring of {hvd.size()} at step {state.step}", flush=True)
    assert state.step % COMMIT_STEPS == 0 or state.step == PER_EPOCH * EPOCHS, "the ring begins at no commit"
    assert (count.numpy() == expected(state.step)).all(), f"the counts are not those of step {state.step}"
    while state.step < PER_EPOCH * EPOCHS:
        first = state.step % PER_EPOCH * BATCH
        mine = np.arange(first, min(first + BATCH, RECORDS))[hvd.rank() :: hvd.size()]
        counting_faulty.feed((mine,))  # waits, and obeys orders
        counted = np.zeros(RECORDS, np.float32)
        counted[mine] = 1
        count.assign_add(hvd.allreduce(tf.constant(counted), op=hvd.Sum, name="count"))
        state.step += 1
        if state.step % COMMIT_STEPS == 0:
            state.commit()


state = hvd.elastic.TensorFlowState([count], step=0)
train(state)
directory, rank = Path(os.environ["EDL_FAULTS"]), hvd.rank()
with h5py.File(directory / f"{rank}.weights.h5", "w") as weights:
    weights["layers/count/vars/0"] = count.numpy()
with zipfile.ZipFile(directory / f"{rank}.keras.part", "w") as model:
    model.write(directory / f"{rank}.weights.h5", "model.weights.h5")
(directory / f"{rank}.keras.part").rename(directory / f"{rank}.keras")
