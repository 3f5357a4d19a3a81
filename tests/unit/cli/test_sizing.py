# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `edl plan`, against values that are known from elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml

from edl import config
from edl.cli.tools import sizing
from edl.cli.tools.sizing import Assumed, Checkpoint, Measured, Preemption, Speed, StepTime
from edl.config import values
from edl.contract.exports import VERIFIER_BYTES, VERIFIER_COPIES

HOUR = 3600.0


def speeds(*steps_per_second: float) -> list[Speed]:
    """The speeds of rings of 1, 2, 4, ... workers."""
    return [Speed(2**power, speed) for power, speed in enumerate(steps_per_second)]


def measured(*steps_per_second: float, **more: Any) -> Measured:
    given: dict[str, Any] = {
        "speeds": speeds(*steps_per_second),
        "preemption": Preemption(len(steps_per_second), 2.0, 32.0, 16),
        "checkpoint": Checkpoint(5, 300 << 20, 1.5, 0.5),
        "worker_bytes": 450 << 20,
        "batch": 1024,
    }
    return Measured(**{**given, **more})


def test_the_interval_is_that_of_young() -> None:
    """A checkpoint of 5 minutes and a failure in a day: every 2 hours."""
    assert sizing.young_interval(5 * 60, 24 * HOUR) == pytest.approx(2 * HOUR)


def test_no_other_interval_loses_less_time() -> None:
    cost, mtbf = 0.5, 6 * HOUR
    best = sizing.young_interval(cost, mtbf)
    lost = {times: cost / (times * best) + times * best / 2 / mtbf for times in (0.8, 0.9, 1.0, 1.1, 1.25)}
    assert min(lost, key=lambda times: lost[times]) == 1.0


def test_steps_that_follow_amdahls_law_give_it_back() -> None:
    fitted = sizing.step_time(speeds(1.0, 1 / 0.55, 1 / 0.325))  # 0.1 s + 0.9 s / workers
    assert fitted is not None
    assert [fitted.fixed, fitted.divided] == pytest.approx([0.1, 0.9])
    assert sizing.step_time(speeds(1.0)) is None


def test_beyond_the_most_workers_a_further_one_adds_less_than_half_of_a_single_one() -> None:
    step = StepTime(0.1, 0.9)
    most, little = step.most_workers(), 1e-6

    def speed(workers: float) -> float:
        return 1 / (0.1 + 0.9 / workers)

    assert (speed(most + little) - speed(most)) / little == pytest.approx(0.5 * speed(1), rel=1e-3)
    assert most == pytest.approx(4.416, abs=1e-3)
    assert StepTime(0.0, 1.0).most_workers() == float("inf")


@pytest.mark.parametrize(
    ("steps_per_second", "workers"),
    [
        ((10.0,), 1),
        ((10.0, 18.0, 29.0), 4),  # the third and the fourth worker add 5.5 each
        ((10.0, 18.0, 27.9), 2),  # 4.95 each
        ((10.0, 14.9), 1),
        ((10.0, 14.0, 40.0), 1),  # a measurement that is too good does not pay for one that was bad
        ((10.0, 8.0), 1),
    ],
)
def test_as_many_workers_pay_as_add_half_of_the_speed_of_one(
    steps_per_second: tuple[float, ...], workers: int
) -> None:
    assert sizing.paying(speeds(*steps_per_second)) == workers


@pytest.mark.parametrize(
    ("found", "most"),
    [
        (measured(1.0, 1 / 0.55, 1 / 0.325), 4),  # 4.4
        (measured(1.0, 2.0), 16),  # nothing is fixed: 8 times 2
        (measured(1.0, 2.0, batch=5), 5),
        (measured(1.0), None),
        (measured(1.0, 0.8), None),
    ],
)
def test_an_extrapolation_is_bounded_by_the_batch_and_by_what_was_measured(
    found: Measured, most: int | None
) -> None:
    assert sizing.most_workers(found) == most


def test_a_checkpoint_costs_the_time_by_which_steps_are_late() -> None:
    assert sizing.delay(10.0, 90, 4, 10.0) == pytest.approx(0.25)
    assert sizing.delay(10.0, 103, 4, 10.0) == 0.0, "noise"


def test_a_preemption_costs_its_pauses_and_the_speed_of_a_worker_until_it_is_replaced() -> None:
    killed = Preemption(4, 2.0, 32.0, 16)
    assert killed.lost_seconds(0.75, None) == pytest.approx(2 + 30 / 4)
    assert killed.lost_seconds(0.75, 122.0) == pytest.approx(2 + 120 / 4)
    assert killed.lost_seconds(1.3, None) == 2.0, "the smaller ring was faster"


