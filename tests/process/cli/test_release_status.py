# SPDX-License-Identifier: Apache-2.0
"""`edl status` and `edl wait` of a release, against a server of release_commands.py."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from edl.kubernetes import pods
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.kubernetes.release_commands import Cluster, Done, pod, says

pytestmark = pytest.mark.waits


async def test_logs_are_printed_by_the_command_of_kubectl_that_is_named(cluster: Cluster) -> None:
    says(cluster, "Training")
    done = await cluster.edl("logs", "worker-3", "--follow", "--tail", 5, "--release", "edl")
    words = shlex.split(done.err.removeprefix("edl: release edl: kubectl prints the logs of pods: "))
    assert (done.code, words[:5]) == (1, ["kubectl", "logs", "-n", NAMESPACE, "-l"])
    assert words[5].endswith(f",{pods.COMPONENT} in (worker),{pods.WORKER_ID}=3")
    assert words[6:] == ["--prefix", "--tail=5", "--max-log-requests=1000", "--follow"]


# --- status and list


TOLD = {
    "model": "digits",
    "phase": "Training",
    "reason": "2 workers (generation 1)",
    "rate": 3899.0,
    "eta_seconds": 13.0,
    "loss": 0.5,
    "records": {"size": 20000, "total": 80000, "applied": 29152},
    "task": {"kind": "train", "epoch": 2, "epochs": 4, "step": 911, "steps": 2500},
    "workers": [
        {
            "id": 0,
            "handle": "edl-worker-0",
            "rank": 0,
            "state": "member",
            "step": 913,
            "rate": 1404.0,
            "memory": 330301440,
        },
        {
            "id": 3,
            "handle": "",
            "rank": None,
            "state": "pending",
            "step": 0,
            "rate": 0.0,
            "memory": 0,
            "delay": "exceeded quota: small",
        },
    ],
}


async def test_status_tells_of_the_job_its_workers_and_what_has_happened(cluster: Cluster) -> None:
    says(cluster, "Training", reason="2 workers (generation 1)", **{"status.json": json.dumps(TOLD)})
    pod(cluster, "worker", 0, rank="0", state="member")
    waiting = pod(cluster, "worker", 1, state="starting")
    cluster.hold_pod(waiting, "Unschedulable", "0/2 nodes are available")
    ended = pod(cluster, "worker", 2, state="gone")
    cluster.end_pod(ended, 0)
    cluster.put(
        "events",
        {
            "metadata": {"name": "e"},
            "involvedObject": {"name": "edl-job"},
            "reason": "RingReshaped",
            "message": "ring 0 -> 2 in 0.11 s",
            "lastTimestamp": "2026-01-01T00:00:00Z",
        },
    )
    done = await cluster.edl("status", "--release", "edl")
    assert done.code == 0, done.err
    assert "digits: Training, 2 workers (generation 1)\n" in done.out
    assert "step 911 of 2,500, 3,899 records/s, ETA 13 s" in done.out
    assert re.search(r"0 +edl-worker-0 +0 +member +913 +1,404 +315 MiB +n1", done.out), done.out
    assert "worker 1 is pending: no node has room for it: 0/2 nodes are available" in done.out
    assert "worker 3 is pending: exceeded quota: small" in done.out
    assert "edl-worker-2" not in done.out
    assert "ago  RingReshaped: ring 0 -> 2 in 0.11 s" in done.out
    told = json.loads((await cluster.edl("status", "--release", "edl", "-o", "json")).out)
    assert [(w["id"], w["rank"], w["node"]) for w in told["workers"]] == [
        (0, 0, "n1"),
        (1, None, "n1"),
        (3, None, ""),
    ]
    assert [w["pod"] for w in told["workers"]] == ["edl-worker-0", "edl-worker-1", None]
    assert (told["records"]["applied"], told["model"]) == (29152, "digits")


async def test_releases_are_listed_of_all_namespaces_or_of_one(cluster: Cluster) -> None:
    says(cluster, "Training", reason="2 workers (generation 1)", **{"status.json": json.dumps(TOLD)})
    for words in (("-A",), ("-A", "-n", NAMESPACE), ("-n", NAMESPACE), ("--context", "here")):
        done = await cluster.edl("list", "-o", "json", *words)
        assert done.code == 0, done.err
        (row,) = json.loads(done.out)["items"]
        assert (row["namespace"], row["release"], row["phase"]) == (NAMESPACE, "edl", "Training")
        assert (row["progress"], row["workers"]) == ("step 911 of 2,500", 1)


async def test_status_warns_while_a_release_would_lose_its_model(cluster: Cluster) -> None:
    says(cluster, "Training")
    done = await cluster.edl("status", "--release", "edl")
    assert "model: model.keras in persistentvolumeclaim/models, once the job succeeds\n" in done.out
    assert "warning" not in done.out
    job = cluster.objects["configmaps"]["edl-job"]
    pod = yaml.safe_dump({"spec": {"volumes": [{"name": "output", "emptyDir": {}}]}})
    cluster.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": pod}})
    lost = "the trained model {} lost with the worker's pod; set output.size or output.existingClaim\n"
    done = await cluster.edl("status", "--release", "edl")
    assert f"warning: {lost.format('will be')}" in done.out
    says(cluster, "Succeeded")
    done = await cluster.edl("status", "--release", "edl")
    assert f"  model     {lost.format('is')}" in done.out


async def test_status_of_a_master_that_does_not_run_says_why(cluster: Cluster) -> None:
    cluster.hold_pod("edl-master", "ImagePullBackOff", "no such image")
    done = await cluster.edl("status", "--release", "edl")
    assert "Starting, no status from the master yet" in done.out
    assert "the master is not running (edl-master: ImagePullBackOff: no such image)" in done.out


async def test_status_names_what_only_events_tell_of_pods_that_do_not_run(cluster: Cluster) -> None:
    def warn(name: str, reason: str, message: str) -> None:
        cluster.put(
            "events",
            {
                "metadata": {"name": f"of-{name}"},
                "involvedObject": {"name": name},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": "2026-01-01T00:00:00Z",
            },
        )

    says(cluster, "Starting")
    for name in ("edl-master", pod(cluster, "worker", 0, runs=False)):
        cluster.hold_pod(name, "ContainerCreating", "")
    warn("edl-master", "FailedMount", 'secret "certificate" not found')
    warn("edl-worker-0", "FailedMount", 'configmap "lists" not found')
    warn("edl-worker-01", "FailedMount", "of another pod")
    done = await cluster.edl("status", "--release", "edl")
    assert 'the master is not running (edl-master: FailedMount: secret "certificate" not found)' in done.out
    assert 'worker 0 is pending: FailedMount: configmap "lists" not found' in done.out
    cluster.drop("pods", "edl-master")
    warn("edl-master-5f6d-x", "Unhealthy", "of a pod that was there")
    done = await cluster.edl("status", "--release", "edl")
    assert "its Deployment has no pod; last status" in done.out
    warn("edl-master-5f6d", "FailedCreate", "exceeded quota: none")
    done = await cluster.edl("status", "--release", "edl")
    assert "its Deployment has no pod (FailedCreate: exceeded quota: none)" in done.out


async def test_status_of_a_job_that_has_ended_is_its_summary(cluster: Cluster) -> None:
    summary = {
        "phase": "Succeeded",
        "reason": "every record",
        "traceback": "",
        "seconds": 12.0,
        "step": 7,
        "loss": 0.1,
        "records": {"size": 100, "applied": 100, "skipped": 0, "bad": 0},
        "task": {"kind": "train", "epochs": 1, "epochs_done": 1, "steps": 4, "steps_done": 4, "skipped": []},
        "metrics": {"accuracy": 0.97},
        "goodput_seconds": {"useful": 9.0},
        "generations": [],
        "state_losses": 0,
    }
    says(cluster, "Succeeded", reason="every record", **{"summary.json": json.dumps(summary)})
    done = await cluster.edl("status", "--release", "edl")
    assert "Succeeded after 12.0 s: every record" in done.out
    assert "held out  accuracy 0.9700" in done.out
    assert "  model     model.keras in persistentvolumeclaim/models\n" in done.out
    assert "  kept in   configmap/edl-status\n" in done.out
    says(cluster, "Failed", reason="values are wrong")
    done = await cluster.edl("status", "--release", "edl")
    assert done.out.startswith("Failed: values are wrong\n"), "the summary is of the run before"


# --- wait


async def test_wait_ends_when_the_job_does_and_asks_nothing_meanwhile(cluster: Cluster) -> None:
    says(cluster, "Training")
    waiting = await cluster.start("wait", "--release", "edl")
    await cluster.asked("watch", "configmaps")
    cluster.cut()
    await cluster.asked("watch", "configmaps", 2)
    before = len(cluster.requests)
    says(cluster, "Finishing")
    says(cluster, "Succeeded")
    done = await waiting.end()
    assert (done.code, done.out) == (0, "Succeeded: because\n")
    assert cluster.count(before) == {}


@pytest.mark.parametrize(
    ("phase", "words", "code"),
    [
        ("Failed", [], 1),
        ("Failed", ["--for", "failed"], 0),
        ("Stopped", ["--for", "Training"], 1),
        ("Training", ["--for", "Training"], 0),
        ("Training", ["--timeout", "0.2s"], 124),
    ],
)
async def test_the_exit_code_of_wait(cluster: Cluster, phase: str, words: list[str], code: int) -> None:
    says(cluster, phase)
    done = await cluster.edl("wait", "--release", "edl", *words)
    assert (done.code, done.out) == (code, f"{phase}: because\n")


async def test_wait_outlives_an_api_that_is_out(cluster: Cluster) -> None:
    says(cluster, "Training")
    waiting = await cluster.start("wait", "--release", "edl")
    await cluster.asked("watch", "configmaps")
    await cluster.down()
    says(cluster, "Succeeded")
    cluster.compact()
    await waiting.complains("the Kubernetes API is unavailable")
    await cluster.up()
    assert (await waiting.end()).code == 0


async def test_an_interrupted_wait_ends_in_a_word(cluster: Cluster) -> None:
    says(cluster, "Training")
    waiting = await cluster.start("wait", "--release", "edl")
    await cluster.asked("watch", "configmaps")
    waiting.interrupt()
    assert await waiting.end() == Done(130, "", "")


async def test_wait_ends_when_the_release_does(cluster: Cluster) -> None:
    says(cluster, "Training")
    waiting = await cluster.start("wait", "--release", "edl")
    await cluster.asked("watch", "configmaps")
    cluster.drop("configmaps", "edl-status")
    done = await waiting.end()
    assert done.code == 1
    assert done.err == "edl: release edl was uninstalled\n"
