# SPDX-License-Identifier: Apache-2.0
"""What was trained with rows on parameter servers, used with servers of another number, and without any:
evaluated, predicted with, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.checkpoints import Store
from edl.contract import artifacts
from tests.models import digits_by_id
from tests.process.conftest import MODELS
from tests.process.jobs.test_checkpoints import Jobs

pytestmark = pytest.mark.process


def ends(jobs: Jobs, *sets: str) -> tuple[str, Path]:
    """What such a job prints, and its output directory."""
    said = (
        "training.epochs=1",
        "training.batchSize=100",
        "export.verify=false",
        *sets,
    )
    module = str(MODELS / "digits_by_id.py")
    with jobs.run(module, *(word for each in said for word in ("--set", each))) as (job, output):
        assert job.stdout is not None
        text = job.stdout.read()
        assert job.wait() == 0, text
    return text, output


def predicted(output: Path) -> np.ndarray:
    files = sorted((output / artifacts.PREDICTIONS).glob("*.npz"))
    return np.concatenate([np.load(file)["output"] for file in files])


def sample_losses(output: Path) -> list[float]:
    """The numbers by which the master has compared the workers, as they became ready."""
    lines = (output / artifacts.JOURNAL).read_text(encoding="utf-8").splitlines()
    events = [json.loads(line).get("event", {}) for line in lines]
    return [event["sample_loss"]["loss"] for event in events if event.get("type") == "Ready"]


@pytest.mark.timeout(360)  # four jobs, one after the other
def test_a_model_with_rows_on_servers_is_evaluated_and_predicts_with_and_without_any_and_is_exported(
    tmp_path: Path,
) -> None:
    jobs, where = Jobs(tmp_path), tmp_path / "checkpoints"
    _, trained = ends(
        jobs, "mode=hybrid", "ps.servers=2", "workers=1", f"checkpoint.dir={where}", "evaluation.epochs=0"
    )
    keras_model: Any = keras.models.load_model(trained / artifacts.MODEL)
    ids, labels = digits_by_id.records("validation")
    outputs = keras_model.predict(ids, verbose=0)
    known = keras_model.get_layer("pixels").ids.numpy()
    assert 0 < np.isin(ids, known).mean() < 1, "some ids are to be known, and some are not"
    expected = keras_model.evaluate(ids, labels, verbose=0, return_dict=True)

    evaluated = "mode=evaluate", "workers=2", "data.workers=1"  # read in processes of their own
    said, output = ends(jobs, *evaluated, f"initFrom.path={trained / artifacts.MODEL}")
    assert artifacts.read_summary(output)["metrics"] == pytest.approx(expected, rel=1e-5), said
    losses = sample_losses(output)
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * len(losses)
    assert losses[0] > 0

    (newest,) = Store.open(str(where)).checkpoints()[-1:]
    begun = f"initFrom.path={where / newest.directory}"
    said, output = ends(jobs, "mode=predict", "ps.servers=1", "workers=1", "data.workers=2", begun)
    np.testing.assert_allclose(predicted(output), outputs, rtol=1e-6, atol=1e-6)
    assert sample_losses(output)[0] > 0
    assert f"the prediction begins with the weights of the checkpoint of step {newest.step}" in said

    exported = tmp_path / "exported.keras"
    done = jobs.command(
        "model", "export", str(trained), "--step", str(newest.step), "--output", str(exported)
    )
    assert done.returncode == 0, done.stderr
    again: Any = keras.models.load_model(exported)
    np.testing.assert_array_equal(again.predict(ids, verbose=0), outputs)
