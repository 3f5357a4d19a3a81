# SPDX-License-Identifier: Apache-2.0
"""edl.join with JAX, and with Keras on PyTorch, here alone: its state, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl.trainer import join, loop, script
from edl.trainer.model.loop_state import LoopState

jax: Any = pytest.importorskip("jax")
optax: Any = pytest.importorskip("optax")

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
Y = X.sum(axis=1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(join, "host", None)
    monkeypatch.chdir(tmp_path)


def joined(state: Any, **how: Any) -> loop.Job:
    return edl.join(data=(X, Y), state=state, **{"batch_size": 4, "epochs": 2, "seed": 1, **how})


@jax.jit
def gradients(params: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda p: ((x @ p["w"] + p["b"] - y) ** 2).mean())(params)


def started() -> tuple[Any, Any, Any]:
    params = {"w": jax.numpy.zeros(3), "b": jax.numpy.zeros(())}
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 20)))
    return params, adam, adam.init(params)


def test_the_weights_are_those_of_the_same_loop_without_edl() -> None:
    params, adam, slots = started()
    state = edl.State(params=params, slots=slots, average=params, key=jax.random.key(0), best=1.5)
    batches = []
    for step in joined(state).steps():
        x, y = step.records
        loss, grads = gradients(state.params, x, y)
        if (mean := step.mean(grads, loss=loss)) is None:
            continue
        updates, state.slots = adam.update(mean, state.slots, state.params)
        state.params = optax.apply_updates(state.params, updates)
        state.average = optax.incremental_update(state.params, state.average, 0.1)
        state.key, _ = jax.random.split(state.key)
        state.best -= 0.5
        batches.append((np.array(x), np.array(y)))
    theirs, _, slots = started()
    average, key = theirs, jax.random.key(0)
    for x, y in batches[3:]:  # after the trial
        _, grads = gradients(theirs, x, y)
        updates, slots = adam.update(grads, slots, theirs)
        theirs = optax.apply_updates(theirs, updates)
        average = optax.incremental_update(theirs, average, 0.1)
        key, _ = jax.random.split(key)
    for ours, alone in ((state.params, theirs), (state.slots, slots), (state.average, average)):
        assert jax.tree.structure(ours) == jax.tree.structure(alone)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, alone)
    assert jax.random.key_data(state.key).tolist() == jax.random.key_data(key).tolist()
    assert state.best == 1.5 - 0.5 * 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool", "uint8"])
def test_values_of_all_types_are_copied_bit_for_bit(dtype: str) -> None:
    one, two = (edl.State(a=jax.numpy.asarray(v, dtype), b=None) for v in ([0.1, 2.5], [0.0, 0.0]))
    ours, other = LoopState([one]), LoopState([two])
    other.take_over(other.prepared(ours.parts()))
    assert isinstance(two.a, jax.Array)
    assert two.a.dtype == one.a.dtype
    assert two.a.tolist() == one.a.tolist()
    assert two.b is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_halves_come_back_in_their_type(dtype: str) -> None:
    state = edl.State(w=jax.numpy.zeros(3, dtype))
    for step in joined(state).steps():
        x, y = step.records
        grad = jax.grad(lambda w, x=x, y=y: ((x.astype(dtype) @ w - y) ** 2).mean())(state.w)
        if (mean := step.mean([grad])) is not None:
            assert mean[0].dtype == grad.dtype == jax.numpy.dtype(dtype)
            state.w = state.w - jax.numpy.asarray(0.01, dtype) * mean[0]


def mistakes() -> Iterator[tuple[str, Any, Any, str]]:
    def traced(step: Any) -> None:
        jax.jit(lambda x: step.mean([x]))(np.zeros(3, np.float32))

    yield (
        "traced",
        edl.State(w=jax.numpy.zeros(3)),
        traced,
        "step.mean() was called within a function that is traced",
    )
    bare = jax.numpy.zeros(3)
    yield "bare", {"params": {"w": bare}}, lambda step: None, "params/w is of type ArrayImpl"
    wide = edl.State(w=jax.numpy.zeros(3))

    def widened(step: Any) -> None:
        if step.mean([np.ones(3, np.float32)]) is not None:
            wide.w = jax.numpy.zeros(4)

    yield "shape", wide, widened, "state['w'] is float32 [4]; edl.join() was given float32 [3]"
    more = edl.State(w=jax.numpy.zeros(3))

    def grown(step: Any) -> None:
        if step.mean([np.ones(3, np.float32)]) is not None:
            more.slots = jax.numpy.zeros(3)

    yield "grown", more, grown, "the structure of state has changed: state['slots']"


@pytest.mark.parametrize(("state", "body", "told"), [pytest.param(*m[1:], id=m[0]) for m in mistakes()])
def test_a_mistake_is_named(state: Any, body: Any, told: str) -> None:
    def run() -> None:
        for step in joined(state).steps():
            body(step)

    with pytest.raises(edl.EdlError, match=r"test_loop_jax.py, line \d+: ") as error:
        run()
    assert told in str(error.value)


KERAS = """
import os, sys
import keras, numpy as np
import edl

x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input([3]), *layers])
optimizer = keras.optimizers.Adam(0.05)
optimizer.build(model.trainable_variables)
job = edl.join(data={"x": x, "y": y}, state=[model, optimizer], epochs=30, batch_size=8)
def gradients(x, y):
    model.zero_grad()
    loss = ((model(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2).mean()
    loss.backward()
    return loss, [v.value.grad for v in model.trainable_variables]
losses = []
for step in job.steps():
    loss, found = gradients(step.records["x"], step.records["y"])
    if (mean := step.mean(found, loss=loss)) is None:
        continue
    optimizer.apply(mean, model.trainable_variables)
    losses.append(float(loss))
assert losses[-1] < 0.3 * losses[3], losses
assert "tensorflow" not in sys.modules
job.save(lambda directory: model.save(directory / "model.keras"))
"""


def test_keras_learns_on_pytorch_and_tensorflow_is_not_imported(tmp_path: Path) -> None:
    """On JAX, in a job: tests/process/jobs/test_own_loops.py."""
    pytest.importorskip("torch")
    (script := tmp_path / "train.py").write_text(KERAS)
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.keras").exists()


def test_the_file_of_the_page_learns(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "custom-loops.md").read_text()
    page = text.split("```python\n")[3].partition("```")[0]
    script.run(f"{page}\nassert loss_and_gradients._cache_size() == 1, 'compiled once'\n", [])
    params = np.load(tmp_path / "params.npz")
    assert np.abs(params["w"] - 1).max() < 0.3
