# SPDX-License-Identifier: Apache-2.0
"""What `edl status` makes of a release's objects."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from edl.cli.release.status import FoundRelease, events, snapshot
from edl.cli.shared.display import result
from edl.contract.reasons import Reason
from edl.kubernetes import pods
from edl.kubernetes.names import Names
from edl.master.core import view
from tests.support.jobs.stories import Story, ended_job


def event(second: int, reason: Reason, message: str) -> dict[str, Any]:
    return {"lastTimestamp": f"2026-11-22T00:00:{second:02}Z", "reason": str(reason), "message": message}


def test_finished_epochs_do_not_push_out_what_else_has_happened() -> None:
    happened = [
        event(0, Reason.WorkerPreempted, "worker 3: preempted"),
        event(1, Reason.RingReshaped, "ring 4 -> 3"),
        *(event(n, Reason.EpochApplied, f"epoch {n} of 40 is applied") for n in range(2, 40)),
        event(40, Reason.WorkerPending, "worker 4 is pending"),
    ]
    job = {"metadata": {"labels": {}}, "data": {"values.json": json.dumps({"workers": 4}), "worker.yaml": ""}}
    found = FoundRelease("team", "edl", Names("edl"), job, {"data": {"phase": "Training"}})
    told = [(e["reason"], e["message"]) for e in snapshot(found, [], happened).data["events"]]
    assert told == [
        ("WorkerPreempted", "worker 3: preempted"),
        ("RingReshaped", "ring 4 -> 3"),
        ("EpochApplied", "epoch 39 of 40 is applied"),
        ("WorkerPending", "worker 4 is pending"),
    ]


def test_a_worker_has_in_a_cluster_all_fields_that_it_has_on_one_machine() -> None:
    """Its pod is the authority for some; the master's last report has the others, as of a worker's GPU."""
    story = Story(workers=2).running()
    status = view.status(story.job, story.now)
    gpu = {"name": "H200", "memory": 1, "memory_limit": 4, "busy": 0.5}
    heard = {**status["workers"][0], "gpu": gpu, "memory": 7}
    report = {**status, "workers": [heard], "phase": "Training"}

    def pod(number: int) -> dict[str, Any]:
        labels = {pods.WORKER_ID: str(number), pods.STATE: "member", pods.RANK: str(number)}
        return {
            "metadata": {"name": f"edl-worker-{number}", "labels": labels},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Running"},
        }

    job = {"metadata": {"labels": {}}, "data": {"values.json": "{}", "worker.yaml": ""}}
    data = {"phase": "Training", "status.json": json.dumps(report)}
    found = FoundRelease("team", "edl", Names("edl"), job, {"data": data})
    rows = snapshot(found, [pod(heard["id"]), pod(9)], []).data["workers"]
    assert [row.keys() for row in rows] == [{**heard, "node": ""}.keys()] * 2
    known, new = rows
    own = {"handle": f"edl-worker-{heard['id']}", "rank": heard["id"], "state": "member", "node": "n1"}
    assert known == {**heard, **own, "delay": known["delay"]}
    assert (new["id"], new["memory"], new["gpu"]) == (9, 0, None), "the master has not heard of it yet"


def test_what_a_job_will_leave_is_what_its_mode_makes() -> None:
    claim = {"name": "output", "persistentVolumeClaim": {"claimName": "kept"}}

    def told(
        mode: str, volume: Any = claim, directory: str = "", script: str = "", phase: str = "Training"
    ) -> str:
        model = {"script": script}
        values = json.dumps({"workers": 4, "mode": mode, "prediction": {"dir": directory}, "model": model})
        pod = json.dumps({"spec": {"volumes": [volume]}})
        job = {"metadata": {"labels": {}}, "data": {"values.json": values, "worker.yaml": pod}}
        state = {"data": {"phase": phase, "state": '{"runId": "second"}'}}
        found = FoundRelease("team", "edl", Names("edl"), job, state)
        notes = snapshot(found, [], []).notes
        return next(
            (n for n in notes if n.startswith(("model: ", "predictions: ", "results: ", "warning: "))), ""
        )

    lost = {"name": "output", "emptyDir": {}}
    assert told("train") == "model: model.keras in persistentvolumeclaim/kept, once the job succeeds"
    saved = "results: what the script saves in persistentvolumeclaim/kept"
    assert told("train", script="/train.py") == saved
    assert told("train", lost, script="/train.py").startswith("warning: what the script saves will be lost")
    assert told("predict") == "predictions: predictions in persistentvolumeclaim/kept"
    assert told("evaluate") == told("evaluate", lost) == ""
    assert told("train", lost).startswith("warning: the trained model will be lost")
    assert told("predict", lost).startswith("warning: the predictions will be lost")
    assert told("predict", lost, directory="/data/out") == "predictions: /data/out of the workers' containers"
    assert told("predict", lost, directory="s3://a/out") == "predictions: s3://a/out"
    there = "predictions: run-second/predictions in persistentvolumeclaim/edl-storage"
    assert told("predict", lost, directory="master://predictions") == there
    assert told("predict", lost, directory="master://predictions", phase="Succeeded") == there
    assert told("train", phase="Succeeded") == "", "which the result itself names"


def test_of_several_jobs_in_a_release_only_the_own_pods_are_looked_at() -> None:
    labels = {"app.kubernetes.io/name": "job", "edl.dev/job": "job-one"}
    for its, selector in (
        (labels, "app.kubernetes.io/name=job,app.kubernetes.io/instance=both,edl.dev/job=job-one"),
        ({"app.kubernetes.io/name": "edl"}, "app.kubernetes.io/name=edl,app.kubernetes.io/instance=both"),
    ):
        found = FoundRelease("team", "both", Names("job-one"), {"metadata": {"labels": its}}, {})
        assert found.selector("master", "worker") == (
            f"{selector},app.kubernetes.io/component in (master,worker)"
        )


def test_a_job_that_has_ended_says_that_its_servers_hold_nothing_any_more() -> None:
    summary = ended_job()
    freed = "the rows of 2 parameter servers are freed"
    data = {"phase": "Succeeded", "summary.json": json.dumps(summary)}
    for servers, expected in (({}, False), ({"servers": freed}, True)):
        found = FoundRelease("team", "edl", Names("edl"), {}, {"data": {**data, **servers}})
        assert (f"servers   {freed}" in result(found.report, "", "")) == expected


def test_events_of_one_second_are_in_the_order_in_which_they_were_written() -> None:
    def written(message: str, second: int, version: str) -> dict[str, Any]:
        return {
            "message": message,
            "lastTimestamp": f"2026-01-01T00:00:0{second}Z",
            "metadata": {"resourceVersion": version},
        }

    happened = [written("third", 1, "10"), written("second", 1, "9"), written("first", 0, "11")]
    assert [e["message"] for e in events(happened)] == ["first", "second", "third"]


def test_the_status_is_as_old_as_its_last_write() -> None:
    written = (datetime.now(UTC) - timedelta(seconds=40)).isoformat()
    job = {"metadata": {"labels": {}}, "data": {"values.json": "{}", "worker.yaml": ""}}
    data = {"phase": "Training", "updated": written}
    told = snapshot(FoundRelease("team", "edl", Names("edl"), job, {"data": data}), [], [])
    assert 40 <= told.age < 100