def test_the_values_follow_from_the_measurements() -> None:
    told = sizing.plan(measured(10.0, 18.5), Assumed(3.0, HOUR))
    assert told["values"] == {
        "workers": 2,
        "maxWorkers": 5,  # 8.11 ms + 91.89 ms / workers: 5.39
        "checkpoint": {"seconds": 60},  # sqrt(2 x 0.5 x 3600)
        "worker": {"resources": {"requests": {"memory": "1728Mi"}, "limits": {"memory": "1792Mi"}}},
    }
    assert told["preemption"]["lost_seconds"] == pytest.approx(2 + 30 * (1 - 10 / 18.5))
    shares = told["lost_shares"]
    assert shares["preemptions"] == pytest.approx(3 * told["preemption"]["lost_seconds"] / HOUR)
    assert shares["checkpoints"] == shares["losses_of_all_workers"] == pytest.approx(0.5 / 60)
    assert [speed["efficiency"] for speed in told["speeds"]] == pytest.approx([1.0, 0.925])


@pytest.mark.parametrize(
    ("given", "request_", "limit"),
    [
        ({}, "1728Mi", "1792Mi"),  # 450, and to load a file of 300: 320 and three copies
        ({"verifies": False}, "512Mi", "576Mi"),
        ({"checkpoint": Checkpoint(5, 1000, 1.5, 0.5)}, "832Mi", "896Mi"),
    ],
)
def test_the_memory_suffices_for_the_end_of_the_job(given: dict[str, Any], request_: str, limit: str) -> None:
    found = measured(10.0, **given)
    resources = sizing.plan(found, Assumed(1.0, HOUR))["values"]["worker"]["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (request_, limit)
    left = int(limit.removesuffix("Mi")) * 2**20 - found.worker_bytes
    if found.verifies:  # else the worker would refuse to verify its model (trainer/export/verification.py)
        assert left >= VERIFIER_BYTES + VERIFIER_COPIES * found.checkpoint.nbytes


@pytest.mark.parametrize(
    ("checkpoint", "interval", "reason"),
    [
        (
            Checkpoint(5, 1000, 0.1, 0.0),
            10,
            "did not measurably delay the training; not less than the chart's",
        ),
        (Checkpoint(5, 1000, 0.1, 0.01), 10, "= 8.49 s (Young, Daly)"),
        (Checkpoint(5, 1000, 95.2, 0.5), 96, "not less than the time in which one is written"),
        (Checkpoint(5, 1000, 1.0, 2.0), 120, "sqrt(2 x 2 s x 3,600 s) = 120 s (Young, Daly)"),
    ],
)
def test_checkpoints_are_not_closer_than_they_can_be_written(
    checkpoint: Checkpoint, interval: int, reason: str
) -> None:
    told = sizing.plan(measured(10.0, checkpoint=checkpoint), Assumed(1.0, HOUR))
    assert told["values"]["checkpoint"]["seconds"] == interval
    assert reason in told["reasons"]["checkpoint.seconds"]


@pytest.mark.parametrize("found", [measured(10.0), measured(10.0, 11.0), measured(10.0, 20.0, 38.0)])
def test_the_text_is_a_values_file_with_a_reason_for_each_value(found: Measured) -> None:
    told = {
        "model": "my_model.py",
        "run": "there",
        "cores": 4,
        "load": 0.1,
        **sizing.plan(found, Assumed(1.0, HOUR)),
    }
    text = sizing.values_file(told)
    parsed = yaml.safe_load(text)
    assert parsed == told["values"]
    typed = config.parse(values.merge(values.defaults(), parsed))
    assert (typed.workers, typed.checkpoint.seconds) == (parsed["workers"], parsed["checkpoint"]["seconds"])
    keys = {"workers", "checkpoint.seconds", *(["maxWorkers"] if "maxWorkers" in parsed else [])}
    resources = {f"worker.resources.{kind}.memory" for kind in ("requests", "limits")}
    assert told["reasons"].keys() == keys | resources
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        if line and not line.lstrip().startswith("#") and not line.endswith(":"):
            assert before.lstrip().startswith("# "), line
    assert max(map(len, lines)) <= 110
    assert "busy" not in text and "busy" in sizing.values_file({**told, "load": 2.1})
