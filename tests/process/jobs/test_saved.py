# SPDX-License-Identifier: Apache-2.0
"""A trained model is never lost: real jobs whose end goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract import artifacts
from edl.journal import audit
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.process.conftest import Running

pytestmark = pytest.mark.process
A_Job = Callable[..., AbstractAsyncContextManager[Running]]


def an_ending(a_job: A_Job, workers: int, *sets: str) -> AbstractAsyncContextManager[Running]:
    """A job whose end goes wrong on request. It idles long enough for any machine to start it."""
    return a_job(
        "training.batchSize=2", "evaluation.epochs=0", *sets, workers=workers, model="ending.py", epochs=2
    )


def seen(job: Running, kind: type) -> list[Any]:
    return [event for _, event, _ in job.seen if isinstance(event, kind)]


async def ends(job: Running, *orders: str) -> dict[str, Any]:
    """Once its ring trains, give the orders; its summary."""
    await job.ring_of(job.job.target)
    for order in orders:
        job.give(order)
    return await job.end()


def trained_once(job: Running, summary: dict[str, Any]) -> None:
    """Every record was applied, and nothing was trained again."""
    assert summary["records"]["applied"] == 2 * 200
    assert summary["state_losses"] == 0
    assert "exactly once" in audit.audit(job.output)
    # mode=auto, and nothing in the model needs a server: so there was none.
    assert (summary["task"]["mode"], job.status["servers"]) == ("train", [])
    assert not (job.output / artifacts.SERVERS).exists() and not list(job.output.glob("*/ps-*.log"))


def loaded(job: Running, summary: dict[str, Any]) -> keras.Model:
    """The model that was kept, as a user with the model's code loads it."""
    from tests.models import ending

    path = job.output / summary["model"]
    if path.name == artifacts.MODEL:
        return keras.models.load_model(path, custom_objects={"Touchy": ending.Touchy})
    model = ending.model()
    with np.load(path) as arrays:
        for variable, name in zip(model.variables, arrays.files, strict=True):
            variable.assign(arrays[name])
    return model


async def test_an_error_in_the_evaluation_leaves_the_model_and_is_told(a_job: A_Job) -> None:
    async with an_ending(a_job, workers=2) as job:
        summary = await ends(job, "exit-read")
    assert summary["phase"] == "Failed"
    assert [f["part"] for f in summary["failed_parts"]] == ["evaluation"]
    assert summary["failed_parts"][0]["why"] == "the model's code has called sys.exit(no read today)"
    assert "the trained model is kept: model.keras" in summary["reason"]
    assert "ending.py" in summary["traceback"]
    assert loaded(job, summary).optimizer.iterations == summary["step"]
    trained_once(job, summary)


async def test_a_model_that_cannot_be_serialised_is_told_at_once_and_its_weights_are_kept(
    a_job: A_Job,
) -> None:
    async with an_ending(a_job, workers=2) as job:
        job.give("raise-config")
        await job.ring_of(2)
        (warning,) = seen(job, ev.Warned)
        assert "the model cannot be saved whole: RuntimeError: no config today" in warning.text
        summary = await job.end()
    assert summary["phase"] == "Failed"
    assert [f["part"] for f in summary["failed_parts"]] == ["saving"]
    assert (summary["model"], summary["warnings"]) == (artifacts.VARIABLES, [warning.text])
    assert set(summary["metrics"]) == {"loss", "mae"}, "it is evaluated all the same"
    trained_once(job, summary)


@pytest.mark.parametrize(("order", "formats"), [("kill-config", {}), ("kill-read", artifacts.FORMATS)])
async def test_who_is_killed_while_it_saves_or_evaluates_is_followed_by_another(
    a_job: A_Job, order: str, formats: dict[str, str]
) -> None:
    sets = [f"export.formats={{{','.join(formats)}}}", "export.verify=true"] if formats else []
    async with an_ending(a_job, 2, *sets) as job:
        summary = await ends(job, order, "nan-read")
    assert summary["phase"] == "Succeeded"
    assert summary["metrics"] == {"loss": None, "mae": None}, "JSON has no number for what is not finite"
    # A copy is saved before the ring evaluates the model, and that before it is handed over.
    exports = [e for _, _, effects in job.seen for e in effects if isinstance(e, ef.Export)]
    assert len(exports) == 1
    assert not list(job.output.glob(".*.*")), "a file that was not finished is left"
    listed = json.loads((job.output / artifacts.EXPORTS).read_text())["exports"]
    assert {e["path"]: e["verified"] for e in listed} == (
        dict.fromkeys(formats.values(), True) or {artifacts.MODEL: False}
    )
    assert summary["exports"] == (formats or {"keras": artifacts.MODEL})
    assert "with custom objects (Touchy)" in summary["model_note"]
    assert summary["warnings"] == [summary["model_note"]]
    loaded(job, summary)
    trained_once(job, summary)


async def test_the_last_holder_that_is_killed_while_it_evaluates_leaves_the_model(a_job: A_Job) -> None:
    async with an_ending(a_job, workers=1) as job:
        summary = await ends(job, "kill-read")
    assert summary["phase"] == "Failed"
    assert [f["part"] for f in summary["failed_parts"]] == ["evaluation"]
    loaded(job, summary)
    trained_once(job, summary)


async def test_held_out_records_that_cannot_be_read_are_found_before_the_first_step(a_job: A_Job) -> None:
    # One worker tries it out: without it, no ring is to form.
    async with an_ending(a_job, 2, "minWorkers=2") as job:
        job.give("raise-read")
        summary = await job.end()
    assert summary["phase"] == "Failed"
    assert (
        "tried out before the first step: RuntimeError: no read today (ending.py, line" in summary["reason"]
    )
    assert "ending.py" in summary["traceback"]
    assert summary["step"] == 0


async def test_data_without_a_record_are_refused(a_job: A_Job) -> None:
    async with a_job(workers=1, records=0) as job:
        summary = await job.end()
    assert summary["phase"] == "Failed"
    assert "data('train') has no records (expected at least 1, or data.allowEmpty=true)" in summary["reason"]
