# SPDX-License-Identifier: Apache-2.0
"""A loop whose `state` lacks something that the loop changes is found before a new worker receives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl
from edl.trainer import join, loop
from edl.trainer.agreement import control
from edl.trainer.model.loop_state import LoopState
from edl.trainer.records.batches import Batch
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.step.loop_learner import MOVES, Gradients, LoopLearner
from edl.trainer.step.turns import Given, Turns

RECORDS = 10
Body = Callable[[loop.Step], object]
X = np.random.default_rng(0).normal(size=(RECORDS, 3)).astype(np.float32)
Y = X.sum(axis=1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(join, "host", None)
    monkeypatch.chdir(tmp_path)


def train(state: Any, body: Body, **how: Any) -> int:
    """Run a loop with this body; returns its last step."""
    job = edl.join(data={"x": X, "y": Y}, state=state, **{"batch_size": 4, "epochs": 2, "seed": 1, **how})
    last = 0
    for step in job.steps():
        body(step)
        last = step.number + 1
    return last


def slope(weight: Any, step: loop.Step) -> np.ndarray:
    """The gradient of a linear model's squared error."""
    x = step.records["x"]
    return np.asarray(2 * x.T @ (x @ np.asarray(weight) - step.records["y"]) / len(x), np.float32)


def descent(held: dict[str, Any], update: Callable[[np.ndarray, loop.Step], object]) -> Body:
    def body(step: loop.Step) -> None:
        if (mean := step.mean([slope(held["w"], step)])) is not None:
            update(mean[0], step)

    return body


def rebound() -> tuple[Any, Body]:
    """`W = W - lr * mean`, and the state holds the first array."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32)}
    return [held["w"]], descent(held, lambda mean, step: held.update(w=held["w"] - 0.1 * mean))


def entry() -> tuple[Any, Body]:
    """As `rebound`, with an entry of a dict that is the state."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32)}
    return held, descent(held, lambda mean, step: held.update(w=held["w"] - 0.1 * mean))


def old_get() -> tuple[Any, Body]:
    """The function `get` returns the first array for ever, though `set` is right; as with JAX."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32)}
    first = held["w"]
    put = lambda value: held.update(w=value)  # noqa: E731
    return edl.state(lambda: first, put), descent(
        held, lambda mean, step: held.update(w=held["w"] - 0.1 * mean)
    )


def one_of_two() -> tuple[Any, Body]:
    """One array is changed in place, the other one is replaced."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}

    def body(step: loop.Step) -> None:
        off = float((step.records["x"] @ held["w"] + held["b"].sum() - step.records["y"]).mean())
        mean = step.mean([slope(held["w"], step) + held["b"].sum(), np.full(2, off, np.float32)])
        if mean is not None:
            held["w"] -= 0.1 * mean[0]
            held["b"] = held["b"] - 0.1 * mean[1]

    return [held["w"], held["b"]], body


