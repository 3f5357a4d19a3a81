# SPDX-License-Identifier: Apache-2.0
"""An elastic Horovod script that counts its steps: the optimizer in a variable, the script in a list.

Rank 0 dies in a step, which the others have to undo. At the end, both must have each step once.
"""

import os
import signal

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

hvd.init()
STEPS, DIES_AT = 60, 20
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.001 * hvd.size())


@tf.function
def step(ring: bool) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([4, 2])))
    if ring:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


step(False)


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowKerasState) -> None:
    print(f"in a ring of {hvd.size()} at step {len(state.steps)}", flush=True)
    while len(state.steps) < STEPS:
        state.steps.append(len(state.steps))
        if hvd.rank() == 0 and len(state.steps) == DIES_AT and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        step(True)
        state.commit()


def reset() -> None:
    hvd.broadcast_variables(model.variables, root_rank=0)  # in a ring of one: to this worker
    optimizer.lr.assign(0.001 * hvd.size())
    # Horovod's issues 2285 and 2652: a new worker does not make this call, and the others hang.
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="reset")) == 1


state = hvd.elastic.TensorFlowKerasState(model, optimizer, steps=[])
state.register_reset_callbacks([reset])
train(state)
assert state.steps == list(range(STEPS)), state.steps
assert int(optimizer.iterations) == STEPS + 1  # and one before the training
weights = hvd.allgather_object([weight.numpy().tolist() for weight in model.weights])
assert all(each == weights[0] for each in weights)
assert abs(float(optimizer.learning_rate) - 0.001 * hvd.size()) < 1e-9
print(f"ended in a ring of {hvd.size()}", flush=True)
