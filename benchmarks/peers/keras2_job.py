# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy and BackupAndRestore with Keras 2 (tf_keras), as TensorFlow's guide has it.

With Keras 3 its fit fails: scripts/bench keras3.
"""

import json
import os

import tensorflow as tf
import tf_keras as keras
from job import BATCH, PLAIN, RATE, RECORDS, SIZES, X, Y, done, share, work

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
STEPS = RECORDS // BATCH
config = json.loads(os.environ["TF_CONFIG"])
rank, size = config["task"]["index"], len(config["cluster"]["worker"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()


class Stamp(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, number: int, logs: object = None) -> None:
        work(BATCH // size)

    def on_train_batch_end(self, number: int, logs: object = None) -> None:
        step = self.epoch * STEPS + number
        done(step, size, share(step, rank, size))


with strategy.scope():
    hidden = [keras.layers.Dense(width, "relu") for width in SIZES[1:-1]]
    model = keras.Sequential([keras.Input(SIZES[:1]), *hidden, keras.layers.Dense(SIZES[-1])])
    model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
records = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True).repeat()
callbacks = [Stamp()]
if not PLAIN:
    backup = keras.callbacks.BackupAndRestore(os.path.join(os.environ["BENCH_DIR"], "backup"), save_freq=20)
    callbacks.append(backup)
model.fit(records, steps_per_epoch=STEPS, epochs=10_000, verbose=0, callbacks=callbacks)
