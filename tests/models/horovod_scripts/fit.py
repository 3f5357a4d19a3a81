# SPDX-License-Identifier: Apache-2.0
"""`Model.fit` with Horovod's optimizer and callbacks, as a published script for MNIST has them."""

import argparse

import horovod.tensorflow.keras as hvd
import images
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--epochs", type=int, default=24)
arguments = parser.parse_args()

hvd.init()
images.choose_gpu(hvd.local_rank())
rate = 0.001 * hvd.size()
model = images.model()
optimizer = hvd.DistributedOptimizer(
    tf.optimizers.Adam(rate),
    compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=1,
    average_aggregated_gradients=True,
)
model.compile(
    optimizer,
    tf.losses.SparseCategoricalCrossentropy(),
    metrics=["accuracy"],
    experimental_run_tf_function=False,  # an argument of TensorFlow 2.0
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
model.fit(
    images.dataset(),
    steps_per_epoch=6 // hvd.size(),
    epochs=arguments.epochs,
    callbacks=callbacks,
    verbose=1 if hvd.rank() == 0 else 0,
)
