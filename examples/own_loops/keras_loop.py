# SPDX-License-Identifier: Apache-2.0
"""Digits by a model of Keras on JAX: `KERAS_BACKEND=jax`."""

import random
from typing import Any

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import edl

digits = load_digits()
x, y = (digits.data / 16).astype(np.float32), digits.target
random.seed(0)  # from which Keras draws its seeds; keras.utils.set_random_seed imports TensorFlow
model = keras.Sequential(
    [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
)
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@jax.jit
def loss_and_gradients(trained: Any, others: Any, images: Any, labels: Any, real: Any) -> Any:
    """The mean loss of the records that are real, and its gradients."""

    def loss(trained: Any) -> Any:
        logits, _ = model.stateless_call(trained, others, images, training=True)
        return loss_of(labels, logits, sample_weight=real) * len(real) / real.sum()

    return jax.value_and_grad(loss)(trained)


job = edl.join(data=(x[:1500], y[:1500]), state=[model, optimizer], epochs=20, batch_size=64)
for step in job.steps():
    real = (np.arange(job.batch_size) < len(step.records[1])).astype(np.float32)
    images, labels = (np.resize(a, [job.batch_size, *a.shape[1:]]) for a in step.records)  # compiled once
    trained, others = (
        [v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables)
    )
    loss, grads = loss_and_gradients(trained, others, images, labels, real)
    if (mean := step.mean(grads, loss=loss)) is None:
        continue
    optimizer.apply(mean, model.trainable_variables)

known = np.asarray(model(x[1500:])).argmax(1) == y[1500:]
print(f"accuracy {known.mean():.3f}")
job.save(lambda directory: model.save(directory / "model.keras"))
