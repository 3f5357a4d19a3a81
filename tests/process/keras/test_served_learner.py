# SPDX-License-Identifier: Apache-2.0
"""All weights on parameter servers: what one worker and real servers train is what Keras trains."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import keras
import numpy as np
import pytest

import edl.layers
from edl import config
from edl.config import values
from edl.contract.layout import Layout, StepSlice
from edl.contract.proto import ps_pb2 as pb
from edl.errors import ModelError
from edl.layers.row_location import rows_elsewhere
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.step.ps_learner import PsLearner

RECORDS, BATCH, STEPS = 60, 12, 10  # two epochs of five steps
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(RECORDS, 6)).astype(np.float32), RNG.integers(0, 3, RECORDS)


class InOrder:
    """A source that gives the records as they lie."""

    layout = Layout(RECORDS)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch:
        return some(np.arange(start, stop) % RECORDS)


def some(indices: np.ndarray) -> Batch:
    return Batch(indices, X[indices], Y[indices], None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two servers, which begin anew for each run."""
    where: Path = tmp_path_factory.mktemp("servers")
    files = [where / f"address-{index}" for index in range(2)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edl.ps",
                "--index",
                str(index),
                "--servers",
                "2",
                "--listen",
                "127.0.0.1:0",
                "--log-dir",
                str(where / f"log-{index}"),
                "--address-file",
                str(file),
            ],
            env={**os.environ, "EDL_TOKEN": "token"},
        )
        for index, file in enumerate(files)
    ]
    waiting = Event()
    while not all(file.exists() for file in files):
        assert all(process.poll() is None for process in processes), "a server does not start"
        waiting.wait(0.05)
    yield [file.read_text().strip() for file in files]
    for process in processes:
        process.kill()
        process.wait()


def async_loop_of(learner: PsLearner, addresses: list[str], **how: Any) -> AsyncLoop:
    interrupt, run_id = Interrupt(), secrets.token_hex(8)
    links = [ServerLink(index, address, "token", interrupt) for index, address in enumerate(addresses)]
    typed = config.parse(values.merge(values.defaults(), {"mode": "ps", "ps": how}))
    options = pb.Asynchronous(grads_to_wait=typed.ps.grads_to_wait, max_staleness=typed.ps.max_staleness)
    servers = PsClient(links, run_id, 7, interrupt, asynchronous=options)
    session = Session(0, lambda message: None, Event())
    batches = Batches(InOrder(), BATCH)
    batches.take(InOrder.layout, StepSlice.even(0, 1))
    report = Telemetry(session, batches.steps, log=lambda incarnation: None)
    async_loop = AsyncLoop(typed, session, learner, servers, batches, report)
    learner.use(async_loop)
    assert async_loop.look() == [0, 1], "a server has something of the test before"
    async_loop.begin()
    servers.introduce()
    async_loop.keep(Ledger())
    return async_loop


def trained(model: keras.Model, addresses: list[str], **how: Any) -> AsyncLoop:
    """By one worker, on servers; the model has the weights then."""
    learner = PsLearner(model, some(np.arange(5)), [])
    async_loop = async_loop_of(learner, addresses, **how)
    assert async_loop.run(1, 0, STEPS, lambda: None)
    async_loop.servers.drain(STEPS)
    async_loop.pull_all(STEPS)
    return async_loop


def by_keras(model: keras.Model) -> keras.Model:
    for step in range(STEPS):
        batch = some(np.arange(step * BATCH, (step + 1) * BATCH) % RECORDS)
        model.train_on_batch(batch.x, batch.y)
    return model


def dense(optimizer: Any, normalized: bool = False) -> keras.Model:
    keras.utils.set_random_seed(3)
    middle = [keras.layers.BatchNormalization(momentum=0.9)] if normalized else []
    # Before normalization a bias has no gradient but noise.
    first = keras.layers.Dense(50, use_bias=not normalized)
    layers = [keras.Input((6,)), first, *middle, keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("optimizer", "normalized", "tolerance"),
    [
        (lambda: keras.optimizers.SGD(0.1), False, 1e-6),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), True, 1e-5),
        (lambda: keras.optimizers.Adam(0.01), True, 1e-4),
        (lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1), False, 1e-6),
        (
            lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)),
            False,
            1e-6,
        ),
    ],
)
def test_one_worker_trains_what_keras_trains(
    two: list[str], optimizer: Callable[[], Any], normalized: bool, tolerance: float
) -> None:
    model, expected = dense(optimizer(), normalized), by_keras(dense(optimizer(), normalized))
    trained(model, two)
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=tolerance, err_msg=ours.path)


def test_rows_and_dense_weights_learn_side_by_side(two: list[str]) -> None:
    def model(on_servers: bool) -> keras.Model:
        keras.utils.set_random_seed(3)
        x = keras.Input((6,))
        ids = keras.ops.cast(keras.ops.abs(x) * 10, "int64")
        rows = edl.layers.Embedding(4, input_dim=100, initializer="zeros", name="rows")(ids)
        if on_servers:
            assert rows is not None
        out = keras.layers.Dense(3)(keras.layers.Flatten()(rows))
        model = keras.Model(x, out)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss)
        return model

    expected = by_keras(model(on_servers=False))
    with rows_elsewhere():
        ours = model(on_servers=True)
    async_loop = trained(ours, two)
    np.testing.assert_allclose(
        np.asarray(ours.layers[-1].kernel), np.asarray(expected.layers[-1].kernel), atol=1e-6
    )
    ids, rows = async_loop.all_rows(0)
    (table,) = [w for w in expected.weights if w.shape == (100, 4)]
    np.testing.assert_allclose(rows, np.asarray(table)[ids], atol=1e-6)


def test_two_gradients_that_wait_for_each_other_are_one_update_with_their_mean(
    two: list[str],
) -> None:
    model, expected = dense(keras.optimizers.SGD(0.1)), dense(keras.optimizers.SGD(0.1))
    async_loop = trained(model, two, gradsToWait=2)
    assert async_loop.servers.progress.version == STEPS // 2
    for step in range(0, STEPS, 2):  # two batches of the same size, from the same weights: one of both
        both = some(np.arange(step * BATCH, (step + 2) * BATCH) % RECORDS)
        expected.train_on_batch(both.x, both.y)
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-6, err_msg=ours.path)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.AdamW(), "not with the model's AdamW"),
        (lambda: keras.optimizers.SGD(use_ema=True), "use_ema=True"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad=True"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "scales the loss"),
    ],
)
def test_what_servers_cannot_do_is_refused_by_name(optimizer: Callable[[], Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        PsLearner(dense(optimizer()), some(np.arange(5)), [])


def test_callbacks_may_set_the_learning_rate_and_no_weights() -> None:
    learner = PsLearner(dense(keras.optimizers.SGD(0.1), True), some(np.arange(5)), [])
    tables, before = learner.server_tables, learner.parts()
    learner.model.optimizer.learning_rate = 0.5
    kept = learner.beside()
    assert learner.server_tables == tables, "the tables are others than were declared"
    (rate,) = [n for n, (a, b) in enumerate(zip(before, learner.parts(), strict=True)) if (a != b).any()]
    learner.refuse_changed({rate: before[rate]})
    learner.change({rate: before[rate]})
    learner.take_beside(kept)
    assert float(learner.model.optimizer.learning_rate.numpy()) == 0.5
    with pytest.raises(ModelError, match=r"a callback has changed .*kernel"):
        learner.refuse_changed({0: before[0]})
