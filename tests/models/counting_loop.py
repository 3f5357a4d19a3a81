# SPDX-License-Identifier: Apache-2.0
"""The counting model as an own training loop: weight i is raised by one each time record i is applied.

EDL_COUNTING_STATE is the library of its state: tf (a tf.Variable), numpy (an array, and one behind
functions), torch, jax, or keras on KERAS_BACKEND=jax or torch. The last three train a small network beside
the counts, whose weights must be those of the same loop alone.
"""

import os
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import orders

import edl

RECORDS = int(os.environ.get("EDL_COUNTING_RECORDS", "20000"))
records = edl.arrays(np.arange(RECORDS, dtype=np.int32))
LIBRARY = os.environ.get("EDL_COUNTING_STATE", "tf")
how: Any = {"data": records, "epochs": int(os.environ.get("EDL_COUNTING_EPOCHS", "1"))}


def gradient(mine: np.ndarray) -> np.ndarray:
    """The gradient of the mean count of these records."""
    found = np.zeros(RECORDS, np.float32)
    found[mine] = 1.0 / len(mine)
    return found


def applied(mean: Any) -> np.ndarray:
    """One for each record of the whole step."""
    return (np.asarray(mean) > 0).astype(np.float32)


def with_tensorflow() -> tuple[Any, ...]:
    import tensorflow as tf

    count = tf.Variable(tf.zeros([RECORDS]), name="count")
    job = edl.join(state=[count], **how)
    for step in job.steps():
        orders.obey()
        mean = step.mean([tf.constant(gradient(step.records[0])), None], loss=1.0)
        if mean is None:
            continue
        assert mean[1] is None
        count.assign_add(applied(mean[0]))
    return job, count, []


def with_numpy() -> tuple[Any, ...]:
    count, held = np.zeros(RECORDS, np.float32), {"steps": np.zeros((), np.int64)}
    job = edl.join(state=[count, edl.state(lambda: held, held.update)], **how)
    for step in job.steps():
        orders.obey()
        if (mean := step.mean([gradient(step.records[0]), None], loss=1.0)) is None:
            continue
        count += applied(mean[0])
        held["steps"] = held["steps"] + 1  # a new array each time, as arrays of JAX are
    return job, count, []


def with_torch() -> tuple[Any, ...]:
    import torch

    torch.manual_seed(0)
    counter = torch.nn.ParameterList([torch.zeros(RECORDS)])
    network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    norm = torch.nn.BatchNorm1d(1)  # its averages change in the forward pass
    counts, adam = torch.optim.SGD(counter.parameters(), 1.0), torch.optim.AdamW(network.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100)
    state = {"counter": counter, "network": network, "norm": norm, "optimizers": [counts, adam]}
    job = edl.join(state={**state, "schedule": schedule}, **how)
    for step in job.steps():
        orders.obey()
        mine = torch.as_tensor(step.records[0]).long()
        x = mine[:, None] / RECORDS
        adam.zero_grad()
        counts.zero_grad()
        norm(torch.cat([x, x + 1]))
        loss = ((network(x) - torch.sin(6 * x)) ** 2).mean()
        (loss - counter[0][mine].mean()).backward()
        if step.mean([counter, network, norm], loss=loss) is None:
            continue
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        counter[0].grad.sign_()
        counts.step()
        adam.step()
        schedule.step()
    return job, counter[0].detach(), [p.detach() for p in network.parameters()]


def with_jax() -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp
    import optax

    keys = jax.random.split(jax.random.key(0))
    params = {"a": jax.random.normal(keys[0], [1, 8]), "b": jax.random.normal(keys[1], [8, 1])}
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.cosine_decay_schedule(0.01, 10_000)))
    state = edl.State(count=jnp.zeros(RECORDS), params=params, slots=adam.init(params), key=keys[0])
    job = edl.join(state=state, **how)

    @jax.jit
    def gradients(params: Any, mine: Any, real: Any) -> Any:
        def loss(params: Any) -> Any:
            x = mine[:, None] / RECORDS
            errors = (jnp.tanh(x @ params["a"]) @ params["b"] - jnp.sin(6 * x)) ** 2
            return (errors[:, 0] * real).sum() / real.sum()

        return jax.value_and_grad(loss)(params)

    for step in job.steps():
        orders.obey()
        mine, real = step.records[0], np.ones(job.batch_size, np.float32)
        real[len(mine) :] = 0.0
        padded = np.resize(mine, job.batch_size)  # one shape for all ring sizes: compiled once
        loss, of_network = gradients(state.params, padded, real)
        if (mean := step.mean([gradient(mine), of_network], loss=loss)) is None:
            continue
        state.count = state.count + applied(mean[0])
        state.key = jax.random.split(state.key)[0]
        updates, state.slots = adam.update(mean[1], state.slots, state.params)
        state.params = optax.apply_updates(state.params, updates)
    return job, state.count, jax.tree.leaves(state.params)


def with_keras() -> tuple[Any, ...]:
    import keras
    from keras import ops

    random.seed(0)  # from which Keras draws its seeds
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input([1]), *layers])
    count = keras.Variable(np.zeros(RECORDS, np.float32), name="count")
    adam = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 10_000), clipnorm=0.5)
    adam.build(network.trainable_variables)
    job = edl.join(state=[count, network, adam], **how)

    def loss_of(trained: Any, x: Any, real: Any) -> Any:
        predicted, _ = network.stateless_call(trained, [], x)
        return (((predicted - ops.sin(6 * x)) ** 2)[:, 0] * real).sum() / real.sum()

    if keras.backend.backend() == "jax":
        import jax

        compiled = jax.jit(jax.grad(loss_of))

        def gradients(x: Any, real: Any) -> Any:
            return compiled([v.value for v in network.trainable_variables], x, real)
    else:

        def gradients(x: Any, real: Any) -> Any:
            network.zero_grad()
            trained = [v.value for v in network.trainable_variables]
            loss_of(trained, *map(ops.convert_to_tensor, (x, real))).backward()
            return [w.grad for w in trained]

    for step in job.steps():
        orders.obey()
        mine, real = step.records[0], np.ones(job.batch_size, np.float32)
        real[len(mine) :] = 0.0
        x = (np.resize(mine, job.batch_size)[:, None] / RECORDS).astype(np.float32)
        if (mean := step.mean([gradient(mine), gradients(x, real)])) is None:
            continue
        count.assign_add(applied(mean[0]))
        adam.apply(mean[1], network.trainable_variables)
    return job, ops.convert_to_numpy(count), [ops.convert_to_numpy(v) for v in network.trainable_variables]


RUN = {"numpy": with_numpy, "torch": with_torch, "jax": with_jax, "keras": with_keras}
job, count, network = RUN.get(LIBRARY, with_tensorflow)()


def save(directory: Path) -> None:
    """Write the counts where Keras writes the weights of a model, for the checks of the tests."""
    with h5py.File(directory / "model.weights.h5", "w") as weights:
        weights["layers/count/vars/0"] = np.ravel(count)
        if network:
            weights["layers/network/vars/0"] = np.concatenate([np.ravel(w) for w in network])[None]
    with zipfile.ZipFile(directory / "model.keras", "w") as model:
        model.write(directory / "model.weights.h5", "model.weights.h5")
    (directory / "model.weights.h5").unlink()


job.save(save)
if LIBRARY in RUN:
    # Keras imports what it finds of the others.
    others = {"tensorflow"} if LIBRARY == "keras" else {"tensorflow", "keras", "torch", "jax"} - {LIBRARY}
    assert not others & set(sys.modules), "no library that is not used"
