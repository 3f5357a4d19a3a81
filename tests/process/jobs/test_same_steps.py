# SPDX-License-Identifier: Apache-2.0
"""The steps of a job are the same for every ring and every fault, as the final weights show."""

from __future__ import annotations

import asyncio
import importlib
import random
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.layout import Layout
from edl.contract.order import Order
from edl.contract.steps import Steps
from tests.process.conftest import MODELS
from tests.support.jobs.evidence import saved_weights

A_Job = Callable[..., Any]
RECORDS, EPOCHS = 1000, 4
SEED = 1  # the default of training.seed


@pytest.fixture
def model_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A model of tests/models, imported here as workers import it."""
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module


def expected(which_step: Any) -> np.ndarray:
    """In which step of each epoch each record is: one digit an epoch."""
    steps, order = Steps(RECORDS, which_step.BATCH), Order(Layout(RECORDS), SEED)
    found = np.zeros(RECORDS)
    for step in range(EPOCHS * steps.per_epoch):
        digit = step % steps.per_epoch + 1
        found[order.records(*steps.positions(step))] += digit * which_step.BASE ** steps.epoch(step)
    return found


async def storm(job: Any, seed: int) -> None:
    """Kill, stop, scale and have leave until the job is well on its way."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(6):
        await job.until(lambda: job.ring)
        await job.stepping()
        members = job.ring
        match chance.choice(["kill", "kill", "term", "scale"]):
            case "kill" if len(members) > 1:
                job.kill(chance.choice(members))
            case "term" if members:
                job.kill(chance.choice(members), number=signal.SIGTERM)
            case _:
                job.master.scale(chance.randint(1, 4))
        await asyncio.sleep(chance.uniform(0, 0.3))  # at any moment of what follows


async def test_each_record_is_in_the_same_step_in_any_ring(
    a_job: A_Job, model_file: Callable[[str], Any]
) -> None:
    which_step = model_file("which_step")
    size = f"training.batchSize={which_step.BATCH}"
    async with a_job(size, workers=5, records=RECORDS, epochs=EPOCHS, model="which_step.py") as job:
        await job.ring_of(5)
        for workers in (1, 2):
            job.master.scale(workers)
            await job.ring_of(workers)
            await job.stepping()
        await storm(job, seed=random.randrange(10**6))
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert summary["step"] == EPOCHS * -(-RECORDS // which_step.BATCH)
    (weights,) = saved_weights(job.output / artifacts.MODEL)
    np.testing.assert_array_equal(weights, expected(which_step))


async def test_the_model_is_that_of_one_process_of_keras_through_joins_deaths_and_resizes(
    a_job: A_Job, model_file: Callable[[str], Any]
) -> None:
    dense = model_file("dense")
    async with a_job(
        "training.batchSize=50", workers=3, records=dense.RECORDS, epochs=4, model="dense.py"
    ) as job:
        await job.ring_of(3)
        await storm(job, seed=random.randrange(10**6))
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    assert len(summary["generations"]) > 2
    model, (x, y) = dense.model(), dense.records()
    steps, order = Steps(dense.RECORDS, 50), Order(Layout(dense.RECORDS), SEED)
    for step in range(4 * steps.per_epoch):
        which = order.records(*steps.positions(step))
        model.train_on_batch(x[which], y[which])
    trained = keras.saving.load_model(job.output / artifacts.MODEL)
    for ours, theirs in zip(trained.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
