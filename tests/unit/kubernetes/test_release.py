# SPDX-License-Identifier: Apache-2.0
"""What a new master makes of what it finds: the status that an earlier one has written, and the pods."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import edl
from edl.contract.ids import RunId, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.kubernetes import pods
from edl.master.backends.kubernetes.release import Found, Left
from edl.master.backends.kubernetes.status import Snapshot, render
from edl.master.cluster.runs import Rest, Train, plan
from edl.master.core import facts
from edl.master.spec import Invalid, JobSpec, checked
from tests.support.kubernetes.driver import job_values
from tests.support.kubernetes.small_server import a_status

STATE = json.dumps({"runId": "run-1", "nextId": 4})


def a_pod(worker: int, run: str = "run-1", phase: str = "Running", owner: str = "ours") -> dict[str, Any]:
    state: dict[str, Any] = {"running": {}} if phase == "Running" else {}
    return {
        "metadata": {
            "name": f"edl-worker-{worker}",
            "uid": f"uid-{worker}",
            "ownerReferences": [{"uid": owner}],
            "labels": {pods.WORKER_ID: str(worker), pods.RUN_ID: run},
        },
        "status": {"phase": phase, "containerStatuses": [{"name": "worker", "state": state}]},
    }


def found(left: Left, there: list[dict[str, Any]]) -> Found:
    return Found.of(left, there, "ours")


def test_a_run_that_goes_on_is_left_by_its_id_and_its_values() -> None:
    left = Left.read({"state": STATE, "values": '{"workers": 3}', "phase": "Training"})
    assert (left.run_id, left.next_id, left.values, left.ended) == ("run-1", 4, {"workers": 3}, "")
    assert (left.phase, left.version) == ("Training", "0.1.0"), "which did not say so yet"
    state = json.dumps({"runId": "run-1", "nextId": 4, "version": "1.2.3"})
    assert Left.read({"state": state}).version == "1.2.3"
    state = json.dumps({"runId": "run-1", "nextId": 4, "startedAt": 1234, "beganWith": "the weights"})
    assert (left.started_at, Left.read({"state": state}).started_at) == (0, 1234)
    assert (left.began_with, Left.read({"state": state}).began_with) == ("", "the weights")


def test_the_next_master_reads_what_the_run_has_done() -> None:
    past = facts.Past(
        {"useful": 12.5, "starting": 2.0},
        "useful",
        3.0,
        changes=4,
        stall_seconds=0.5,
        redone_records=7,
        state_losses=1,
        checkpoint=30,
        failures=((WorkerId(3), "ValueError: é"),),
        warnings=("inexact",),
        evaluations={"test": facts.Evaluation(30, 50, {"loss": 0.5, "auc": None})},
        safe=30,
        generation=4,
        stepped=(WorkerId(0), WorkerId(2)),
        ending=("Succeeded", "done"),
        mode="train",
        layout=Layout(100, 7, 64),
        done=31,
        result=facts.Result(
            {"loss": 0.5, "auc": None},
            "model.keras",
            exports={"keras": "model.keras"},
            kept_at=30,
            failed=(facts.PartFailed("evaluation", "no"),),
            skipped=RangeSet.of([(3, 5)]),
            digests={WorkerId(0): "d"},
            history={"loss": (0.7, None)},
        ),
    )
    written = render(Snapshot(a_status(), RunId("run-1"), {}, 4, "", past=past), None)
    assert Left.read({key: text for key, text in written.items() if text}).past == past
    assert Left.read({"state": STATE}).past is None, "an earlier edl wrote none"
    assert Left.read({"state": STATE, "updated": "1970-01-01T00:01:00Z"}).written_at == 60.0
    damaged = Left.read({"state": STATE, "past": '{"seconds": "many"}'})
    assert (damaged.run_id, damaged.past) == ("run-1", None)
    many = replace(past, failures=past.failures * 1000, warnings=("long" * 1000,) * 1000)
    text = render(Snapshot(a_status(), RunId("run-1"), {}, 4, "", past=many), None)["past"]
    assert text is not None and len(text) < 50_000
    long = replace(past, result=facts.Result(model="model.keras", history={"loss": (0.123456789,) * 10_000}))
    text = render(Snapshot(a_status(), RunId("run-1"), {}, 4, "", past=long), None)["past"]
    assert text is not None and len(text) < 50_000 and "model.keras" in text


def test_a_run_that_has_ended_is_left_with_how_and_when() -> None:
    ended = {"phase": "Succeeded", "summary.json": "{}", "endedAt": "1970-01-01T00:01:00Z"}
    left = Left.read({"state": STATE, **ended})
    assert (left.run_id, left.ended, left.ended_at) == ("run-1", "Succeeded", 60.0)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"state": "["},
        {"state": "[]"},
        {"state": '{"runId": 3, "nextId": 4}'},
        {"state": '{"runId": "run-1"}'},
        {"state": STATE, "values": "nonsense"},
        {"state": STATE, "summary.json": "{}", "phase": "Succeeded", "endedAt": "yesterday"},
    ],
)
def test_what_is_not_sound_is_as_if_it_were_not_there(data: dict[str, str]) -> None:
    left = Left.read(data)
    assert (left.run_id, left.next_id, left.ended) == ("", 0, "")


def test_the_next_id_is_none_that_a_pod_has_had() -> None:
    assert found(Left("run-1", 4), []).next_id == 4
    assert found(Left("run-1", 4), [a_pod(6, run="run-0", phase="Succeeded")]).next_id == 7


def test_living_pods_of_the_run_are_its_workers() -> None:
    there = [a_pod(2), a_pod(0, phase="Pending"), a_pod(1, phase="Failed"), a_pod(3, run="run-0")]
    assert found(Left("run-1", 4), there).workers == ((0, ""), (2, "edl-worker-2"))


def test_without_a_status_the_run_is_that_of_the_pods_if_they_agree() -> None:
    assert found(Left(), [a_pod(0), a_pod(1)]).run_id == "run-1"
    assert found(Left(), [a_pod(0), a_pod(1, run="run-0")]).run_id is None


def test_the_pods_of_a_release_that_was_uninstalled_are_nobodys_workers() -> None:
    new = found(Left(), [a_pod(0, owner="theirs"), a_pod(1, owner="theirs")])
    assert (new.run_id, new.workers) == (None, ())
    assert new.next_id == 2, "but their names are taken"


# --- which run there is to be


def spec(*sets: str) -> JobSpec:
    return JobSpec.parse(job_values(*sets))


def ran(earlier: JobSpec | None, ended: str = "", requested: str = "") -> Found:
    return Found(RunId("old"), earlier, 4, (), ended, 0.0, edl.__version__, requested=requested)


@pytest.mark.parametrize("ended", ["", "Succeeded", "Failed"])
@pytest.mark.parametrize(
    "change", ["training.seed=9", "training.epochs=9", "model.module=counting", "workers=2"]
)
def test_only_another_run_id_starts_another_run(ended: str, change: str) -> None:
    for earlier in (spec(), None):  # None: the status has lost the values
        what = plan(ran(earlier, ended), spec(change), RunId("new"))
        assert isinstance(what, Rest) if ended else isinstance(what, Train) and what.run_id == "old"
        what = plan(ran(earlier, ended), spec(change, "runId=2"), RunId("new"))
        assert isinstance(what, Train) and (what.run_id, what.spec) == ("new", spec(change, "runId=2"))
    assert isinstance(plan(ran(spec(), "Succeeded", "2"), spec(change, "runId=2"), RunId("new")), Rest)
    invalid = checked({**job_values("runId=2"), "workers": "many"})
    assert isinstance(plan(ran(spec(), "Succeeded"), invalid, RunId("new")), Rest), (
        "invalid values request nothing"
    )


def test_each_key_of_a_change_is_judged_by_itself() -> None:
    run = spec("workers=2")
    now, refused = run.with_live_values(
        spec("workers=3", "suspend=true", "training.seed=9", "logLevel=debug")
    )
    assert (now.config.workers, now.config.suspend, now.config.log_level) == (3, True, "debug")
    assert now.config.training.seed == 1
    assert refused.startswith("a running job keeps its values: training.seed 1 -> 9 refused")
    broken = checked({**job_values("workers=3"), "mode": "sideways"})
    now, refused = run.with_live_values(broken)
    assert (now.config.workers, now.config.mode) == (3, "auto")
    assert "mode: invalid value" in refused
    wrong = checked({**job_values("training.seed=9"), "workers": "many"})
    now, refused = run.with_live_values(wrong)
    assert now == run and "workers: invalid value" in refused
    assert run.with_live_values(Invalid("values.json is not valid JSON"))[0] == run
    assert run.with_live_values(spec("workers=4")) == (spec("workers=4"), "")


def test_the_state_in_the_status_says_which_run_was_requested() -> None:
    state = json.dumps({"runId": "run-1", "nextId": 4, "requested": "2"})
    left = Left.read({"state": state, "values": "{}"})
    assert found(left, []).requested == left.requested == "2"