def average() -> tuple[Any, Body]:
    """An average of the gradients in a Python float decides the size of an update."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32), "norm": 0.0}

    def update(mean: np.ndarray, step: loop.Step) -> None:
        held["norm"] = 0.9 * held["norm"] + 0.1 * float(np.linalg.norm(mean))
        held["w"] -= 0.1 * mean / held["norm"]

    return [held["w"]], descent(held, update)


def counter() -> tuple[Any, Body]:
    """A counter in Python decides the learning rate."""
    held: dict[str, Any] = {"w": np.zeros(3, np.float32), "steps": 0}

    def update(mean: np.ndarray, step: loop.Step) -> None:
        held["steps"] += 1
        held["w"] -= 0.1 / held["steps"] * mean

    return [held["w"]], descent(held, update)


def left_out(optimizer: keras.optimizers.Optimizer) -> Callable[[], tuple[Any, Body]]:
    """The slots of an optimizer are missing."""

    def made() -> tuple[Any, Body]:
        weight = keras.Variable(np.zeros(3, np.float32), name="kernel")
        optimizer.build([weight])

        def body(step: loop.Step) -> None:
            if (mean := step.mean([tf.constant(slope(weight, step))])) is not None:
                optimizer.apply(mean, [weight])

        return [weight], body

    return made


REPLACED = "and state[{}] did not change. So the loop makes new arrays, and `state` holds the first ones"
MISSING = "the same mean changed {} differently. So something that the loop changes is missing from `state`"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        pytest.param(rebound, REPLACED.format(0), id="a name is bound to a new array"),
        pytest.param(entry, REPLACED.format(0).replace("state[0]", "w"), id="an entry is replaced"),
        pytest.param(old_get, REPLACED.format(0).replace("[0]", ""), id="get returns an old object"),
        pytest.param(one_of_two, REPLACED.format(1), id="one of two arrays is replaced"),
        pytest.param(average, MISSING.format("state[0]"), id="an average in Python"),
        pytest.param(counter, MISSING.format("state[0]"), id="a counter in Python"),
        pytest.param(
            left_out(keras.optimizers.SGD(0.1, 0.9)), MISSING.format("kernel"), id="momentum is left out"
        ),
        pytest.param(left_out(keras.optimizers.Adam(0.1)), MISSING.format("kernel"), id="Adam is left out"),
    ],
)
def test_what_is_missing_from_the_state_is_found_in_the_trial(made: Any, told: str) -> None:
    with pytest.raises(edl.EdlError, match=r"^test_loop_checks.py, line \d+: ") as error:
        train(*made())
    assert told in str(error.value)


def sound() -> Iterator[tuple[str, Any, Body]]:
    """Loops that are right, though some of their arrays do not change, or do not follow from the state."""
    frozen = {"w": np.zeros(3, np.float32), "frozen": np.ones(3, np.float32)}

    def one_frozen(step: loop.Step) -> None:
        mean = step.mean([slope(frozen["w"], step), np.ones(3, np.float32)])
        if mean is not None:
            frozen["w"] -= 0.01 * mean[0]

    yield "an array is frozen", [*frozen.values()], one_frozen
    warming = {"w": np.zeros(3, np.float32)}

    def warm_up(mean: np.ndarray, step: loop.Step) -> None:
        warming["w"] -= 0.001 * min(step.number, 9) * mean

    yield "the learning rate begins with 0", [warming["w"]], descent(warming, warm_up)
    chance, noisy = np.random.default_rng(0), np.zeros(3, np.float32)

    def random(step: loop.Step) -> None:
        if (mean := step.mean([chance.normal(size=3).astype(np.float32)])) is not None:
            noisy[...] -= 0.1 * mean[0]

    yield "gradients are random", [noisy], random
    solved = np.ones(3, np.float32)
    yield "all gradients are 0", [solved], lambda step: step.mean([0 * solved])
    behind: dict[str, Any] = {"w": np.zeros(3, np.float32)}
    yield (
        "new arrays behind functions",
        edl.state(lambda: behind["w"], lambda value: behind.update(w=value)),
        descent(behind, lambda mean, step: behind.update(w=behind["w"] - 0.01 * mean)),
    )


@pytest.mark.parametrize(("state", "body"), [pytest.param(*s[1:], id=s[0]) for s in sound()])
def test_a_loop_whose_state_is_complete_trains_on(state: Any, body: Body) -> None:
    assert train(state, body, batch_size=1, epochs=25) == 250


def test_updates_that_never_change_the_state_are_refused_later_if_the_trial_cannot_tell() -> None:
    chance = np.random.default_rng(0)
    held: dict[str, Any] = {"w": np.zeros(3, np.float32)}

    def body(step: loop.Step) -> None:
        if (mean := step.mean([chance.normal(size=3).astype(np.float32)])) is not None:
            held["w"] = held["w"] - mean[0]

    with pytest.raises(edl.EdlError, match=r"^test_loop_checks.py, line \d+: step 101: ") as error:
        train([held["w"]], body, batch_size=1, epochs=25)
    assert "100 updates with gradients that are not zero have not changed state[0]" in str(error.value)
    assert MOVES < 100


class OneRecord(SimpleNamespace):
    """A batch."""

    x = None

    def __len__(self) -> int:
        return 1


class Momentum:
    """A loop with a momentum that is not in its state; it takes turns at once (`Turns`)."""

    learner: LoopLearner

    def __init__(self, momentum: float):
        self.weight, self._speed = np.zeros(4, np.float32), momentum

    def rest(self) -> None:
        pass

    def offer(self, turn: Any) -> Given:
        self.learner.refuse_changed(turn.number)
        return Given([np.ones(4, np.float32)], 0.0, [])

    def answer(self, mean: Any) -> None:
        self._speed = 0.9 * self._speed + float(mean[0][0])
        self.weight -= 0.1 * self._speed


def ring_of_two(momenta: tuple[float, float], first: int, new: bool, steps: int) -> list[str]:
    """The errors of two members whose states are equal and whose momenta may differ."""
    group, errors = InProcessGroup(2), ["", ""]

    def member(rank: int) -> None:
        loop = Momentum(momenta[rank])
        ring, one = LocalRing(), cast(Batch, OneRecord())
        ring.open(group)
        ring.form(rank, 2)
        state = LoopState({"w": loop.weight})
        learner = loop.learner = LoopLearner(state, ring.reduce, cast(Turns, loop), one, 1)
        learner.learn(Gradients([loop.weight], False, []))
        if new:
            learner.compare_first_steps()
        try:
            for step in range(first, first + steps):
                learner.apply(learner.allreduce_step(one, control.write(step), step, rank, 2))
        except edl.EdlError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_a_new_worker_is_compared_with_the_others_after_its_first_step() -> None:
    for found in ring_of_two((3.0, 0.0), first=57, new=True, steps=3):
        assert "at step 59 the workers' states differ in w: either something that the loop changes" in found
        assert found.endswith("or bad memory")
    assert ring_of_two((3.0, 3.0), first=57, new=True, steps=3) == ["", ""]
    assert ring_of_two((3.0, 0.0), first=57, new=False, steps=3) == ["", ""]  # compared in each hundredth
