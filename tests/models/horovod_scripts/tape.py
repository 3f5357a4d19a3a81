# SPDX-License-Identifier: Apache-2.0
"""A loop with Horovod's tape: variables are broadcast after the first step, and rank 0 saves them."""

import sys

import horovod
import horovod.tensorflow as hvd
import images
import tensorflow as tf

STEPS = 100  # of all ranks together


def main() -> None:
    hvd.init()
    images.choose_gpu(hvd.local_rank())
    model, loss = images.model(), tf.losses.SparseCategoricalCrossentropy()
    optimizer = tf.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def step(features: tf.Tensor, labels: tf.Tensor, first: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(features, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)  # a method on Keras 2 alone
        return value

    for number, (features, labels) in enumerate(images.dataset().take(STEPS // hvd.size())):
        value = step(features, labels, number == 0)
        if number % 10 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(value):.4f}", flush=True)
    if hvd.rank() == 0:
        checkpoint.save("./checkpoints")


if __name__ == "__main__":
    if len(sys.argv) == 2:  # such a branch is no reason to refuse a script
        horovod.run(main, np=int(sys.argv[1]), use_gloo=True)
    else:
        main()
