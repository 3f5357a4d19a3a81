# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own, which is elastic with four calls of edl."""

import keras
import numpy as np
import tensorflow as tf

import edl

rng = np.random.default_rng(0)
x = rng.normal(size=(5_000, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)

model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)  # before edl.join: what it creates is state, too

# All that the loop trains is state: a new worker is sent it, and checkpoints hold it.
# Alone (`python FILE`) the loop has three epochs; in a job, training.epochs decides.
job = edl.join(data={"x": x, "y": y}, state=[model, optimizer], epochs=3)


@tf.function(reduce_retracing=True)  # workers get parts of a batch, which differ in size
def gradients(x, y):  # type: ignore[no-untyped-def]
    """Return the mean loss over these records, and its gradients."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


@tf.function
def apply(mean):  # type: ignore[no-untyped-def]
    """Apply the mean gradients of all workers."""
    optimizer.apply(mean)


for step in job.steps():
    loss, found = gradients(step.records["x"], step.records["y"])
    mean = step.mean(found, loss=loss)
    if mean is None:  # a worker died: this step comes again with the same records
        continue
    apply(mean)

job.save(lambda directory: model.save(directory / "model.keras"))
