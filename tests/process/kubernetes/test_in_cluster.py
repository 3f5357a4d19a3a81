# SPDX-License-Identifier: Apache-2.0
"""The master's process as the chart starts it, over all its runs; pods and API are the small server's."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from edl.contract import artifacts
from edl.errors import EdlError
from edl.kubernetes import pods
from edl.net.master_client import Client
from edl.net.probe import probe
from tests.support.kubernetes.master import TOKEN
from tests.support.kubernetes.small_release import Release, until

pytestmark = pytest.mark.waits

# --- after the end


async def test_ended_pods_are_deleted_when_their_time_to_live_is_over(small_release: Release) -> None:
    small_release.install("workers=2", "ttlSecondsAfterFinished=-1")
    async with small_release.master() as first:
        await until(lambda: len(small_release.pods) == 2)
        small_release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-2" in small_release.pods)
        await small_release.stop(first)
        await until(lambda: small_release.pods == ["edl-worker-0"])
    ended_at = int(time.time()) - 3600
    small_release.ended(ended_at)
    small_release.install("workers=2", "ttlSecondsAfterFinished=-1")
    ended = small_release.server.objects["pods"]["edl-worker-0"]
    labels = {**ended["metadata"]["labels"], pods.WORKER_ID: "1"}
    meta = {"name": "edl-worker-1", "labels": labels, "ownerReferences": ended["metadata"]["ownerReferences"]}
    small_release.server.put("pods", {**ended, "metadata": meta, "status": {"phase": "Running"}})
    async with small_release.master("edl-master-b"):
        await until(lambda: small_release.pods == ["edl-worker-0"])  # the grace period of the other is over
        due = int(time.time()) + 2  # from the end; from this master's start it would be in an hour
        small_release.install("workers=2", f"ttlSecondsAfterFinished={due - ended_at}")
        await until(lambda: not small_release.pods)
        assert time.time() >= due
        assert small_release.status["phase"] == "Stopped"


async def test_a_time_to_live_that_is_given_after_the_end_counts_too(small_release: Release) -> None:
    small_release.install("workers=1", "ttlSecondsAfterFinished=-1")
    async with small_release.master() as process:
        await until(lambda: small_release.pods)
        small_release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-1" in small_release.pods)
        await small_release.stop(process)
        await until(lambda: "waiting for another runId" in process.log)
        assert small_release.pods == ["edl-worker-0"], "its log may be read"
        small_release.install("workers=1", "ttlSecondsAfterFinished=0")
        await until(lambda: not small_release.pods)
        before = len(small_release.server.requests)
        await asyncio.sleep(1)
        assert small_release.server.count(before)["create", "pods"] == 0


async def test_a_master_whose_run_has_ended_says_so_to_whoever_calls(small_release: Release) -> None:
    small_release.install("workers=1")
    async with small_release.master(host="127.0.0.1") as process:
        await until(lambda: small_release.pods)
        small_release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-1" in small_release.pods)
        await small_release.stop(process)
        await until(lambda: "waiting for another runId" in process.log)
        contact = artifacts.Contact(await process.address(), TOKEN, 0)
        # What `helm test` finds, and a worker that was left behind.
        with pytest.raises(EdlError, match="the job has ended: Stopped: enough"):
            await asyncio.to_thread(probe, contact.address, TOKEN, 20)
        with pytest.raises(EdlError, match="the job has ended: Stopped: enough"):
            await asyncio.to_thread(Client(contact).scale, 3)
        small_release.install("workers=1", "runId=2")
        await until(lambda: small_release.status["phase"] == "Starting")
        events = small_release.server.objects["events"]
        await until(lambda: any(e["reason"] == "RunStarted" for e in events.values()))
        assert (await asyncio.to_thread(Client(contact).status))["phase"] == "Starting"


# --- changes of the values


async def test_a_refused_change_has_no_effect_now_or_later_and_is_shown_until_it_is_reverted(
    small_release: Release,
) -> None:
    def condition() -> tuple[str | None, str]:
        status = small_release.status
        return status.get("valuesApplied"), status.get("refused", "")

    small_release.install("workers=2", "ttlSecondsAfterFinished=0")
    async with small_release.master("a"):
        await until(lambda: len(small_release.pods) == 2 and condition() == ("True", ""))
        run = json.loads(small_release.status["state"])["runId"]
        began = time.monotonic()
        # Frozen and live values in one change: the live one is applied.
        small_release.install("workers=3", "training.seed=9", "ttlSecondsAfterFinished=0")
        await until(lambda: len(small_release.pods) == 3)
        await until(lambda: condition()[0] == "False")
        assert "training.seed 1 -> 9" in condition()[1]
        small_release.install("workers=4", "training.seed=9", "ttlSecondsAfterFinished=0")
        await until(lambda: len(small_release.pods) == 4)
        assert condition()[0] == "False", "it is shown as long as the values have it"
        small_release.install("workers=4", "ttlSecondsAfterFinished=0")
        await until(lambda: condition() == ("True", ""))
        small_release.install("workers=1", "model.source=nonsense(", "ttlSecondsAfterFinished=0")
        await until(lambda: small_release.status["workers"] == "1")
        assert condition()[0] == "False" and "model.source: line 1" in condition()[1]
        small_release.install("workers=1", "training.seed=9", "suspend=true", "ttlSecondsAfterFinished=0")
        await until(lambda: "training.seed" in condition()[1])
    async with small_release.master("b") as second:  # the next master judges the same
        await until(lambda: small_release.holder == "b" and "taken over" in second.log)
        await until(lambda: "training.seed 1 -> 9" in second.log)
        assert json.loads(small_release.status["values"])["training"]["seed"] == 1
        lived = time.monotonic() - began
        await small_release.stop(second)
        await until(lambda: "waiting for another runId" in second.log)
        ended = small_release.status
        summary = json.loads(ended["summary.json"])
        assert summary["seconds"] >= lived - 1, "it covers both masters"
        assert sum(summary["goodput_seconds"].values()) == pytest.approx(summary["seconds"], abs=0.1)
        assert "training.seed 1 -> 9" in await until(lambda: condition()[1])
        # After the end, too: nothing but another runId starts a run.
        small_release.install("workers=1", "training.epochs=9", "ttlSecondsAfterFinished=0")
        await until(lambda: "training.epochs 20 -> 9" in condition()[1])
        small_release.install("workers=1", "ttlSecondsAfterFinished=0")
        await until(lambda: condition() == ("True", ""))
        assert small_release.pods == []
        assert {**small_release.status, "updated": ended["updated"]} == {
            key: text for key, text in {**ended, "valuesApplied": "True"}.items() if key != "refused"
        }
        small_release.install("workers=1", "training.seed=9", "runId=2")
        await until(lambda: small_release.pods)
        await until(lambda: json.loads(small_release.status["state"]).get("requested") == "2")
        assert json.loads(small_release.status["state"])["runId"] != run
        assert json.loads(small_release.status["values"])["training"]["seed"] == 9


# --- another version


async def test_a_master_of_another_version_leaves_the_run_alone_until_its_workers_have_ended(
    small_release: Release,
) -> None:
    small_release.install("workers=2")
    server = small_release.server
    async with small_release.master("a"):
        await until(lambda: len(small_release.pods) == 2)
        await until(lambda: small_release.status.get("state"))
    state = {**json.loads(small_release.status["state"]), "version": "0.0.9", "nextId": 2}
    status = server.objects["configmaps"]["edl-status"]
    there = {**status["data"], "phase": "Training", "state": json.dumps(state)}
    server.put("configmaps", {**status, "data": there})
    before = len(server.requests)
    async with small_release.master("b") as newer:
        await until(lambda: "is of edl 0.0.9" in small_release.status["reason"])
        assert small_release.status["phase"] == "Training"
        assert "helm rollback" in small_release.status["reason"]
        assert newer.pages.get("/readyz")[0] == 200
        assert ("delete", "pods") not in server.count(before)
        for worker in list(small_release.pods):
            server.end_pod(worker, 3)
        await until(lambda: small_release.pods == ["edl-worker-2", "edl-worker-3"])
        await until(lambda: json.loads(small_release.status["state"])["runId"] != state["runId"])


# --- which master acts


async def test_a_master_whose_pod_was_deleted_by_force_is_followed_and_does_nothing_more(
    small_release: Release,
) -> None:
    small_release.install("workers=2")
    server = small_release.server
    async with small_release.master("a") as first:
        await until(lambda: small_release.pods == ["edl-worker-0", "edl-worker-1"])
        assert small_release.holder == "a"
        await until(lambda: small_release.acting == ["a"] and "state" in small_release.status)
        started = json.loads(small_release.status["state"])["startedAt"]
        server.drop("pods", "a")  # its process goes on
        async with small_release.master("b") as second:
            await until(lambda: "superseded by another master" in first.log)
            assert small_release.holder == "b"
            await until(lambda: second.pages.get("/readyz")[0] == 200)
            await until(lambda: small_release.acting == ["b"])
            await until(lambda: "stands by" in first.log)
            before = len(server.requests)
            server.drop("pods", "edl-worker-0")
            await until(lambda: small_release.pods == ["edl-worker-1", "edl-worker-2"])
            await until(lambda: json.loads(small_release.status["state"])["nextId"] == 3)
            assert json.loads(small_release.status["state"])["startedAt"] == started
            assert server.count(before)["create", "pods"] == 1
            assert server.names == ["edl-worker-0", "edl-worker-1", "edl-worker-2"]
        assert small_release.pods == ["edl-worker-1", "edl-worker-2"], "they wait for the next master"
        await until(lambda: small_release.holder == "a")  # which stands by
        assert server.objects["leases"]["edl-master"]["spec"]["leaseTransitions"] == 3


async def test_a_master_that_was_cut_off_looks_who_acts_before_it_writes(small_release: Release) -> None:
    small_release.install("workers=2")
    server = small_release.server
    async with small_release.master("a") as cut_off:
        await until(lambda: small_release.status.get("phase"))
        await until(lambda: len(small_release.pods) == 2)
        await server.down()
        server.drop("pods", "edl-worker-0")  # it will create a new one
        await until(lambda: "the Kubernetes API is unavailable" in cut_off.log)
        assert (await cut_off.address()) and cut_off.pages.get("/readyz")[0] == 200, "training goes on"
        lease = server.objects["leases"]["edl-master"]
        server.put("leases", {**lease, "spec": {"holderIdentity": "b_1", "leaseTransitions": 2}})
        before = len(server.requests)
        await server.up()
        await until(lambda: "stands down" in cut_off.log)
    assert {r.verb for r in server.requests[before:]} <= {"get", "list", "watch"}


@pytest.mark.parametrize("lease", ["is there", "was deleted"])
async def test_an_outage_that_nobody_used_changes_nothing(small_release: Release, lease: str) -> None:
    small_release.install("workers=2")
    server = small_release.server
    async with small_release.master("a") as master:
        await until(lambda: len(small_release.pods) == 2)
        await server.down()
        server.drop("pods", "edl-worker-0")
        if lease == "was deleted":
            server.drop("leases", "edl-master")
        await until(lambda: "the Kubernetes API is unavailable" in master.log)
        await server.up()
        await until(lambda: small_release.pods == ["edl-worker-1", "edl-worker-2"])
        assert "stands down" not in master.log


async def test_a_master_makes_the_lease_that_was_not_applied(small_release: Release) -> None:
    small_release.install("workers=1")  # Argo CD leaves Leases out
    server = small_release.server
    server.drop("leases", "edl-master")
    server.refuse("create", "leases", 409, "AlreadyExists", "a different one made it, and it is gone again")
    async with small_release.master("a"):
        await until(lambda: small_release.pods)
        assert small_release.holder == "a"
        meta = server.objects["leases"]["edl-master"]["metadata"]
        (owner,) = meta["ownerReferences"]
        assert owner["uid"] == server.objects["configmaps"]["edl-job"]["metadata"]["uid"], (
            "it goes with the job"
        )
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "edl-master"
        server.drop("pods", "a")
        async with small_release.master("b"):
            await until(lambda: small_release.holder == "b")


async def test_two_that_start_at_once_take_over_one_after_the_other(small_release: Release) -> None:
    small_release.install("workers=1")
    server = small_release.server
    server.refuse("patch", "leases", 409, "Conflict", "the object has been modified")
    async with small_release.master("a"):
        await until(lambda: small_release.pods)
        assert small_release.holder == "a"
        assert server.count()["patch", "leases"] == 2


async def test_a_master_that_may_not_take_over_says_which_right_it_lacks(small_release: Release) -> None:
    small_release.install("workers=1")
    small_release.server.refuse("patch", "leases", 403, "Forbidden", "cannot patch resource leases", times=9)
    async with small_release.master("a") as master:
        await until(lambda: not master.running)
        assert "cannot patch resource leases" in master.log


async def test_a_master_is_ended_while_it_waits_for_the_api(small_release: Release) -> None:
    small_release.install("workers=1")
    await small_release.server.down()
    async with small_release.master("a") as master:
        await until(lambda: "the Kubernetes API is unavailable" in master.log)
        master.process.terminate()
        await until(lambda: not master.running, 5)
