"""The Kubernetes backend against a server that speaks the real protocol and misbehaves on demand.

A second is SECOND seconds here, for the backend and for the server alike, so that five minutes
without an API pass in a few seconds; requests and pauses keep their proportions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.errors import ConfigError
from edl.ids import WorkerId
from edl.kubernetes import asked
from edl.kubernetes.api import Api, ApiError, Pace
from master.adapters.kubernetes import Place
from master.core import events as ev
from tests import kubernetes_driver
from tests.kubernetes_api import NAMESPACE, KubernetesApi, serving
from tests.kubernetes_driver import Driven, job_values

SECOND = 0.02
PACE = replace(Pace().times(SECOND), answer=1.0)  # a busy machine may think for longer than 15 of them
PLACE = Place(NAMESPACE, "edl", "edl", "edl-master:8500", "edl-master-abc", "uid-of-the-master")
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"labels": {"team": "ours"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "worker",
                "image": "edl-worker",
                "env": [{"name": "EDL_MASTER", "value": "old"}, {"name": "HOME", "value": "/tmp"}],
                "resources": {"limits": {"memory": "512Mi"}},
            }
        ],
    },
}


def install(server: KubernetesApi, *sets: str, **data: str) -> None:
    """What `helm install` leaves, as far as the master reads it."""
    rendered = {"values.json": json.dumps(job_values(*sets)), "worker.yaml": yaml.safe_dump(POD), **data}
    known = server.objects["configmaps"].get("edl-job")
    meta = {"name": "edl-job"} | ({"uid": known["metadata"]["uid"]} if known else {})
    server.put("configmaps", {"metadata": meta, "data": rendered})
    if "edl-status" not in server.objects["configmaps"]:
        server.put("configmaps", {"metadata": {"name": "edl-status"}})


def driving(
    server: KubernetesApi, run: str = "run-1", pace: Pace = PACE
) -> contextlib.AbstractAsyncContextManager[Driven]:
    """A backend that has started, as the master starts it."""
    config = KubeConfig.from_one(cluster=Cluster(server=server.url), user=User())
    return kubernetes_driver.driving(PLACE, Api(pace, config), run)


@pytest.fixture
async def server() -> AsyncIterator[KubernetesApi]:
    async with serving(SECOND) as api:
        install(api, "workers=3")
        yield api


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
    async with driving(server) as job:
        await job.running(0, 1)
        await asyncio.sleep(5 * SECOND)
        before = len(server.requests)
        await asyncio.sleep(100 * SECOND)
        assert server.count(before) == {}


async def test_five_minutes_of_nothing_cost_a_list_and_a_watch(server: KubernetesApi) -> None:
    async with driving(server, pace=Pace().times(0.01)) as job:
        await job.running(0, 1)
        before = len(server.requests)
        await asyncio.sleep(3.2)
        cost = server.count(before)
        assert 1 <= cost["list", "pods"] <= 2
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
        "HOME": "/tmp", "EDL_WORKER_ID": "0", "EDL_RUN_ID": "run-1", "EDL_MASTER": "edl-master:8500",
    }  # fmt: skip


async def test_creates_keep_within_five_a_second_after_a_burst_of_ten(server: KubernetesApi) -> None:
    async with driving(server) as job:
        began = time.monotonic()
        await job.running(*range(30))
        assert time.monotonic() - began > (30 - 10) / 5 * SECOND * 0.9
        made = [r.at - began for r in server.requests if (r.verb, r.resource) == ("create", "pods")]
        assert sum(at < 0.5 * SECOND for at in made) <= 13


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
        assert gone[4].free and gone[4].why == "somebody deleted its pod"
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
    async with driving(server) as job:
        await job.running(0)
        job.delete(0)
        await asyncio.sleep(0.2 * SECOND)
        server.end_pod("edl-worker-0", 134)
        assert await job.gone(0) == ev.Gone(WorkerId(0), signal="SIGABRT")
        await asyncio.sleep(5 * SECOND)
        assert ("delete", "pods") not in server.count(), "its log is kept"


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


async def test_a_node_that_never_answers_does_not_hold_its_worker_for_ever(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
        server._finish = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]  # no kubelet ends it
        server.delete_pod("edl-worker-0", 2)
        await asyncio.sleep(10 * SECOND)
        assert job.of(ev.Gone) == []
        assert (await job.gone(0)).why == "its node does not answer, and it should have ended long ago"


async def test_ended_pods_do_not_pile_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(*range(24))
        for worker in range(24):
            server.end_pod(f"edl-worker-{worker}", 0)
        await job.until(lambda: len(server.objects["pods"]) == 20)
        assert "edl-worker-23" in server.objects["pods"]


# --- why a worker does not run yet


async def test_a_quota_is_named_and_asked_again_seldom(server: KubernetesApi) -> None:
    server.quota = 2
    async with driving(server) as job:
        job.create(0, 1, 2, 3)
        await job.until(lambda: len(job.of(ev.Seen)) == 2)
        waiting = sorted({0, 1, 2, 3} - set(job.seen))
        for worker in waiting:
            await job.until(lambda worker=worker: job.delays(worker))
            assert job.delays(worker)[0].startswith("exceeded quota: few, requested: pods=1")
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert server.count(before)["create", "pods"] <= 7
        server.delete_pod(f"edl-worker-{job.seen[0]}")
        await job.until(lambda: len(job.of(ev.Seen)) == 3)
        server.quota = 4
        await job.until(lambda: job.seen == [0, 1, 2, 3])
        assert all(job.delays(worker)[-1] == "" for worker in waiting)


async def test_a_missing_right_is_named(server: KubernetesApi) -> None:
    why = 'pods is forbidden: User "edl" cannot create resource "pods" in API group ""'
    refusal = server.refuse("create", "pods", 403, "Forbidden", why, times=1000)
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: job.delays(0) and job.delays(1))
        assert why in job.delays(0)[0] and "Role" in job.delays(0)[0]
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert server.count(before)["create", "pods"] <= 7
        refusal.times = 0
        await job.until(lambda: job.seen == [0, 1])


async def test_no_room_and_no_image_are_named_and_cleared(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: len(server.objects["pods"]) == 2)
        server.hold_pod("edl-worker-0", "Unschedulable", "0/2 nodes are available: 2 Insufficient cpu.")
        server.hold_pod("edl-worker-1", "ImagePullBackOff", "Back-off pulling image edl-worker")
        await job.until(lambda: job.delays(0) and job.delays(1))
        assert job.delays(0) == ["no node has room for it: 0/2 nodes are available: 2 Insufficient cpu."]
        assert job.delays(1) == ["ImagePullBackOff: Back-off pulling image edl-worker"]
        server.hold_pod("edl-worker-0", "ContainerCreating", "")
        await job.until(lambda: job.delays(0)[-1] == "")
        server.run_pod("edl-worker-1")
        await job.until(lambda: job.seen == [1])
        assert server.count()["create", "pods"] == 2, "a pod that waits is not made again"


# --- faults of the API


async def test_an_answer_that_was_lost_makes_no_second_worker(server: KubernetesApi) -> None:
    server.swallowed = 2
    async with driving(server) as job:
        await job.running(0, 1, 2)
        await asyncio.sleep(5 * SECOND)
        assert sorted(server.names) == ["edl-worker-0", "edl-worker-1", "edl-worker-2"]
        assert job.seen == [0, 1, 2]
        assert job.of(ev.Gone) == []


async def test_a_foreign_pod_of_that_name_is_left_alone_and_the_worker_given_up(
    server: KubernetesApi,
) -> None:
    async with driving(server) as job:
        server.put("pods", {"metadata": {"name": "edl-worker-0"}, "status": {"phase": "Running"}})
        job.create(0)
        gone = await job.gone(0)
        assert gone.free
        assert gone.why == "there is a pod edl-worker-0 already, and this master did not make it"
        await job.running(1)
        assert "edl-worker-0" in server.objects["pods"]


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_deletion_missed_while_the_watch_was_away_is_noticed(
    server: KubernetesApi, in_stream: bool
) -> None:
    server.expires_in_stream = in_stream
    async with driving(server) as job:
        await job.running(0, 1)
        server.half_open = True
        server.cut()
        server.drop("pods", "edl-worker-0")
        server.compact()
        server.half_open = False
        assert (await job.gone(0)).free
        assert job.of(ev.Gone, 1) == []


async def test_the_same_name_with_another_uid_is_another_pod(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
        pod = json.loads(json.dumps(server.pod("edl-worker-0")))
        server.cut()
        server.drop("pods", "edl-worker-0")
        del pod["metadata"]["uid"]
        server.put("pods", pod)
        server.compact()
        assert (await job.gone(0)).free
        await job.until(lambda: not server.objects["pods"])
        assert len(job.of(ev.Seen)) == 1


async def test_a_watch_that_says_nothing_is_given_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.half_open = True
        server.cut()
        await asyncio.sleep(2 * SECOND)
        job.create(0)
        await asyncio.sleep(2 * SECOND)
        assert job.seen == [], "nobody can know yet"
        server.half_open = False
        await job.until(lambda: job.seen == [0], 300 * SECOND)
        assert server.count()["watch", "pods"] <= 5


async def test_chunks_cut_anywhere_and_news_that_comes_twice(server: KubernetesApi) -> None:
    server.chopped = server.twice = True
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1, 2)
        await job.until(lambda: len(server.objects["pods"]) == 3)
        # U+0085 and U+2028 end a line for Python's splitlines, not for JSON.
        server.hold_pod("edl-worker-0", "ErrImagePull", "nö\u0085 such\u2028image 🙂")
        server.run_pod("edl-worker-1")
        server.end_pod("edl-worker-2", 3)
        assert await job.gone(2) == ev.Gone(WorkerId(2), code=3)
        await job.until(lambda: job.delays(0))
        assert job.delays(0) == ["ErrImagePull: nö such image 🙂"]
        await asyncio.sleep(5 * SECOND)
        assert [type(e) for e in job.emitted].count(ev.Seen) == 1
        assert len(job.of(ev.Gone)) == 1


@pytest.mark.parametrize("fault", [410, 500, 429, 403])
async def test_no_refusal_of_list_or_watch_makes_a_hot_loop(server: KubernetesApi, fault: int) -> None:
    async with driving(server) as job:
        await job.running(0)
        server.refuse("watch", "*", fault, times=10**6)
        server.refuse("list", "*", fault, times=10**6)
        server.cut()
        await asyncio.sleep(2 * SECOND)
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert 2 <= len(server.requests) - before <= 60
        server.refusals.clear()
        server.drop("pods", "edl-worker-0")
        assert (await job.gone(0)).free


async def test_a_watch_that_breaks_after_each_word_makes_no_hot_loop(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.broken_after = 1
        server.cut()
        job.create(0, 1, 2)
        await job.until(lambda: job.seen == [0, 1, 2], 100 * SECOND)
        assert server.count()["watch", "pods"] < 20


async def test_retry_after_is_obeyed_by_everybody(server: KubernetesApi) -> None:
    async with driving(server) as job:
        server.refuse("create", "pods", 429, "TooManyRequests", "slow down", retry_after=1)  # a real second
        began = time.monotonic()
        job.create(0, 1, 2)
        await job.until(lambda: job.seen == [0, 1, 2])
        at = [r.at - began for r in server.requests if (r.verb, r.resource) == ("create", "pods")]
        assert sum(t < 0.9 for t in at) <= 3, "those that were on their way"
        assert any("slow down" in why for why in job.delays(0) + job.delays(1) + job.delays(2))


@pytest.mark.parametrize("how", ["refuses connections", "never answers", "answers 500"])
async def test_five_minutes_without_an_api(server: KubernetesApi, how: str) -> None:
    async with driving(server) as job:
        job.status = a_status()
        await job.running(*range(6))
        await asyncio.sleep(5 * SECOND)
        before = len(server.requests)
        if how == "refuses connections":
            await server.down()
        elif how == "never answers":
            server.deaf = True
            server.cut()
        else:
            server.refuse("*", "*", 500, "InternalError", "etcd has no leader", times=10**6)
            server.cut()
        server.drop("pods", "edl-worker-0")
        server.end_pod("edl-worker-1", 1)
        job.create(6, 7)
        job.delete(2)
        job.backend.perform(ev.Say("ring", "ring 3 -> 2 in 0.21 s"))
        await asyncio.sleep(300 * SECOND)
        asked = server.requests[before:]
        assert len(asked) <= 300
        for first, second in itertools.pairwise(asked):
            assert second.at - first.at > 0.8 * SECOND or first.at - asked[0].at < 2 * SECOND
        server.compact()
        if how == "refuses connections":
            await server.up()
        server.deaf, server.refusals = False, []
        await job.until(lambda: {6, 7} <= set(job.seen), 120 * SECOND)
        assert (await job.gone(0)).free
        assert await job.gone(1) == ev.Gone(WorkerId(1), code=1)
        await job.gone(2)
        assert job.seen == list(range(8))
        await job.until(lambda: any("0.21" in e["message"] for e in server.objects["events"].values()))


# --- who was there before


async def test_the_pods_of_an_earlier_master_are_adopted_and_those_of_other_runs_deleted(
    server: KubernetesApi,
) -> None:
    async with driving(server, "run-0") as old:
        await old.running(0, 1)
    async with driving(server, "run-1") as first:
        assert first.found.run_id == "run-0"
        await first.until(lambda: not server.objects["pods"])
        first.status = a_status()
        await first.running(*range(2, 6))
        server.end_pod("edl-worker-2", 0)
        await first.gone(2)
    server.autorun = False
    install(server, "training.seed=5")
    async with driving(server, "run-1") as refusing:
        refusing.status = a_status()
    async with driving(server, "run-1") as second:
        assert second.found.run_id == "run-1"
        assert second.found.born == 6
        assert second.found.workers == ((3, "edl-worker-3"), (4, "edl-worker-4"), (5, "edl-worker-5"))
        assert second.found.earlier == job_values("workers=3"), "a run keeps what it began with"
        await second.until(lambda: second.seen == [3, 4, 5])
        server.end_pod("edl-worker-4", 1)
        assert await second.gone(4) == ev.Gone(WorkerId(4), code=1)
        second.delete(5)
        await second.gone(5)
        assert second.of(ev.Gone, 2) == [], "that was told already"


async def test_workers_stay_when_the_master_goes(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1)
    assert ("delete", "pods") not in server.count()


async def test_what_cannot_be_started_is_said(server: KubernetesApi) -> None:
    server.drop("configmaps", "edl-job")
    with pytest.raises(ConfigError, match="configmap edl-job: not found in namespace test"):
        async with driving(server):
            pass
    install(server, **{"values.json": "nonsense"})
    with pytest.raises(ConfigError, match=r"configmap edl-job: values\.json is no JSON"):
        async with driving(server):
            pass
    server.refuse("list", "pods", 403, "Forbidden", 'User "edl" cannot list resource "pods"')
    install(server)
    with pytest.raises(ConfigError, match='cannot list resource "pods"'):
        async with driving(server):
            pass


# --- the job's object


async def test_new_values_and_a_new_template_are_taken(server: KubernetesApi) -> None:
    async with driving(server) as job:
        changed = {**POD, "metadata": {"labels": {"team": "theirs"}}}
        install(server, "workers=5", **{"worker.yaml": yaml.safe_dump(changed)})
        await job.until(lambda: job.taken)
        assert job.taken[0]["workers"] == 5
        await job.running(0)
        assert server.pod("edl-worker-0")["metadata"]["labels"]["team"] == "theirs"
        install(server, **{"values.json": "["})
        (refused,) = await job.until(lambda: job.of(ev.Refused))
        assert "values.json is no JSON" in refused.why


async def test_a_pod_that_waits_is_replaced_when_the_release_makes_other_ones(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: len(server.objects["pods"]) == 2)
        server.run_pod("edl-worker-0")
        server.hold_pod("edl-worker-1", "ImagePullBackOff", "Back-off pulling image edl-worker")
        await job.until(lambda: job.delays(1))
        install(server, "workers=4")
        await job.until(lambda: job.taken)
        install(
            server, **{"worker.yaml": yaml.safe_dump({**POD, "metadata": {"labels": {"team": "theirs"}}})}
        )
        gone = await job.gone(1)
        assert (gone.free, gone.why) == (True, "it waited, and by now the release makes other pods")
        assert set(server.objects["pods"]) == {"edl-worker-0"}, "who runs has what it needs"
        assert server.count()["delete", "pods"] == 1


async def test_a_share_of_the_workers_has_the_higher_priority(server: KubernetesApi) -> None:
    high = {**POD, "spec": {**POD["spec"], "priorityClassName": "high"}}  # type: ignore[dict-item]
    install(server, "workers=4", "highPriorityWorkers=50%", **{"worker-high.yaml": yaml.safe_dump(high)})
    async with driving(server) as job:
        await job.running(0, 1, 2, 3)

        def classes() -> Counter[str]:
            return Counter(p["spec"].get("priorityClassName", "") for p in server.objects["pods"].values())

        assert classes() == {"high": 2, "": 2}
        server.drop("pods", "edl-worker-0")
        await job.gone(0)
        await job.running(4)
        assert classes() == {"high": 2, "": 2}


async def test_a_template_that_makes_no_pod_is_named_until_it_is_mended(server: KubernetesApi) -> None:
    install(server, **{"worker.yaml": "kind: Pod\nspec: {containers: [{name: wrong}]}"})
    async with driving(server) as job:
        job.create(0)
        await job.until(lambda: job.delays(0))
        assert "worker.yaml: the pod has no container named worker" in job.delays(0)[0]
        install(server)
        await job.until(lambda: job.seen == [0])


# --- what people see


def a_status(**changes: Any) -> dict[str, Any]:
    """A job as `view.status` tells it."""
    return {
        "phase": "Training", "reason": "ring 1: 2 ready", "target": 2, "loss": 0.12345, "eta_seconds": 1234.0,
        "records": {"size": 100, "total": 400, "applied": 130, "epoch": 2, "epochs": 4},
        "goodput": {"useful": 9.0, "starting": 1.0},
        "workers": [
            {"id": 0, "rank": 0, "state": "member"},
            {"id": 1, "rank": 1, "state": "member"},
            {"id": 2, "rank": None, "state": "warming"},
        ],
        **changes,
    }  # fmt: skip


async def test_the_status_is_written_when_it_changes_and_not_more_often_than_once_a_second(
    server: KubernetesApi,
) -> None:
    async with driving(server) as job:

        def data() -> dict[str, str]:
            return dict(server.objects["configmaps"]["edl-status"].get("data") or {})

        def patches() -> int:
            return server.count()["patch", "configmaps"]

        job.status = a_status()
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(data)
        in_full = json.loads(data()["status.json"])
        assert in_full["records"]["applied"] == 130
        assert "goodput" not in in_full, "it changes all the time"
        assert {k: v for k, v in data().items() if k not in ("updated", "values", "status.json")} == {
            "phase": "Training", "reason": "ring 1: 2 ready", "progress": "32%", "etaSeconds": "1200",
            "ringSize": "2", "workers": "2", "goodput": "90%", "epoch": "2/4", "loss": "0.1235",
            "state": json.dumps({"runId": "run-1", "born": 0}),
        }  # fmt: skip
        before = patches()
        for _ in range(50):
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert patches() == before, "nothing has changed"
        for loss in range(100):  # ten seconds of mere progress
            job.status = a_status(loss=float(loss))
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert 1 <= patches() - before <= 4
        before = patches()
        for target in range(100):
            job.status = a_status(target=target)
            job.backend.observe(0.0, ev.Tick(), [])
            await asyncio.sleep(0.1 * SECOND)
        assert 3 <= patches() - before <= 14
        two = [{"id": n, "rank": None, "state": "asked", "delay": "no room"} for n in (3, 4)]
        job.status = a_status(workers=two)
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: data().get("waiting") == "workers 3, 4: no room")
        job.status = a_status(phase="Waiting", eta_seconds=None)
        began = time.monotonic()
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: data()["phase"] == "Waiting")
        assert time.monotonic() - began < 1.0 * SECOND
        assert not {"etaSeconds", "waiting"} & set(data())
        job.status = a_status(phase="Succeeded")
        job.backend.status.end({"phase": "Succeeded", "step": 7})
    assert data()["phase"] == "Succeeded", "the last word is written when the master goes"
    assert json.loads(data()["summary.json"])["step"] == 7
    assert "status.json" not in data()


# --- what is asked by hand


def ask(server: KubernetesApi, **keys: str) -> None:
    """As `edl scale` and `edl stop` do: beside what the chart has rendered."""
    job = server.objects["configmaps"]["edl-job"]
    server.put("configmaps", {**job, "data": {**job["data"], **keys}})


async def test_a_number_by_hand_holds_until_the_chart_says_another(server: KubernetesApi) -> None:
    ask(server, **{asked.SCALE: asked.Scale(7, 3, "first").text()})
    async with driving(server) as job:
        assert job.found.values["workers"] == 7
        job.status = a_status()
        install(server, "workers=3", "paused=true", **{asked.SCALE: asked.Scale(7, 3, "first").text()})
        await job.until(lambda: job.taken and job.taken[-1]["paused"])
        assert job.taken[-1]["workers"] == 7, "an upgrade that says nothing of workers leaves them alone"
        install(server, "workers=5", **{asked.SCALE: asked.Scale(7, 3, "first").text()})
        await job.until(lambda: job.taken[-1]["workers"] == 5)
        events = server.objects["events"]
        await job.until(lambda: any(e["reason"] == "ScaleOver" for e in events.values()))
    install(server, "workers=3", **{asked.SCALE: asked.Scale(7, 3, "first").text()})
    async with driving(server) as job:
        assert job.found.values["workers"] == 3, "what is over does not come back, whichever master is there"
        ask(server, **{asked.SCALE: asked.Scale(8, 3, "second").text()})
        await job.until(lambda: job.taken and job.taken[-1]["workers"] == 8)
        install(server, "workers=3", "maxWorkers=6", **{asked.SCALE: asked.Scale(8, 3, "second").text()})
        await job.until(lambda: job.taken[-1]["workers"] == 3)
        told = "`edl scale 8` does not hold any more: workers is 8 and maxWorkers is 6"
        await job.until(lambda: any(e["message"].startswith(told) for e in server.objects["events"].values()))


async def test_a_run_is_stopped_once_whichever_master_reads_of_it(server: KubernetesApi) -> None:
    async with driving(server) as job:
        job.status = a_status()
        ask(server, **{asked.STOP: "run-0"})
        install(server, "workers=3", "paused=true", **{asked.STOP: "run-1"})
        await job.until(lambda: job.of(ev.StopAsked))
        install(server, "workers=3", **{asked.STOP: "run-1"})
        await job.until(lambda: len(job.taken) > 1 and not job.taken[-1]["paused"])
        assert job.of(ev.StopAsked) == [ev.StopAsked("stopped by edl stop")]
    async with driving(server) as next_master:
        assert next_master.of(ev.StopAsked) == [ev.StopAsked("stopped by edl stop")]
    async with driving(server, "run-2") as another:
        assert another.of(ev.StopAsked) == []


async def test_rank_and_state_are_labels(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1, 2)
        job.status = a_status()
        job.backend.observe(0.0, ev.Tick(), [])

        def labels(worker: int) -> tuple[str | None, str]:
            found = server.pod(f"edl-worker-{worker}")["metadata"]["labels"]
            return found.get("edl.dev/rank"), found["edl.dev/state"]

        await job.until(lambda: labels(1) == ("1", "member"))
        assert labels(2) == (None, "starting")
        assert server.count()["patch", "pods"] == 2
        job.status = a_status(workers=[{"id": 1, "rank": None, "state": "leaving"}])
        job.backend.observe(0.0, ev.Tick(), [])
        await job.until(lambda: labels(1) == (None, "leaving"))
        server.end_pod("edl-worker-0", 0)
        await job.until(lambda: labels(0) == (None, "gone"))


async def test_labels_do_not_pile_up_however_fast_the_ring_changes(server: KubernetesApi) -> None:
    async with driving(server) as job:
        workers = range(20)
        await job.running(*workers)
        before = len(server.requests)

        def turn(by: int) -> None:
            ring = [{"id": w, "rank": (w + by) % 20, "state": "member"} for w in workers]
            job.status = a_status(workers=ring)
            job.backend.observe(0.0, ev.Tick(), [])

        for by in range(100):  # twenty seconds in which each rank changes a hundred times
            turn(by)
            await asyncio.sleep(0.2 * SECOND)
        for worker in range(10):
            server.drop("pods", f"edl-worker-{worker}")
        await job.until(lambda: len(job.of(ev.Gone)) == 10)
        dropped = len(server.requests)
        await job.running(20)
        first = next(r for r in server.requests[dropped:] if (r.verb, r.resource) == ("create", "pods"))
        urgent = server.requests[dropped:].index(first)
        assert urgent <= 3, "a pod that is to be made does not wait for labels"

        def ranks() -> dict[int, str | None]:
            found = {w: server.pod(f"edl-worker-{w}")["metadata"]["labels"] for w in range(10, 20)}
            return {w: labels.get("edl.dev/rank") for w, labels in found.items()}

        await job.until(lambda: ranks() == {w: str((w + 99) % 20) for w in range(10, 20)})
        patches = [r for r in server.requests[before:] if (r.verb, r.resource) == ("patch", "pods")]
        seconds = (patches[-1].at - patches[0].at) / SECOND
        assert len(patches) <= 10 + 5 * seconds + 1, "what the budget has left"
        labelled = {r.name for r in server.requests[dropped + 1 :] if r.verb == "patch"}
        assert not labelled & {f"edl-worker-{w}" for w in range(10)}, "who is gone is not labelled"


async def test_events_tell_what_happened_and_alike_ones_count_up(server: KubernetesApi) -> None:
    async with driving(server) as job:
        for _ in range(3):
            job.backend.perform(ev.Say("scale", "workers 4 -> 2"))
            await asyncio.sleep(3 * SECOND)
        job.backend.perform(ev.Say("ring", "ring 3 -> 2 in 0.21 s, 0 records redone (worker 1 is lost)"))
        job.backend.perform(ev.Say("refused", "a running job keeps its training.seed"))
        job.backend.perform(ev.Say("end", "Succeeded: every record is applied"))

        def told() -> dict[str, Any]:
            return {e["reason"]: e for e in server.objects["events"].values()}

        await job.until(lambda: "Finished" in told())
        assert told()["Scaled"]["count"] == 3
        assert told()["Scaled"]["involvedObject"]["uid"]
        assert told()["RingReshaped"]["message"].startswith("ring 3 -> 2 in 0.21 s")
        assert told()["SpecRefused"]["type"] == "Warning"
        for n in range(400):
            job.backend.perform(ev.Say("worker", f"worker {n} is ready after 3.1 s"))
        job.backend.perform(ev.Say("ring", "ring 2 -> 400 in 2.0 s"))
        await job.until(lambda: any("400 in 2.0" in e["message"] for e in server.objects["events"].values()))
        assert len(server.objects["events"]) <= 32


# --- the account


async def test_a_token_that_was_rotated_is_read_again(server: KubernetesApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    known = ["old"]
    answer = server._answer

    def checked(verb: str, resource: str, name: str, http: Any, body: bytes) -> Any:
        if http.headers.get("Authorization") != f"Bearer {known[0]}":
            from aiohttp import web

            return web.json_response({"message": "Unauthorized", "code": 401}, status=401)
        return answer(verb, resource, name, http, body)

    server._answer = checked  # type: ignore[method-assign]
    user = User(token="old", token_file=str(token))
    api = Api(Pace().times(SECOND), KubeConfig.from_one(cluster=Cluster(server=server.url), user=user))
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    assert (await api.get(path))["kind"] == "PodList"
    known[0] = "new"
    with pytest.raises(ApiError, match="Unauthorized"):
        await api.get(path)
    token.write_text("new")
    assert (await api.get(path))["kind"] == "PodList"
    await api.close()


def test_without_a_cluster_it_is_said_where_one_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no Kubernetes to talk to: .*none"):
        Api(Pace())
    monkeypatch.delenv("EDL_NAMESPACE", raising=False)
    with pytest.raises(ConfigError, match="EDL_NAMESPACE"):
        Place.from_environment()


# --- storms


@pytest.mark.parametrize("number", range(4))
async def test_whatever_comes_together_what_was_told_is_the_truth(number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if number else 1
    seed = int(os.environ.get("EDL_STORM_SEED", seed))
    print(f"EDL_STORM_SEED={seed}")
    chance = random.Random(seed)
    async with serving(SECOND, seed) as server:
        install(server, "workers=8")
        async with driving(server) as job:
            born, living = 0, set[int]()
            causes: dict[int, str] = {}

            def wanted() -> None:
                nonlocal born
                living.difference_update(e.worker for e in job.of(ev.Gone))
                while len(living) < 8:
                    job.create(born)
                    living.add(born)
                    born += 1

            for _ in range(60):
                wanted()
                strike(server, job, chance, causes)
                await asyncio.sleep(SECOND * chance.uniform(0.0, 3.0))
            if server._runner is None:
                await server.up()
            server.deaf = server.half_open = server.twice = server.chopped = False
            server.refusals, server.broken_after, server.swallowed, server.quota = [], 0, 0, None

            def settled() -> bool:
                wanted()
                pods = server.objects["pods"].values()
                running = {p["metadata"]["name"] for p in pods if p["status"]["phase"] == "Running"
                           and not p["metadata"].get("deletionTimestamp")}  # fmt: skip
                return running == {f"edl-worker-{w}" for w in living} and living <= set(job.seen)

            try:
                await job.until(settled, 30)
            except TimeoutError:
                pods = {n: p["status"]["phase"] for n, p in server.objects["pods"].items()}
                unseen = living - set(job.seen)
                raise AssertionError(f"living {living}, not seen {unseen}, pods {pods}") from None
            told = Counter(e.worker for e in job.of(ev.Gone))
            assert set(told) == set(range(born)) - living
            assert set(told.values()) <= {1}
            assert set(Counter(e.worker for e in job.of(ev.Seen)).values()) == {1}
            # A pod that came and went while nobody knew of it is made again.
            twice = {name for name, n in Counter(server.names).items() if n > 1}
            assert twice <= server.unanswered, "a name was used twice"
            for worker, cause in causes.items():
                (gone,) = job.of(ev.Gone, worker)
                if cause == "crash":
                    assert (gone.code, gone.signal, gone.free) in ((9, "", False), (None, "", True)), gone
                else:
                    assert gone.free, (cause, gone)


def strike(server: KubernetesApi, job: Driven, chance: random.Random, causes: dict[int, str]) -> None:
    """Something bad, to the API or to a worker."""
    running = [
        int(p["metadata"]["labels"]["edl.dev/worker-id"])
        for p in server.objects["pods"].values()
        if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
    ]
    match chance.randrange(14):
        case 0:
            server.cut()
        case 1:
            server.cut()
            server.compact()
        case 2:
            server.expires_in_stream = not server.expires_in_stream
        case 3:
            server.twice, server.chopped = chance.random() < 0.5, chance.random() < 0.5
        case 4:
            verb = chance.choice(["create", "list", "watch", "*"])
            server.refuse(verb, "*", chance.choice([410, 429, 500, 503]), times=chance.randint(1, 5))
        case 5:
            server.swallowed = chance.randint(1, 2)
        case 6:
            server.broken_after = chance.choice([0, 0, 1, 3])
        case 7:
            server.half_open = chance.random() < 0.3
        case 8:
            server.quota = chance.choice([None, 4, 8])
        case _ if not running:
            pass
        case 9:
            causes[worker := chance.choice(running)] = "crash"
            server.end_pod(f"edl-worker-{worker}", 9)
        case 10:
            causes[worker := chance.choice(running)] = "preempted"
            server.preempt(f"edl-worker-{worker}")
        case 11:
            causes[worker := chance.choice(running)] = "deleted"
            server.delete_pod(f"edl-worker-{worker}")
        case 12:
            causes[worker := chance.choice(running)] = "vanished"
            server.drop("pods", f"edl-worker-{worker}")
        case 13:
            worker = chance.choice(running)
            if worker in job.seen:
                job.delete(worker)
