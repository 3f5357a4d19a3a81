# SPDX-License-Identifier: Apache-2.0
"""edl.join: a user's own training loop, here alone: what it is given, and which mistakes are reported."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl
from edl import scratch
from edl.contract import artifacts
from edl.trainer import join, loop, script
from edl.trainer.model import tensors

RECORDS = 10


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(join, "host", None)
    monkeypatch.chdir(tmp_path)


def joined(state: Any, **how: Any) -> loop.Job:
    records = {"x": np.arange(RECORDS, dtype=np.float32)}
    return edl.join(data=records, state=state, **{"batch_size": 4, "epochs": 2, "seed": 1, **how})


def refused(state: Any, body: Callable[[loop.Step], object], **how: Any) -> str:
    """The error of a loop with this body."""
    job = joined(state, **how)

    def run() -> None:
        for step in job.steps():
            body(step)

    with pytest.raises(edl.EdlError) as error:
        run()
    return str(error.value)


def test_means_keep_the_precision_of_the_gradients_and_their_values_while_the_loop_has_them() -> None:
    total = np.zeros(1)
    kept: list[tuple[float, np.ndarray]] = []
    for step in joined([total]).steps():
        if (mean := step.mean([np.array([step.number + 1 / 3])])) is not None:
            kept.append((step.number + 1 / 3, mean[0]))
            total += mean[0]
    assert [float(mean[0]) for _, mean in kept[-6:]] == pytest.approx(
        [given for given, _ in kept[-6:]], rel=1e-15
    )


def test_gradients_are_freed_without_the_garbage_collector() -> None:
    gradient = np.ones(1)
    freed = weakref.ref(gradient)
    gc.disable()
    try:
        packed = tensors.pack({"w": [None]}, [gradient])
        assert packed["w"][0] is gradient
        del gradient, packed
        assert freed() is None
    finally:
        gc.enable()


def test_each_step_has_its_records_and_the_state_counts_all_of_them_once_an_epoch() -> None:
    count = np.zeros(RECORDS, np.float32)
    job = joined([count])
    seen = []
    for step in job.steps():
        gradient = np.zeros(RECORDS, np.float32)
        gradient[step.records["x"].astype(int)] = 1 / len(step.records["x"])
        if (mean := step.mean({"count": gradient})) is None:
            continue
        count += mean["count"] > 0
        seen.append((step.number, step.epoch, step.weight))
    assert count.tolist() == [2.0] * RECORDS
    trial, trained = seen[:3], seen[3:]  # the trial's last three turns have a mean; they are undone
    assert trial == [(0, 0, 4)] * 3
    assert trained == [(0, 0, 4), (1, 0, 4), (2, 0, 2), (3, 1, 4), (4, 1, 4), (5, 1, 2)]
    job.save(lambda directory: np.save(directory / "count.npy", count))
    assert np.load("count.npy").tolist() == count.tolist()
    assert [path.name for path in Path().iterdir()] == ["count.npy"]


def test_gradients_of_tensorflow_come_back_as_tensors_of_their_types() -> None:
    table, bias = tf.Variable(tf.zeros([RECORDS, 2])), tf.Variable(np.zeros(3))
    returned = []
    for step in joined([table, bias], epochs=1).steps():
        rows = tf.cast(step.records["x"], tf.int32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, rows)) + tf.cast(tf.reduce_sum(bias), tf.float32)
        of_table, of_bias = tape.gradient(loss, [table, bias])
        assert isinstance(of_table, tf.IndexedSlices)
        mean = step.mean([of_table, of_bias, None], loss=loss, metrics={"one": tf.constant(1.0)})
        returned.append(mean)
    assert returned[0] is None
    dense, wide, nothing = returned[-1]
    assert (dense.shape, dense.dtype, wide.dtype, nothing) == ((RECORDS, 2), tf.float32, tf.float64, None)
    np.testing.assert_allclose(dense, tf.where(dense > 0, 0.25, 0.0))
    assert np.count_nonzero(dense) == 4
    assert wide.numpy().tolist() == [1.0] * 3


@pytest.mark.parametrize("copies", [False, True], ids=["the sum is the vector", "the sum has its own memory"])
def test_a_mean_that_the_loop_keeps_stays_what_it_was(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    if copies:
        monkeypatch.setattr(join._RingOfOne, "reduce", lambda ring, vector: tf.identity(vector) + 0.0)
    weight, kept, copied = tf.Variable(tf.zeros([3])), [], []
    for step in joined([weight], epochs=1).steps():
        gradients = [tf.fill([3], float(step.number + 1)), np.full(17, step.number + 0.5, np.float32)]
        if (mean := step.mean(gradients)) is not None:
            weight.assign(mean[0])
            kept.append([weight.read_value(), *mean])
            copied.append([np.array(mean[0]), np.array(mean[0]), np.array(mean[1])])
    for of_step, expected in zip(kept[1:], copied[1:], strict=True):
        for ours, was in zip(of_step, expected, strict=True):
            np.testing.assert_array_equal(ours, was)
    assert [float(was[0][0]) for was in copied[3:]] == [1.0, 2.0, 3.0]


def test_the_step_of_an_optimizer_is_the_step_on_the_whole_batch() -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    other = keras.optimizers.Adam(0.1)
    other.build(alone.trainable_variables)

    def gradients(of: keras.Model, x: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((of(tf.reshape(x, [-1, 1]), training=False) - 1.0) ** 2)
        return list(tape.gradient(loss, of.trainable_variables))

    turns = 0
    for step in joined({"model": model, "optimizer": optimizer}).steps():
        if (mean := step.mean(gradients(model, step.records["x"]))) is None:
            continue
        optimizer.apply(mean)
        turns += 1
        if turns > 3:  # after the trial
            other.apply(gradients(alone, step.records["x"]))
    for ours, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_step_that_is_not_finite_is_refused_with_its_records() -> None:
    weight = np.zeros(1, np.float32)

    def body(step: loop.Step) -> None:
        step.mean([np.full(1, np.inf if step.number == 2 else 1.0, np.float32)])

    assert "step 3" in (found := refused([weight], body))
    assert "not finite" in found
    assert "records" in found


def narrowed(state: Any) -> Callable[[loop.Step], object]:
    """A loop whose first update makes float32 of float64, as JAX does."""

    def body(step: loop.Step) -> None:
        if (mean := step.mean([np.zeros(2, np.float32)])) is not None:
            state.weight = mean[0]

    return body


def mistakes() -> Iterator[tuple[str, Any, Callable[[loop.Step], object], str]]:
    weight, moving = np.zeros(2, np.float32), tf.Variable(0.0, name="moving")
    yield "never calls mean", weight, lambda step: None, "did not call step.mean() for step 1"
    yield "twice", weight, lambda step: (step.mean([weight]), step.mean([weight])), "a second time for step 1"
    several = lambda step: [weight] * (1 + (step.number > 0))  # noqa: E731
    yield "another number", weight, lambda step: step.mean(several(step)), "2 gradients, in earlier steps 1"
    longer = lambda step: np.zeros(2 + (step.number > 0), np.float32)  # noqa: E731
    yield (
        "another shape",
        weight,
        lambda step: step.mean([longer(step)]),
        "gradient 0 of step.mean() is float [3],",
    )
    wide = edl.State(weight=np.zeros(2))
    yield "a type that changes", wide, narrowed(wide), "is float32 [2]; edl.join() was given float64 [2], and"
    yield "integers", weight, lambda step: step.mean([np.zeros(1, int)]), "is of int64"
    yield "a number", weight, lambda step: step.mean([1.0]), "of type float"
    changed = lambda step: (moving.assign_add(1.0), step.mean([weight]))  # noqa: E731
    yield "changes the state", [moving], changed, "step 1 has changed moving of the state before it called"
    late = lambda step: (step.mean([weight]), moving.assign_add(1.0))  # noqa: E731
    yield "does not heed None", [moving], late, "step 1 has changed moving of the state after step.mean() had"


@pytest.mark.parametrize(("state", "body", "told"), [pytest.param(*m[1:], id=m[0]) for m in mistakes()])
def test_a_mistake_in_the_loop_is_told_with_the_line_of_the_user(state: Any, body: Any, told: str) -> None:
    found = refused(state, body)
    assert told in found
    assert found.startswith("test_loop.py, line ")


def test_mean_within_a_graph_is_refused() -> None:
    weight = tf.Variable(0.0)
    found = refused([weight], lambda step: tf.function(lambda: step.mean([weight.value()]))())
    assert "step.mean() was called within a function that is traced" in found


def test_an_optimizer_that_makes_its_slots_in_the_first_step_is_refused() -> None:
    weight, made = tf.Variable([0.0]), tf.Module()
    made.first = tf.Variable(0.0)

    def body(step: loop.Step) -> None:
        if step.mean([tf.constant([1.0])]) is not None:
            made.slot = tf.Variable(0.0)

    assert "Module (it had 1 variables, and has 2) has made variables in a step" in refused(
        [weight, made], body
    )


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ([], "has no variables"),
        ([3.0], "state[0] is of type float"),
        (np.array(["a"], object), "an array of objects"),
        ([keras.optimizers.SGD()], "is not built"),
    ],
)
def test_a_state_that_cannot_be_sent_is_refused(state: Any, told: str) -> None:
    with pytest.raises(edl.EdlError, match=r"test_loop.py, line \d+: ") as error:
        joined(state)
    assert told in str(error.value)


def test_data_without_records_and_a_second_join_are_refused() -> None:
    with pytest.raises(edl.EdlError, match="has no records"):
        edl.join(data={"x": np.zeros(0)}, state=[np.zeros(1)])
    joined([np.zeros(1)])
    with pytest.raises(edl.EdlError, match="a second time"):
        joined([np.zeros(1)])


def test_a_loop_that_is_left_cannot_save() -> None:
    job = joined([np.zeros(1, np.float32)])
    for step in job.steps():
        if step.mean([np.ones(1, np.float32)]) is None:
            continue
        break
    assert "was left before the job's end" in job.left_early
    with pytest.raises(edl.EdlError, match=r"a second time; one call yields the steps of all epochs"):
        next(job.steps())
    with pytest.raises(edl.EdlError, match=r"test_loop.py, line \d+: job.save\(\) was called before"):
        job.save(lambda directory: None)


def test_what_a_killed_saver_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    kill = "import os; (path / 'half').touch(); os.kill(os.getpid(), 9)"
    code = (
        f"from pathlib import Path; from edl.trainer import loop\nwith loop._beside(Path()) as path: {kill}"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -9
    assert [path.name for path in tmp_path.glob(".saving-*/*")] == ["half"]
    with (
        scratch.directory(tmp_path, artifacts.SAVING) as of_a_live_saver,
        loop._beside(tmp_path) as directory,
    ):
        (directory / "whole").touch()
        assert of_a_live_saver.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_state_behind_functions_is_restored_after_the_first_turns() -> None:
    held: dict[str, Any] = {"a": np.zeros(2), "b": [np.int32(1)]}

    def replace(values: Any) -> None:
        held.clear()
        held.update(values)

    for step in joined(edl.state(lambda: held, replace), epochs=1).steps():
        if step.mean([np.ones(2, np.float32)]) is None:
            continue
        replace({"a": held["a"] + 1, "b": [np.int32(held["b"][0] + 1)]})
    assert (held["a"].tolist(), int(held["b"][0])) == ([3.0, 3.0], 4)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_script_runs_as_python_runs_it(
    tmp_path: Path, capsys: Any, monkeypatch: Any, as_text: bool
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    text = "import sys\nprint(__name__, sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n"
    (file := tmp_path / "train.py").write_text(text)
    script.run(text if as_text else str(file), ["0", "--x"])
    assert capsys.readouterr().out == "__main__ ['0', '--x']\n"
    with pytest.raises(edl.EdlError, match=r"sys.exit\(3\) with the arguments `3`; options of edl"):
        script.run(text if as_text else str(file), ["3"])
    with pytest.raises(edl.EdlError, match="there is no file"):
        script.run(str(tmp_path / "none.py"), [])
    (folder := tmp_path / "packed" / "inner").mkdir(parents=True)
    (tmp_path / "packed" / "__init__.py").touch()
    (tmp_path / "packed" / "model.py").write_text("from .inner import part\n")
    (folder / "part.py").touch()
    text = "import part\nfrom ..model import part as same\n" + text.replace(
        "__name__", "__name__, __package__"
    )
    (folder / "train.py").write_text(text)
    script.run(str(folder / "train.py"), ["0"])
    assert capsys.readouterr().out.endswith("\n__main__ packed.inner ['0']\n")
