# SPDX-License-Identifier: Apache-2.0
"""Workers as pods, at the small API server: how they are made, what becomes of them, which exist."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from edl.contract.ids import WorkerId
from edl.contract.workers import worker_environment
from edl.errors import ConfigError
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import backend
from edl.master.backends.kubernetes.labels import Labels
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.driver import Driven, job_values
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
        other["metadata"]["labels"] = {**labels, "edl.dev/run-id": "run-1"}  # whatever its labels say
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


async def runs_on(job: Driven, server: KubernetesApi, worker: int, node: str) -> None:
    job.create(worker)
    await job.until(lambda: f"edl-worker-{worker}" in server.objects["pods"])
    server.bind_pod(f"edl-worker-{worker}", node)
    server.run_pod(f"edl-worker-{worker}")
    await job.until(lambda: worker in job.seen)


async def test_what_is_put_on_a_node_that_is_lost_is_made_anew_elsewhere(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        await runs_on(job, server, 1, "n2")
        job.create(2, 3)
        await job.until(lambda: len(server.objects["pods"]) == 4)
        server.bind_pod("edl-worker-2", "n1")  # before its worker 0 is missed
        job.give_up(0)
        server.bind_pod("edl-worker-3", "n1")  # and after
        for worker in (2, 3):
            gone = await job.gone(worker)
            assert (gone.free, gone.why) == (True, "node n1 does not answer")
        await job.until(lambda: {"edl-worker-2", "edl-worker-3"}.isdisjoint(server.objects["pods"]))
        avoided = [e for e in server.objects["events"].values() if e["reason"] == "NodeAvoided"]
        assert [e["message"] for e in avoided] == ["node n1 does not answer: workers are made elsewhere"]

        job.create(4)
        await job.until(lambda: "edl-worker-4" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-4")) == ["n1"]
        server.hold_pod("edl-worker-4", "Unschedulable", "0/2 nodes are available: 1 Insufficient cpu.")
        await job.until(lambda: job.delays(4))
        # By the time it is trusted again it is back, or Kubernetes itself puts nothing there.
        assert (await job.gone(4)).why == "it was pending, and its pod was outdated"
        job.create(5)
        await job.until(lambda: "edl-worker-5" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-5")) == []
        assert job.of(ev.Gone, 1) == []


async def test_a_node_on_which_others_are_heard_of_is_not_lost(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        await runs_on(job, server, 1, "n1")
        job.create(2)
        await job.until(lambda: "edl-worker-2" in server.objects["pods"])
        server.bind_pod("edl-worker-2", "n1")
        job.give_up(0)
        await asyncio.sleep(3 * PACE.untaken)
        assert job.of(ev.Gone, 2) == []
        job.give_up(1)
        assert (await job.gone(2)).why == "node n1 does not answer"


async def test_a_node_that_takes_its_pods_up_is_not_avoided_for_a_silent_worker(
    server: KubernetesApi,
) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        job.give_up(0)
        job.create(1, 2)
        await job.until(lambda: {"edl-worker-1", "edl-worker-2"} <= set(server.objects["pods"]))
        server.bind_pod("edl-worker-1", "n1")
        server.take_up_pod("edl-worker-1")
        server.bind_pod("edl-worker-2", "n2")  # slow, and in no doubt
        await asyncio.sleep(3 * PACE.untaken)
        assert job.of(ev.Gone, 1) == job.of(ev.Gone, 2) == []
        job.create(3)
        await job.until(lambda: "edl-worker-3" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-3")) == []


def not_on(pod: dict[str, Any]) -> list[str]:
    """The nodes on which a pod must not be."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(required, {})
    (term,) = affinity.get("nodeSelectorTerms", [{}])
    return [node for asked in term.get("matchFields", []) for node in asked["values"]]


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
        assert server.count(before)["create", "pods"] <= 12
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
        assert server.count(before)["create", "pods"] <= 12
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
        assert second.of(ev.Gone, 2) == [], "that was told already"


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


async def test_what_cannot_be_started_is_said(server: KubernetesApi) -> None:
    server.drop("configmaps", "edl-job")
    with pytest.raises(ConfigError, match="configmap edl-job: not found in namespace test"):
        async with driving(server):
            pass
    install(server, **{"values.json": "nonsense"})
    with pytest.raises(ConfigError, match=r"configmap edl-job: values\.json is not valid JSON"):
        async with driving(server):
            pass
    server.refuse("list", "pods", 403, "Forbidden", 'User "edl" cannot list resource "pods"')
    install(server)
    with pytest.raises(ConfigError, match='cannot list resource "pods"'):
        async with driving(server):
            pass


# --- failures beside the workers are reported, too


async def test_a_mistake_of_our_own_is_the_workers_end(
    server: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any, **__: Any) -> None:
        raise TypeError("unhashable type: 'dict'")

    monkeypatch.setattr(backend, "render", mistaken)
    async with driving(server) as job:
        job.create(0)
        gone = await job.gone(0)
        assert (gone.free, gone.why) == (False, "internal error: TypeError: unhashable type: 'dict'")


@pytest.mark.parametrize("status", [403, 422])
async def test_a_status_that_cannot_be_written_is_told_and_when_it_can_again(
    server: KubernetesApi, status: int
) -> None:
    refusal = server.refuse("patch", "configmaps", status, "Refused", "cannot patch edl-status", times=1000)
    async with driving(server) as job:
        job.told = a_status()
        job.backend.observe(0.0, ev.Tick(), [])
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert degraded.part == "status"
        assert "edl-status cannot be written" in degraded.why and "cannot patch edl-status" in degraded.why
        refusal.times = 0
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("status", ""))
        assert server.objects["configmaps"]["edl-status"]["data"]["phase"] == "Training"


async def test_a_deletion_that_is_refused_is_told_and_when_it_is_not_any_more(server: KubernetesApi) -> None:
    refusal = server.refuse("delete", "pods", 403, "Forbidden", "cannot delete resource pods", times=1000)
    async with driving(server) as job:
        await job.running(0)
        job.delete(0)
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert degraded.part == "pod deletion" and "cannot delete resource pods" in degraded.why
        refusal.times = 0
        await job.gone(0)
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("pod deletion", ""))


async def test_what_goes_on_for_all_is_started_again_when_it_fails(
    server: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, failures = Labels.run, iter([RuntimeError("dictionary changed size")])

    async def once(self: Labels) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        await labels(self)

    monkeypatch.setattr(Labels, "run", once)
    async with driving(server) as job:
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert (degraded.part, "dictionary changed size" in degraded.why) == ("labels", True)
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("labels", ""))
