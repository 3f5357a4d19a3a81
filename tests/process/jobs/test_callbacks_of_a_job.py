# SPDX-License-Identifier: Apache-2.0
"""Callbacks in a real job: its history, its end and its model are those of `fit`, also when the worker that
called them has died of it."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.journal import audit
from tests.process.conftest import MODELS

pytestmark = pytest.mark.process
EPOCHS = 20


async def test_a_job_is_stopped_early_with_the_best_weights_though_its_root_died_in_a_callback(
    a_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(MODELS))
    async with a_job(
        "training.batchSize=100",
        "data.shuffle=false",
        "minWorkers=2",
        workers=2,
        epochs=EPOCHS,
        model="called.py",
    ) as job:
        job.give("die")
        await job.until(lambda: job.gone(0))
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    with open(tmp_path / "orders" / "log.csv") as file:
        logged = [row["epoch"] for row in csv.DictReader(file)]
    assert "EarlyStopping has stopped the training" in "".join(job.noticed(Reason.EpochsChanged))
    called = importlib.import_module("called")
    alone, (x, y) = called.model(), called.records("train")
    history = alone.fit(
        x,
        y,
        batch_size=called.BATCH,
        shuffle=False,
        epochs=EPOCHS,
        verbose=0,
        validation_data=called.records("validation"),
        callbacks=called.callbacks(),
    ).history
    assert 2 < len(history["loss"]) < EPOCHS, "what is expected here"
    assert len(set(history["learning_rate"])) > 1
    assert logged == [str(n) for n in range(len(history["loss"]))], "each epoch once, whichever worker wrote"
    assert {"value_loss", "square_loss", "val_value_loss", "val_square_loss"} < history.keys()
    assert summary["history"].keys() == history.keys()
    for name, column in history.items():
        assert summary["history"][name] == pytest.approx(column, rel=1e-3), name
    assert json.loads((job.output / artifacts.HISTORY).read_text()) == summary["history"]
    with open(job.output / artifacts.HISTORY_TABLE) as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == logged
    saved = keras.models.load_model(job.output / artifacts.MODEL)
    for ours, theirs in zip(saved.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    best = min(history["val_loss"])
    assert summary["metrics"]["loss"] == pytest.approx(best, rel=1e-3), "it is the restored model that counts"
    assert "exactly once" in audit.audit(job.output)
