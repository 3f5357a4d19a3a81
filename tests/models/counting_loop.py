# SPDX-License-Identifier: Apache-2.0
"""The counting model as an own training loop: weight i is raised by one each time record i is applied.

EDL_COUNTING_STATE is the library of its state: tf (a tf.Variable), tf-keras (weights and optimizer of
Keras 2) or numpy (an array, and one behind functions, as a loop of JAX or PyTorch has it).
"""

import os
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import orders

import edl

RECORDS = int(os.environ.get("EDL_COUNTING_RECORDS", "20000"))
records = edl.arrays(np.arange(RECORDS, dtype=np.int32))

LIBRARY = os.environ.get("EDL_COUNTING_STATE", "tf")
if LIBRARY == "tf":
    import tensorflow as tf

    count = tf.Variable(tf.zeros([RECORDS]), name="count")
    job = edl.join(data=records, state=[count])
elif LIBRARY == "tf-keras":
    import tensorflow as tf
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Dense(RECORDS, use_bias=False, kernel_initializer="zeros")])
    model.build([None, 1])
    (kernel,) = model.weights
    optimizer = tf_keras.optimizers.SGD(1.0)
    optimizer.build([kernel])
    count = kernel
    job = edl.join(data=records, state=[*model.weights, *optimizer.variables])
else:
    count, held = np.zeros(RECORDS, np.float32), {"steps": np.zeros((), np.int64)}
    job = edl.join(data=records, state=[count, edl.state(lambda: held, held.update)])

for step in job.steps():
    (mine,) = step.records
    orders.obey()  # waits, and obeys orders
    gradient = np.zeros(RECORDS, np.float32)
    gradient[mine] = 1.0 / len(mine)
    mean = step.mean([tf.constant(gradient) if "tf" in globals() else gradient, None], loss=1.0)
    if mean is None:
        continue
    (total, missing) = mean
    assert missing is None
    applied = (np.asarray(total) > 0).astype(np.float32)  # once for each record of the whole step
    if LIBRARY == "tf-keras":
        optimizer.apply_gradients([(-applied[None], kernel)])
    elif LIBRARY == "tf":
        count.assign_add(applied)
    else:
        count += applied
        held["steps"] = held["steps"] + 1  # a new array each time, as arrays of JAX are


def save(directory: Path) -> None:
    """Write the counts where Keras writes the weights of a model, for the checks of the tests."""
    with h5py.File(directory / "model.weights.h5", "w") as weights:
        weights["layers/count/vars/0"] = np.ravel(count)
    with zipfile.ZipFile(directory / "model.keras", "w") as model:
        model.write(directory / "model.weights.h5", "model.weights.h5")
    (directory / "model.weights.h5").unlink()


job.save(save)
if LIBRARY == "numpy":
    assert not {"tensorflow", "keras", "torch", "jax"} & set(sys.modules), "no library that is not used"
