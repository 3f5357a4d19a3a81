# SPDX-License-Identifier: Apache-2.0
"""`fit` in the scope of tf.distribute.MultiWorkerMirroredStrategy, as TensorFlow's guide has it."""

import tensorflow as tf
from the_model import BATCH, EPOCHS, data, model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    built = model()
built.fit(*data("train"), batch_size=BATCH, epochs=EPOCHS, verbose=0)
print("trained")
