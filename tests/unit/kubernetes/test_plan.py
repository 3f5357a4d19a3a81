# SPDX-License-Identifier: Apache-2.0
"""What a master of a release does with what it finds: `edl.master.cluster.runs.plan`, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl.config import values
from edl.contract.ids import RunId, WorkerId
from edl.master.backends.kubernetes import Found
from edl.master.cluster.runs import Plan, Refuse, Rest, Train, plan
from edl.master.spec import Invalid, JobSpec

NEW = RunId("new")
WORKERS = ((WorkerId(2), "edl-worker-2"),)
MODEL = "def model():\n    return 1\n\n\ndef data(split):\n    return split\n"


def a_spec(**changes: Any) -> JobSpec:
    return JobSpec.parse(values.merge(values.defaults(), changes))


def found(earlier: JobSpec | None = None, run: str | None = "old", ended: str = "") -> Found:
    return Found(RunId(run) if run else None, earlier, 3, WORKERS if run else (), ended, 0.0)


def train(what: Plan) -> Train:
    assert isinstance(what, Train)
    return what


def test_a_new_release_begins_a_run() -> None:
    what = train(plan(found(run=None), a_spec(), NEW))
    assert (what.run_id, what.spec, what.adopted.workers, what.adopted.next_id) == (NEW, a_spec(), (), 3)


def test_a_run_goes_on_under_a_new_master_with_its_workers_and_live_values() -> None:
    what = train(plan(found(a_spec(workers=2)), a_spec(workers=3), NEW))
    assert (what.run_id, what.spec, what.adopted.workers) == ("old", a_spec(workers=3), WORKERS)


def test_a_change_that_a_run_cannot_take_does_not_end_it() -> None:
    earlier = a_spec()
    what = train(plan(found(earlier), a_spec(training={"batchSize": 7}), NEW))
    assert (what.run_id, what.spec) == ("old", earlier)


def test_other_epochs_are_a_change_that_a_run_takes() -> None:
    what = train(plan(found(a_spec()), a_spec(training={"epochs": 7}), NEW))
    assert (what.run_id, what.spec.config.training.epochs) == ("old", 7)


def test_another_model_file_is_a_change_that_a_run_does_not_take() -> None:
    what = train(plan(found(a_spec()), a_spec(model={"source": MODEL}), NEW))
    assert (what.run_id, what.spec, what.adopted.workers) == ("old", a_spec(), WORKERS)


def test_another_run_id_is_another_run() -> None:
    wanted = a_spec(runId="2", model={"source": MODEL})
    what = train(plan(found(a_spec()), wanted, NEW))
    assert (what.run_id, what.spec, what.adopted.workers, what.adopted.next_id) == (NEW, wanted, (), 3)
    assert what.why == (
        "run new begins, because runId is '2' now; it was '' for run old, which ends, and keeps only what is "
        "in checkpoints"
    )


@pytest.mark.parametrize("ended", ["Succeeded", "Failed", "Stopped"])
def test_after_the_end_only_another_run_id_begins_another_run(ended: str) -> None:
    for wanted in (a_spec(workers=3), a_spec(training={"epochs": 7}), Invalid("workers: -1 is not allowed")):
        assert plan(found(a_spec(), ended=ended), wanted, NEW) == Rest()
    what = train(plan(found(a_spec(), ended=ended), a_spec(runId="2"), NEW))
    assert what.run_id == NEW
    assert what.why.endswith(f"for run old, which has ended: {ended}")


def test_invalid_values_begin_nothing_but_leave_a_run_alone() -> None:
    wrong = Invalid("workers: -1 is not allowed")
    assert plan(found(run=None), wrong, NEW) == Refuse(wrong.why)
    assert train(plan(found(a_spec(workers=2)), wrong, NEW)).spec == a_spec(workers=2)


def test_a_run_whose_own_values_are_unknown_takes_the_charts() -> None:
    assert train(plan(found(None), a_spec(), NEW)).run_id == "old"
    assert isinstance(plan(found(None), Invalid("x"), NEW), Refuse)


def test_the_run_of_another_version_is_left_to_its_workers_while_they_hold_its_state() -> None:
    older = replace(found(a_spec()), version="0.0.9")
    what = plan(older, a_spec(), NEW)
    assert isinstance(what, Refuse)
    assert what.run_lives
    assert "run old is of edl 0.0.9" in what.why
    assert "helm rollback" in what.why


@pytest.mark.parametrize(
    "nothing_to_lose",
    [{"workers": ()}, {"workers": ((WorkerId(2), ""),)}, {"started": False}],
    ids=["all have ended", "none runs yet", "there was no ring"],
)
def test_a_run_of_another_version_without_state_gives_way_to_another_run(
    nothing_to_lose: dict[str, Any],
) -> None:
    older = replace(found(a_spec()), version="0.0.9", **nothing_to_lose)
    what = train(plan(older, a_spec(workers=3), NEW))
    assert (what.run_id, what.spec, what.adopted.workers, what.adopted.next_id) == (
        NEW,
        a_spec(workers=3),
        (),
        3,
    )


def test_an_ended_run_rests_whose_values_are_unknown_or_of_another_version() -> None:
    assert plan(found(None, ended="Succeeded"), a_spec(), NEW) == Rest()
    assert plan(replace(found(a_spec(), ended="Succeeded"), version="0.0.9"), a_spec(), NEW) == Rest()
