# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics have four significant digits wherever a person reads them, however small they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edl.cli.shared import display
from edl.contract.ids import WorkerId
from edl.formatting import measured
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.core.training import in_words
from edl.report import live, write
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story

SMALL, SHOWN = 1.23449e-6, "1.234e-06"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (SMALL, SHOWN),
        (0.00012345, "0.0001234"),
        (0.0784321, "0.07843"),
        (0.5, "0.5000"),
        (1, "1.000"),
        (-2.0857, "-2.086"),
        (123.456, "123.5"),
        (1234.56, "1235"),
        (5.4321e9, "5.432e+09"),
        (0.0, "0.000"),
        (math.inf, "inf"),
        (None, "not finite"),
    ],
)
def test_a_value_has_four_significant_digits(value: float | None, text: str) -> None:
    assert measured(value) == text


def test_a_small_loss_is_shown_in_the_terminal_the_status_and_the_live_page() -> None:
    told: dict[str, Any] = view.summary(whole_story().job)
    told |= {"loss": SMALL, "epoch_loss": SMALL, "metrics": {"loss": SMALL}}
    task = {"kind": "train", "epoch": 75, "epochs": 80, "step": 5, "steps": 20}
    status = {**told, "task": task, "rate": 0.0, "eta_seconds": None}
    assert display.progress_line(status).endswith(f"loss {SHOWN}")
    assert f"<dt>loss</dt><dd>{SHOWN}</dd>" in live.now(status)
    end = display.result(told, "job", "model.keras")
    assert f"loss {SHOWN} (mean of the epoch), {SHOWN} (last step)" in end
    assert f"held out  loss {SHOWN}" in end
    assert in_words({"loss": SMALL, "mae": None}) == f"loss {SHOWN}, mae not finite"


def test_a_small_loss_is_shown_in_the_report(tmp_path: Path) -> None:
    story = Story(workers=1).running()
    g = story.job.ring.generation
    story.tell(ev.EpochEnded(WorkerId(0), g, 1, facts.EpochLoss(0, 100, SMALL), {}))
    keep(story, tmp_path)
    assert f">{SHOWN}</td>" in write.html(tmp_path, view.summary(story.job))
