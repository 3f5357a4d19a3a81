# SPDX-License-Identifier: Apache-2.0
"""Workers as pods, at the small API server: how they are made, what becomes of them, which exist."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest

from edl.contract.ids import WorkerId
from edl.contract.workers import worker_environment
from edl.errors import ConfigError
from edl.kubernetes.timing import Timing
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.driver import job_values
from tests.support.kubernetes.small_server import PACE, SECOND, a_status, driving, install

pytestmark = pytest.mark.waits

# --- the pods


async def test_a_start_of_four_costs_four_creates_one_list_and_one_watch(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1, 2, 3)
        await asyncio.sleep(20 * SECOND)
        about_pods = {key: n for key, n in server.count().items() if key[1] == "pods"}
        assert about_pods == {("create", "pods"): 4, ("list", "pods"): 1, ("watch", "pods"): 1}
        maps = {key: n for key, n in server.count().items() if key[1] == "configmaps"}
        assert maps == {("list", "configmaps"): 1, ("watch", "configmaps"): 1, ("get", "configmaps"): 1}
        assert job.seen == [0, 1, 2, 3]


async def test_nothing_is_asked_while_nothing_happens(server: KubernetesApi) -> None:
    # A watch is silent for 60 of its seconds: none is given up, should this process be slow for some.
    async with driving(server, pace=replace(PACE, silence=10.0)) as job:
        await job.running(0, 1)
        await asyncio.sleep(5 * SECOND)
        before = len(server.requests)
        await asyncio.sleep(100 * SECOND)
        assert server.count(before) == {}


async def test_five_minutes_of_nothing_cost_a_list_and_a_watch(server: KubernetesApi) -> None:
    async with driving(server, pace=replace(Timing().times(0.01), answer=1.0)) as job:
        await job.running(0, 1)
        before = len(server.requests)
        await job.until(lambda: server.count(before)["list", "pods"])
        cost = server.count(before)
        assert cost["list", "pods"] == 1
        assert cost["watch", "pods"] <= 4
        assert cost["create", "pods"] == 0


async def test_a_pod_is_the_charts_and_says_which_worker_it_is(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
    pod = server.pod("edl-worker-0")
    labels = pod["metadata"]["labels"]
    assert labels["team"] == "ours"
    assert labels["app.kubernetes.io/instance"] == "edl"
    assert (labels["edl.dev/worker-id"], labels["edl.dev/run-id"]) == ("0", "run-1")
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == server.objects["configmaps"]["edl-job"]["metadata"]["uid"]
    assert not owner["controller"] and not owner["blockOwnerDeletion"]
    env = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}
    assert env == {
        "HOME": "/tmp",
        "EDL_WORKER_ID": "0",
        "EDL_RUN_ID": "run-1",
        "EDL_MASTER": "edl-master:8500",
        "EDL_RESULTS_PER_RUN": "true",
        **worker_environment({}),
    }


async def test_creates_keep_within_five_a_second_after_a_burst_of_ten(server: KubernetesApi) -> None:
    async with driving(server) as job:
        began = time.monotonic()
        await job.running(*range(30))
        assert time.monotonic() - began > (30 - 10) / 5 * SECOND * 0.9
        made = [r.at - began for r in server.requests if (r.verb, r.resource) == ("create", "pods")]
        assert sum(at < 0.5 * SECOND for at in made) <= 13


def test_the_budget_is_what_the_chart_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timing.from_environment() == Timing(write=1 / 20, burst=40)
    monkeypatch.setenv("EDL_KUBERNETES_QPS", "2.5")
    monkeypatch.setenv("EDL_KUBERNETES_BURST", "7")
    assert Timing.from_environment() == Timing(write=0.4, burst=7)
    monkeypatch.setenv("EDL_KUBERNETES_QPS", "none")
    with pytest.raises(ConfigError, match="EDL_KUBERNETES_QPS: invalid value 'none'"):
        Timing.from_environment()


async def test_pods_of_another_job_of_the_release_are_left_alone(server: KubernetesApi) -> None:
    # A parent chart can have edl twice, and all its pods the labels of the one release.
    async with driving(server) as job:
        await job.running(0)
        other = {**server.pod("edl-worker-0"), "metadata": {**server.pod("edl-worker-0")["metadata"]}}
    other["metadata"].pop("uid")
    labels = {**other["metadata"]["labels"], "edl.dev/run-id": "run-of-the-other", "edl.dev/worker-id": "7"}
    owner = [{**other["metadata"]["ownerReferences"][0], "uid": "the-other"}]
    other["metadata"] |= {"name": "edl-two-worker-7", "labels": labels, "ownerReferences": owner}
    server.put("pods", other)
    async with driving(server) as job:
        assert job.found.next_id == 1, "its numbers are the other's"
        await job.running(1)
        other["metadata"]["labels"] = {**labels, "edl.dev/run-id": "run-1"}  # despite its labels
        server.put("pods", other)
        server.put(
            "pods", {**other, "metadata": {**other["metadata"], "name": "edl-two-worker-8", "uid": ""}}
        )
        before = len(job.emitted)
        await job.running(2)
        assert {e.worker for e in job.emitted[before:]} == {2}
    assert server.count()["delete", "pods"] == 0
    assert sorted(server.objects["pods"])[:2] == ["edl-two-worker-7", "edl-two-worker-8"]


async def test_ends_are_told_once_with_their_cause(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(*range(8))
        server.end_pod("edl-worker-0", 1)
        server.end_pod("edl-worker-1", 139)
        server.end_pod("edl-worker-2", 137, reason="OOMKilled")
        server.preempt("edl-worker-3")
        server.delete_pod("edl-worker-4")
        server.drop("pods", "edl-worker-5")
        job.delete(6)
        server.end_pod("edl-worker-7", 75)
        gone = {w: await job.gone(w) for w in range(8)}
        assert gone[0] == ev.Gone(WorkerId(0), code=1)
        assert gone[1] == ev.Gone(WorkerId(1), signal="SIGSEGV")
        assert (gone[2].code, gone[2].free) == (137, False)
        assert gone[2].why == "OOMKilled: container memory limit 512Mi"
        assert gone[3].free and gone[3].why.startswith("PreemptionByScheduler: ")
        assert gone[4].free and gone[4].why == "its pod was deleted"
        assert gone[5].free and gone[5].why == "its pod is gone"
        assert gone[6].free or gone[6].code == 0
        assert gone[7].free
        await asyncio.sleep(3 * SECOND)
        assert Counter(e.worker for e in job.of(ev.Gone)) == dict.fromkeys(range(8), 1)
        assert {"edl-worker-0", "edl-worker-1", "edl-worker-2"} <= set(server.objects["pods"]), (
            "logs are kept"
        )
        events = {e["reason"]: e for e in server.objects["events"].values()}
        assert events["WorkerPreempted"]["involvedObject"]["name"] == "edl-job"


async def test_a_worker_that_crashed_is_charged_though_the_master_deletes_it(server: KubernetesApi) -> None:
    # Its stream ends first; the core then asks for its deletion, and the pod's end comes last.
    pace = replace(PACE, mercy=0.5)  # for a busy machine
    async with driving(server, pace=pace) as job:
        await job.running(0)
        job.delete(0)
        await asyncio.sleep(0.2 * SECOND)
        server.end_pod("edl-worker-0", 134)
        assert await job.gone(0) == ev.Gone(WorkerId(0), signal="SIGABRT")
        await asyncio.sleep(pace.mercy + 5 * SECOND)
        assert ("delete", "pods") not in server.count(), "its log is kept"


async def test_the_log_of_a_worker_that_exits_slowly_as_requested_is_kept(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
        job.backend.perform(ef.Delete(WorkerId(0), 1.0, patience_seconds=60.0))
        await asyncio.sleep(PACE.mercy + 5 * SECOND)  # the one that saved the model checks it, for example
        server.end_pod("edl-worker-0", 0)
        await job.gone(0)
        assert ("delete", "pods") not in server.count()


async def test_a_worker_that_is_not_wanted_any_more_is_not_left_behind(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        job.create(0)
        job.delete(0)
        await job.gone(0)
        job.create(1)
        await job.until(lambda: "edl-worker-1" in server.objects["pods"])
        job.delete(1)
        await job.gone(1)
        await job.until(lambda: not server.objects["pods"])


async def test_ended_pods_do_not_pile_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(*range(24))
        for worker in range(24):
            server.end_pod(f"edl-worker-{worker}", 0)
        await job.until(lambda: len(server.objects["pods"]) == 20)
        assert "edl-worker-23" in server.objects["pods"]


# --- workers that exist already


async def test_the_pods_of_an_earlier_master_are_adopted_and_those_of_other_runs_deleted(
    server: KubernetesApi,
) -> None:
    async with driving(server, "run-0") as old:
        await old.running(0, 1)
    async with driving(server, "run-1") as first:
        assert first.found.run_id == "run-0"
        await first.until(lambda: not server.objects["pods"])
        first.told = a_status()
        await first.running(*range(2, 6))
        server.end_pod("edl-worker-2", 0)
        await first.gone(2)
    server.autorun = False
    install(server, "training.seed=5")
    async with driving(server, "run-1") as refusing:
        refusing.told = a_status()
    async with driving(server, "run-1") as second:
        assert second.found.run_id == "run-1"
        assert second.found.next_id == 6
        assert second.found.workers == ((3, "edl-worker-3"), (4, "edl-worker-4"), (5, "edl-worker-5"))
        assert second.found.earlier and second.found.earlier.values == job_values("workers=3"), "as it began"
        await second.until(lambda: second.seen == [3, 4, 5])
        server.end_pod("edl-worker-4", 1)
        assert await second.gone(4) == ev.Gone(WorkerId(4), code=1)
        second.delete(5)
        await second.gone(5)
        assert second.of(ev.Gone, 2) == [], "that was reported already"


async def test_every_master_is_told_of_pods_that_are_being_deleted(server: KubernetesApi) -> None:
    async with driving(server) as first:
        first.told = a_status()
        await first.running(0, 1, 2)
        server.delete_pod("edl-worker-0", grace=1000)
        server.preempt("edl-worker-1", grace=1000)
        await first.until(lambda: len(first.of(ev.Terminating)) == 2)
    async with driving(server) as second:
        await second.until(lambda: len(second.of(ev.Terminating)) == 2)
        for job in first, second:
            ends = {e.worker: e.why.partition(":")[0] for e in job.of(ev.Terminating)}
            assert ends == {0: "its pod is being deleted", 1: "PreemptionByScheduler"}
            assert job.of(ev.Gone) == []


async def test_a_release_that_is_installed_again_at_once_takes_nothing_over(server: KubernetesApi) -> None:
    async with driving(server) as old:
        await old.running(0, 1)
    for name in ("edl-job", "edl-status"):
        server.drop("configmaps", name)  # Kubernetes deletes the pods that they owned, but not this moment
    install(server)
    async with driving(server, "run-2") as new:
        assert (new.found.run_id, new.found.workers, new.found.next_id) == (None, (), 2)
        await new.until(lambda: not server.objects["pods"])
        await new.running(2)
        assert new.of(ev.Gone) == []


async def test_workers_stay_when_the_master_goes(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1)
    assert ("delete", "pods") not in server.count()
