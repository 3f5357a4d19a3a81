# SPDX-License-Identifier: Apache-2.0
"""An elastic Horovod script that counts its steps in a variable, as long as the order to idle stands."""

import os
import time
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
IDLE = Path(os.environ["EDL_FAULTS"], "idle")
count = tf.Variable(tf.zeros([4]))


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowState) -> None:
    while IDLE.exists():
        count.assign_add(hvd.allreduce(tf.ones([4]), op=hvd.Average, name="count"))
        state.step += 1
        time.sleep(0.1)
        state.commit()


state = hvd.elastic.TensorFlowState([count], step=0)
train(state)
assert count.numpy().tolist() == [state.step] * 4, (count, state.step)
print("exact", flush=True)
