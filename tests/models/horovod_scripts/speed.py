# SPDX-License-Identifier: Apache-2.0
"""Images a second of a model of keras.applications; with --elastic, within hvd.elastic.run."""

import argparse
import os
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import applications

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--model", default="MobileNet")
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--repeats", type=int, default=2)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--elastic", action="store_true")
parser.add_argument("--no-cuda", action="store_true")
arguments = parser.parse_args()

hvd.init()
if arguments.no_cuda:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
device, rate = "CPU" if arguments.no_cuda else "GPU", 0.01
model = getattr(applications, arguments.model)(weights=None)
optimizer = tf.optimizers.SGD(rate * hvd.size())
data = tf.random.uniform([arguments.batch_size, 224, 224, 3])
target = tf.random.uniform([arguments.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)


@tf.function
def train_one_batch() -> None:
    compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
    with tf.GradientTape() as tape:
        loss = tf.losses.sparse_categorical_crossentropy(target, model(data, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def measure(state: hvd.elastic.State | None, speeds: list[float], begin: int = 0) -> None:
    with tf.device(device):  # also without a GPU: TensorFlow places operations softly
        for repeat in range(begin, arguments.repeats):
            speeds.append(arguments.batch_size / timeit.timeit(train_one_batch, number=1))
            if state is not None:
                state.repeat = repeat + 1
                state.commit()


@hvd.elastic.run
def measure_elastic(state: hvd.elastic.TensorFlowKerasState) -> None:
    measure(state, state.speeds, state.repeat)


train_one_batch()
speeds: list[float] = []
if arguments.elastic:
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, speeds=[], repeat=0)
    state.register_reset_callbacks([lambda: optimizer.lr.assign(rate * hvd.size())])
    measure_elastic(state)
    speeds = state.speeds
else:
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    measure(None, speeds)
if hvd.rank() == 0:
    mean, spread = float(np.mean(speeds)), float(np.std(speeds))
    print(
        f"{hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f} images/s on {hvd.size()} {device}(s)",
        flush=True,
    )
