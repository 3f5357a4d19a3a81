# SPDX-License-Identifier: Apache-2.0
"""Digits by a network of JAX, trained with Optax, with an average of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import edl

digits = load_digits()
x, y = (digits.data / 16).astype(np.float32), digits.target
keys = jax.random.split(jax.random.key(0))
params = {
    "hidden": jax.random.normal(keys[0], [64, 64]) / 8,
    "bias": jnp.zeros([64]),
    "out": jax.random.normal(keys[1], [64, 10]) / 8,
}
adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.exponential_decay(0.01, 100, 0.9)))
state = edl.State(params=params, slots=adam.init(params), average=params)


def predicted(params: Any, images: Any) -> Any:
    """The logits of these images."""
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


@jax.jit
def loss_and_gradients(params: Any, images: Any, labels: Any, real: Any) -> Any:
    """The mean loss of the records that are real, and its gradients."""

    def loss(params: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(predicted(params, images), labels)
        return (each * real).sum() / real.sum()

    return jax.value_and_grad(loss)(params)


@jax.jit
def updated(params: Any, slots: Any, average: Any, mean: Any) -> Any:
    """The next state."""
    updates, slots = adam.update(mean, slots, params)
    params = optax.apply_updates(params, updates)
    return params, slots, optax.incremental_update(params, average, 0.05)


job = edl.join(data=(x[:1500], y[:1500]), state=state, epochs=20, batch_size=64)
for step in job.steps():
    real = np.arange(job.batch_size) < len(step.records[1])
    images, labels = (np.resize(a, [job.batch_size, *a.shape[1:]]) for a in step.records)  # compiled once
    loss, grads = loss_and_gradients(state.params, images, labels, real)
    if (mean := step.mean(grads, loss=loss)) is None:
        continue
    state.params, state.slots, state.average = updated(state.params, state.slots, state.average, mean)

known = predicted(state.average, x[1500:]).argmax(1) == y[1500:]
print(f"accuracy {float(known.mean()):.3f}")
job.save(lambda directory: np.savez(directory / "average.npz", **state.average))
