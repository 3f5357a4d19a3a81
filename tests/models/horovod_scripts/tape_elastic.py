# SPDX-License-Identifier: Apache-2.0
"""An elastic loop of one's own: its state commits after each batch, and a reset sets the learning rate."""

import horovod.tensorflow as hvd
import images
import signalled
import tensorflow as tf

RATE, STEPS = 0.001, 100  # the steps are those of all ranks together

hvd.init()
signalled.at_a_commit()
images.choose_gpu(hvd.local_rank())
model, loss = images.model(), tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(RATE * hvd.size())
data = images.dataset()


@tf.function
def step(features: tf.Tensor, labels: tf.Tensor, in_ring: bool = True) -> tf.Tensor:
    with tf.GradientTape() as tape:
        value = loss(labels, model(features, training=True))
    if in_ring:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


for features, labels in data.take(1):
    step(features, labels, in_ring=False)  # so that all variables exist


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowKerasState) -> None:
    begin = state.batch
    for number, (features, labels) in enumerate(data.skip(begin).take(STEPS // hvd.size())):
        state.batch = begin + number
        value = step(features, labels)
        if state.batch % 10 == 0 and hvd.rank() == 0:
            print(f"step {state.batch}: loss {float(value):.4f}", flush=True)
        state.commit()


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([lambda: optimizer.lr.assign(RATE * hvd.size())])
train(state)
if hvd.rank() == 0:
    tf.train.Checkpoint(model=model, optimizer=optimizer).save("./checkpoints")
