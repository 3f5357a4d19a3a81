# SPDX-License-Identifier: Apache-2.0
"""Rows: what an id has before anything is learned of it, how it learns, how it is forgotten, how a step is
undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import server_of
from edl.ps.errors import Invalid
from edl.ps.table.table import Copy, Table

FIRST_UNIFORM = [0.04919939488172531, -0.011195012368261814]
FIRST_NORMAL = [1.0271937847137451, -1.8052595853805542]
UNIFORM = keras.initializers.RandomUniform(-0.05, 0.05)


def table(
    optimizer: Any = None,
    initializer: Any = UNIFORM,
    dim: int = 8,
    seed: int = 7,
    name: str = "t",
    **more: Any,
) -> Table:
    optimizer = keras.optimizers.SGD(0.5) if optimizer is None else optimizer
    declared = pb.Table(
        name=name,
        dim=dim,
        initializer=json.dumps(keras.initializers.serialize(initializer)),
        optimizer=json.dumps(keras.optimizers.serialize(optimizer)),
        **more,
    )
    return Table(declared, seed)


def pulled(t: Table, ids: np.ndarray, step: int = 0) -> np.ndarray:
    out = np.full(len(ids) * t.dim, np.nan, np.float32)
    t.pull(step, ids, out)
    return out.reshape(-1, t.dim)


def learn(t: Table, step: int, ids: Any, value: float = 1.0, scale: float = 1.0) -> None:
    ids = np.asarray(ids, np.int64)
    t.apply(step, [(ids, np.full(len(ids) * t.dim, value, np.float32))], scale, 0.5, step)


def content(t: Table, step: int) -> dict[int, tuple[Any, ...]]:
    c = t.copy(step)
    rows = {
        int(i): (s, n, r.tobytes(), w.tobytes())
        for i, s, n, r, w in zip(c.ids, c.steps, c.counts, c.rows, c.slots, strict=True)
    }
    return {**rows, **{int(i): ("seen", s, n) for i, s, n in c.seen}}


# --- initial rows


def test_a_row_is_born_the_same_in_any_order_and_company() -> None:
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 4000)
    whole = pulled(table(), ids)
    order = np.random.default_rng(2).permutation(len(ids))
    assert (pulled(table(), ids[order]) == whole[order]).all()
    parts = [pulled(table(), ids[server_of(ids, 3) == server]) for server in range(3)]
    assert (np.concatenate(parts) == whole[np.argsort(server_of(ids, 3), kind="stable")]).all()


def test_other_seeds_tables_and_ids_have_other_rows() -> None:
    ids = np.arange(100)
    first = pulled(table(), ids)
    assert not (first == pulled(table(seed=8), ids)).any(axis=1).any()
    assert not (first == pulled(table(name="u"), ids)).any(axis=1).any()
    own = keras.initializers.RandomUniform(-0.05, 0.05, seed=3)
    assert not (first == pulled(table(initializer=own), ids)).any(axis=1).any()
    assert len(np.unique(first)) > 700, "of 800 values"


@pytest.mark.parametrize(
    ("initializer", "mean", "stddev", "low", "high"),
    [
        (keras.initializers.Zeros(), 0, 0, 0, 0),
        (keras.initializers.Ones(), 1, 0, 1, 1),
        (keras.initializers.Constant(0.25), 0.25, 0, 0.25, 0.25),
        (keras.initializers.RandomUniform(-1, 3), 1, 4 / 12**0.5, -1, 3),
        (keras.initializers.RandomNormal(2, 0.5), 2, 0.5, -1, 5),
        (keras.initializers.TruncatedNormal(1, 0.5), 1, 0.5 * 0.8796, 0, 2),
        (keras.initializers.VarianceScaling(2.0, "fan_out", "uniform"), 0, 0.5, -0.8661, 0.8661),
        (keras.initializers.VarianceScaling(2.0, "fan_out", "truncated_normal"), 0, 0.5, -1.1371, 1.1371),
    ],
)
def test_initial_rows_have_the_distribution_that_keras_names(
    initializer: Any, mean: float, stddev: float, low: float, high: float
) -> None:
    rows = pulled(table(initializer=initializer), np.arange(40_000))
    assert rows.mean() == pytest.approx(mean, abs=4 * stddev / rows.size**0.5 + 1e-7)
    assert rows.std() == pytest.approx(stddev, rel=0.01, abs=1e-7)
    assert rows.min() >= low and rows.max() <= high
    assert np.isfinite(rows).all()
    theirs = np.asarray(initializer((40_000, 8)))
    assert theirs.std() == pytest.approx(rows.std(), rel=0.02, abs=1e-7) or isinstance(
        initializer, keras.initializers.VarianceScaling
    ), "there fan_out is dim, too"


def test_the_first_rows_are_for_ever() -> None:
    """Rows that are in no checkpoint are born again from these."""
    assert pulled(table(dim=2), np.array([0, -1]))[:, 0].tolist() == FIRST_UNIFORM
    normal = keras.initializers.RandomNormal(0, 1)
    assert pulled(table(dim=2, initializer=normal), np.array([5]))[0].tolist() == FIRST_NORMAL


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.GlorotUniform(),
        keras.initializers.HeNormal(),
        keras.initializers.Orthogonal(),
        keras.initializers.VarianceScaling(1.0, "fan_in"),
    ],
)
def test_an_initializer_that_needs_the_number_of_ids_is_refused_by_name(initializer: Any) -> None:
    with pytest.raises(Invalid, match=f"'t'.*{type(initializer).__name__}.*RandomUniform"):
        table(initializer=initializer)


# --- optimizers


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (lambda: keras.optimizers.SGD(0.3), 0),
        (lambda: keras.optimizers.SGD(0.3, momentum=0.9), 0),
        (lambda: keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True), 0),
        (lambda: keras.optimizers.Adagrad(0.3), 1e-6),
        (lambda: keras.optimizers.Adagrad(0.3, initial_accumulator_value=0.5, epsilon=1e-3), 1e-6),
        (lambda: keras.optimizers.Adam(0.01), 1e-6),
        (lambda: keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.9, epsilon=1e-4), 1e-6),
        (lambda: keras.optimizers.Ftrl(0.1), 1e-6),
        (lambda: keras.optimizers.Ftrl(0.1, -0.7, 0.2, 0.01, 0.02, 0.03, beta=0.1), 1e-6),
    ],
)
def test_rows_learn_as_a_variable_of_keras_does(make: Callable[[], Any], tolerance: float) -> None:
    ids = np.array([3, -9, 2**40, 11])
    theirs, t = make(), table(make())
    variable = keras.Variable(pulled(t, ids))
    rng = np.random.default_rng(4)
    for step in range(20):
        gradients = rng.normal(size=(4, 8)).astype(np.float32)
        theirs.apply([keras.ops.convert_to_tensor(gradients)], [variable])
        t.apply(step, [(ids, gradients.reshape(-1))], 1.0, float(theirs.learning_rate), step)
    expected = variable.numpy()
    if tolerance == 0:
        assert (pulled(t, ids) == expected).all()
    np.testing.assert_allclose(pulled(t, ids), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (keras.optimizers.RMSprop(), "RMSprop"),
        (keras.optimizers.Adam(amsgrad=True), "amsgrad"),
        (keras.optimizers.SGD(weight_decay=0.1), "weight_decay"),
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm"),
        (keras.optimizers.Adam(use_ema=True), "use_ema"),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps"),
    ],
)
def test_what_a_server_does_not_do_is_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(Invalid, match=f"'t'.*{named}"):
        table(optimizer)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"class_name": 3}', '{"class_name": "SGD", "config": {"momentum": "x"}}']
)
def test_what_is_no_optimizer_at_all_is_refused(text: str) -> None:
    declared = pb.Table(name="t", dim=2, initializer='"Zeros"', optimizer=text)
    with pytest.raises(Invalid, match=r"'t'.*optimizer"):
        Table(declared, 1)


def test_a_schedule_is_no_learning_rate_of_rows_alone() -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(Invalid, match="schedule"):
        table(keras.optimizers.SGD(decay), own_learning_rate=True)
    table(keras.optimizers.SGD(decay))  # the model's rate comes with each step


def test_a_table_with_its_own_learning_rate_does_not_use_the_models() -> None:
    t = table(keras.optimizers.SGD(0.25), keras.initializers.Zeros(), own_learning_rate=True)
    learn(t, 0, [1])
    assert (pulled(t, np.array([1])) == -0.25).all()


def test_gradients_are_added_in_the_order_of_the_ranks_and_then_scaled() -> None:
    t = table(keras.optimizers.SGD(1.0), keras.initializers.Zeros(), dim=1)
    big, small = np.float32(1e8), np.float32(3.0)
    parts = [(np.array([5]), np.array([g], np.float32)) for g in (big, small, -big)]
    t.apply(0, [*parts, (np.array([6]), np.array([2], np.float32))], 0.5, 1.0, 0)
    assert pulled(t, np.array([5]))[0, 0] == -(((big + small) - big) * np.float32(0.5))
    assert pulled(t, np.array([6]))[0, 0] == -1.0


def test_rows_are_the_same_on_any_number_of_servers() -> None:
    rng = np.random.default_rng(5)
    one, three = table(keras.optimizers.Adam()), [table(keras.optimizers.Adam()) for _ in range(3)]
    for step in range(12):
        parts = [
            (np.unique(rng.integers(0, 300, 60)), rng.normal(size=(60, 8)).astype(np.float32))
            for _ in range(2)
        ]
        parts = [(ids, values[: len(ids)]) for ids, values in parts]
        one.apply(step, [(ids, values.reshape(-1)) for ids, values in parts], 0.1, 0.01, step)
        for server, t in enumerate(three):
            mine = [
                (ids[at], np.ascontiguousarray(v[at]).reshape(-1))
                for ids, v in parts
                for at in [server_of(ids, 3) == server]
            ]
            t.apply(step, mine, 0.1, 0.01, step)
    assert content(one, 12) == {k: v for t in three for k, v in content(t, 12).items()}


# --- growing, forgetting, undoing


def test_reading_stores_nothing() -> None:
    t = table()
    pulled(t, np.arange(1000))
    assert len(t) == 0 and content(t, 0) == {}


def test_a_table_grows_and_keeps_all() -> None:
    t = table(keras.optimizers.SGD(1.0), keras.initializers.Zeros())
    for step in range(10):
        learn(t, step, np.arange(step * 20_000, (step + 1) * 20_000), float(step))
    assert len(t) == 200_000
    expected = -0.5 * np.repeat(np.arange(10.0), 20_000)
    assert (pulled(t, np.arange(200_000)) == expected[:, None]).all()


@pytest.mark.parametrize("more", [{}, {"min_count": 3}, {"ttl_steps": 4}, {"min_count": 2, "ttl_steps": 3}])
def test_the_last_step_can_be_taken_back_and_made_again(more: dict[str, Any]) -> None:
    rng = np.random.default_rng(6)
    steps = [np.unique(rng.integers(0, 120, 30)) for _ in range(60)]
    straight, t = table(keras.optimizers.Adam(), **more), table(keras.optimizers.Adam(), **more)
    for step, ids in enumerate(steps):
        before = content(t, step)
        learn(t, step, steps[step - 1])
        t.take_back()
        assert content(t, step) == before
        learn(t, step, ids)
        learn(straight, step, ids)
        assert content(t, step + 1) == content(straight, step + 1)
    assert len(t) > 0


def test_a_row_is_learned_when_its_id_was_seen_often_enough() -> None:
    t = table(keras.optimizers.SGD(1.0), keras.initializers.Zeros(), min_count=3)
    for step in range(5):
        learn(t, step, [7] if step % 2 else [7, 8])
        expected = -0.5 * max(0, step - 1)
        assert (pulled(t, np.array([7]), step + 1) == expected).all()
    assert (pulled(t, np.array([8]), 5) == -0.5).all(), "seen thrice, learned once"
    assert len(t) == 2


def test_a_row_that_no_step_has_had_for_so_long_is_forgotten() -> None:
    t = table(keras.optimizers.SGD(1.0), keras.initializers.Zeros(), ttl_steps=3)
    learn(t, 0, [1])
    for step in range(1, 4):
        learn(t, step, [2])
        assert (pulled(t, np.array([1]), step + 1) == (-0.5 if step < 3 else 0.0)).all(), step
    for step in range(4, 12):
        learn(t, step, [2])
    assert set(content(t, 12)) == {2} and len(t) == 1
    learn(t, 12, [1])
    assert (pulled(t, np.array([1]), 13) == -0.5).all(), "as a new one"


def test_what_is_forgotten_does_not_depend_on_when_memory_is_freed() -> None:
    rng = np.random.default_rng(8)
    seen: dict[int, int] = {}
    t = table(ttl_steps=10)
    for step in range(100):
        ids = np.unique(rng.integers(0, 500, 20))
        learn(t, step, ids)
        seen.update(dict.fromkeys(ids.tolist(), step))
        assert set(content(t, step + 1)) == {i for i, last in seen.items() if last >= step + 1 - 10}


def test_a_copy_that_is_loaded_is_the_same_table() -> None:
    t = table(keras.optimizers.Adam(), min_count=2)
    for step in range(6):
        learn(t, step, np.arange(step, 40))
    copy, other = t.copy(6), table(keras.optimizers.Adam(), min_count=2)
    half = len(copy.ids) // 2
    for part in (slice(0, half), slice(half, None)):
        seen = copy.seen if part.start else copy.seen[:0]
        taken = {name: getattr(copy, name)[part] for name in ("ids", "steps", "counts", "rows", "slots")}
        other.load(Copy(**taken, seen=seen))
    assert content(other, 6) == content(t, 6)
    learn(t, 6, np.arange(60))
    learn(other, 6, np.arange(60))
    assert content(other, 7) == content(t, 7)
