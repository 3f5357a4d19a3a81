# SPDX-License-Identifier: Apache-2.0
"""`edl scale` and `edl stop` of a release, what it or a cluster refuses, and a real master that obeys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
import yaml

from edl.kubernetes import overrides
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.kubernetes import master
from tests.support.kubernetes.release_commands import RUN, SECONDS, Cluster, data, install, pod, says

pytestmark = pytest.mark.waits


# --- scale


async def answering(server: KubernetesApi, so: Callable[[], dict[str, str] | None]) -> None:
    """A master: once what is asked is there, it does it."""
    while (told := so()) is None:
        await asyncio.sleep(0.01)
    says(server, told.pop("phase", "Training"), **told)


async def test_scale_asks_beside_the_charts_number_and_takes_it_back_with_it(cluster: Cluster) -> None:
    says(cluster, "Training")
    rendered = data(cluster)

    def scaled() -> dict[str, str] | None:
        scale = overrides.Scale.read(data(cluster))
        return {"workers": str(scale.workers)} if scale else None

    done, _ = await asyncio.gather(cluster.edl("scale", 8, "--release", "edl"), answering(cluster, scaled))
    assert (done.code, done.out) == (0, "workers 4 -> 8\n")
    scale = overrides.Scale.read(data(cluster))
    assert scale is not None and (scale.workers, scale.instead) == (8, 4)
    assert data(cluster)["values.json"] == rendered["values.json"], "which is Helm's"
    pod(cluster, "master")
    told = await cluster.edl("status", "--release", "edl")
    assert "edl scale: 8 workers in place of the chart's 4\n" in told.out

    def unscaled() -> dict[str, str] | None:
        return None if overrides.SCALE in data(cluster) else {"workers": "4"}

    done, _ = await asyncio.gather(cluster.edl("scale", 4, "--release", "edl"), answering(cluster, unscaled))
    assert (done.code, done.out) == (0, "workers 8 -> 4\n")
    assert data(cluster) == rendered


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (10, "workers is 10 and maxWorkers is 9: workers must not be larger"),
        (1, "workers is 1 and minWorkers is 2: the job could never train"),
    ],
)
async def test_a_number_out_of_range_is_refused_and_nothing_is_asked(
    cluster: Cluster, workers: int, words: str
) -> None:
    install(cluster, "edl", "minWorkers=2", "maxWorkers=9")
    says(cluster, "Training")
    done = await cluster.edl("scale", workers, "--release", "edl")
    assert done.code == 1
    assert words in done.err
    assert cluster.count()["patch", "configmaps"] == 0


async def test_what_is_asked_of_a_master_that_does_not_run_waits_for_it(cluster: Cluster) -> None:
    says(cluster, "Training")
    cluster.drop("pods", "edl-master")
    done = await cluster.edl("scale", 8, "--release", "edl")
    assert done.code == 1
    assert "requested 8 workers; the master will do it when it runs: the master is not running" in done.err
    assert overrides.Scale.read(data(cluster)) is not None
    told = await cluster.edl("status", "--release", "edl")
    assert "edl scale: 8 workers in place of the chart's 4; not yet applied by the master" in told.out


# --- stop


async def test_stop_ends_the_run_says_what_stays_and_may_be_said_twice(cluster: Cluster) -> None:
    says(cluster, "Training")

    def stopped() -> dict[str, str] | None:
        return (
            {"phase": "Stopped", "reason": "by edl stop"}
            if data(cluster).get(overrides.STOP) == RUN
            else None
        )

    done, _ = await asyncio.gather(cluster.edl("stop", "--release", "edl"), answering(cluster, stopped))
    assert done.code == 0
    assert done.out.startswith("the job has ended: Stopped, by edl stop\n")
    assert "The release remains: its master, the summary in configmap/edl-status" in done.out
    assert f"helm uninstall edl -n {NAMESPACE}" in done.out
    before = len(cluster.requests)
    again = await cluster.edl("stop", "--release", "edl")
    assert (again.code, again.out) == (0, done.out)
    assert cluster.count(before) == {("list", "configmaps"): 1}
    late = await cluster.edl("scale", 3, "--release", "edl")
    assert late.code == 1
    assert late.err == (
        f"edl: release edl in namespace {NAMESPACE} at {cluster.url}\n"
        "edl: release edl: the job has ended: Stopped\n"
    )


def asks(cluster: Cluster, key: str) -> overrides.Asked | None:
    return overrides.Asked.read(data(cluster), key)


async def test_stop_with_a_checkpoint_waits_until_the_job_ends_or_says_why_it_goes_on(
    cluster: Cluster,
) -> None:
    install(cluster, "edl", "checkpoint.dir=s3://bucket/here")
    says(cluster, "Training")

    def goes_on() -> dict[str, str] | None:
        asked = asks(cluster, overrides.FAREWELL)
        failed = {"failed": "worker 0: No space left on device"}
        return {"stop": json.dumps({"id": asked.id, **failed})} if asked and asked != earlier else None

    stop = ("stop", "--checkpoint", "--release", "edl")
    late = await cluster.edl(*stop, "--timeout", "0.1s")
    assert late.code == 124 and "the job still runs after 0.1 s: Training" in late.out
    earlier = asks(cluster, overrides.FAREWELL)
    assert earlier is not None, "it still ends with a checkpoint"
    done, _ = await asyncio.gather(cluster.edl(*stop), answering(cluster, goes_on))
    assert done.code == 1 and "the job goes on: worker 0: No space left on device." in done.err
    assert "waiting for the checkpoint" in done.out
    assert asks(cluster, overrides.FAREWELL) is None, "the next master does not try it again"

    def ends() -> dict[str, str] | None:
        asked = asks(cluster, overrides.FAREWELL)
        return (
            {"phase": "Stopped", "reason": "by edl stop"}
            if asked == overrides.Asked(RUN, asked.id if asked else "", True)
            else None
        )

    done, _ = await asyncio.gather(cluster.edl(*stop, "--force"), answering(cluster, ends))
    assert done.code == 0 and "the job has ended: Stopped, by edl stop\n" in done.out


@pytest.mark.parametrize("told", [True, False], ids=["with a status", "without a status yet"])
async def test_stop_writes_the_state_first_if_the_release_has_a_place_for_it(
    cluster: Cluster, told: bool
) -> None:
    install(cluster, "edl", "checkpoint.dir=s3://bucket/here")
    trained = {"kind": "train", "step": 7, "steps": 9}
    status = {"phase": "Training", "records": {}, "task": trained, "checkpoint": {"step": 0}}
    says(cluster, "Training", **({"status.json": json.dumps(status)} if told else {}))

    def ends() -> dict[str, str] | None:
        asked = asks(cluster, overrides.FAREWELL)
        forced = asked is not None and (asked.run, asked.force) == (RUN, True)
        return {"phase": "Stopped", "reason": "its state is in a checkpoint"} if forced else None

    stop = ("stop", "--release", "edl")
    done, _ = await asyncio.gather(cluster.edl(*stop), answering(cluster, ends))
    first, last = done.out.splitlines()[:2]
    assert first.startswith("writing the state to s3://bucket/here first; `edl stop --discard`")
    assert (done.code, last) == (0, "the job has ended: Stopped, its state is in a checkpoint")
    assert overrides.STOP not in data(cluster), "which ends the job at once"
    assert (await cluster.edl(*stop)).out.splitlines()[0] == last, "of a job that has ended already"


async def test_stop_without_a_checkpoint_is_refused_with_what_is_lost_unless_it_is_discarded(
    cluster: Cluster,
) -> None:
    trained = {"kind": "train", "step": 7, "steps": 9}
    status = {"phase": "Training", "records": {}, "task": trained, "checkpoint": None}
    says(cluster, "Training", **{"status.json": json.dumps(status)})
    refused = await cluster.edl("stop", "--release", "edl")
    assert refused.code == 2 and "its 7 trained steps of 9 would be lost; add --discard" in refused.err
    assert cluster.count()["patch", "configmaps"] == 0

    def stopped() -> dict[str, str] | None:
        return {"phase": "Stopped"} if data(cluster).get(overrides.STOP) == RUN else None

    stop = ("stop", "--discard", "--release", "edl")
    done, _ = await asyncio.gather(cluster.edl(*stop), answering(cluster, stopped))
    assert done.code == 0 and asks(cluster, overrides.FAREWELL) is None


async def test_a_checkpoint_is_asked_of_a_release(cluster: Cluster) -> None:
    says(cluster, "Training")
    none = await cluster.edl("checkpoint", "create", "--release", "edl")
    assert none.code == 1 and "its checkpoint.dir is empty" in none.err
    install(cluster, "edl", "checkpoint.dir=s3://bucket/here")
    says(cluster, "Training")

    def written() -> dict[str, str] | None:
        asked = asks(cluster, overrides.CHECKPOINT)
        return {"checkpointStep": "1200"} if asked is not None and asked.run == RUN else None

    done, _ = await asyncio.gather(
        cluster.edl("checkpoint", "create", "--release", "edl"), answering(cluster, written)
    )
    assert (done.code, done.out) == (0, "the checkpoint of step 1,200 is in s3://bucket/here\n")


async def test_a_run_that_has_not_begun_cannot_be_stopped(cluster: Cluster) -> None:
    done = await cluster.edl("stop", "--release", "edl")
    assert done.code == 1
    assert "the job has not started a run yet" in done.err
    assert f"to remove it: helm uninstall edl -n {NAMESPACE}" in done.err


# --- what is wrong


async def test_no_such_release_names_those_that_are_there(cluster: Cluster) -> None:
    install(cluster, "digits", full="digits-edl")
    done = await cluster.edl("status", "--release", "vision")
    assert done.code == 1
    assert (
        done.err
        == f"edl: release vision not found in namespace {NAMESPACE}; edl releases there: digits, edl\n"
    )
    assert (await cluster.edl("status", "--release", "digits")).code == 0
    assert (await cluster.edl("status", "--release", "digits-edl")).code == 0


async def test_a_release_of_several_jobs_needs_the_name_of_one(cluster: Cluster) -> None:
    install(cluster, "team", full="team-day")
    install(cluster, "team", full="team-night")
    done = await cluster.edl("status", "--release", "team")
    assert done.code == 1
    assert "has several jobs; use --release team-day or --release team-night" in done.err
    assert (await cluster.edl("status", "--release", "team-night")).code == 0
    listed = json.loads((await cluster.edl("list", "-o", "json", "-A")).out)["items"]
    assert [row["release"] for row in listed] == ["edl", "team-day", "team-night"]


async def test_a_right_that_lacks_is_named(cluster: Cluster) -> None:
    why = 'pods is forbidden: User "jane" cannot list resource "pods"'
    cluster.refuse("list", "pods", 403, "Forbidden", why)
    done = await cluster.edl("status", "--release", "edl")
    assert done.code == 1
    expected = f"permission denied by Kubernetes: {why} (docs/access.md lists the rights needed)"
    assert done.err == f"edl: {expected}\n"


async def test_a_right_to_watch_that_lacks_ends_the_waiting(cluster: Cluster) -> None:
    says(cluster, "Training")
    cluster.refuse("watch", "configmaps", 403, "Forbidden", "no watching", times=99)
    done = await cluster.edl("wait", "--release", "edl")
    assert done.code == 1
    assert "permission denied by Kubernetes: no watching" in done.err


async def test_a_token_that_is_not_known_is_told(cluster: Cluster) -> None:
    cluster.refuse("list", "configmaps", 401, "Unauthorized", "Unauthorized")
    done = await cluster.edl("status", "--release", "edl")
    assert (done.code, done.err) == (
        1,
        f"edl: the Kubernetes API at {cluster.url} does not accept the credentials: Unauthorized\n",
    )


async def test_an_api_out_of_reach_is_named(cluster: Cluster) -> None:
    await cluster.down()
    done = await cluster.edl("stop", "--release", "edl")
    assert done.code == 1
    assert f"the Kubernetes API at {cluster.url} is unavailable: " in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kubeconfig", "nowhere"], "kubeconfig not found: nowhere"),
        (["--kubeconfig", "broken"], "broken: not a kubeconfig"),
        (["--context", "there"], "unknown context there (known contexts: here)"),
        (["DIR"], "--release and DIR are mutually exclusive (--release edl, DIR DIR)"),
    ],
)
async def test_a_wrong_kubeconfig_is_told_before_anything_is_asked(
    cluster: Cluster, words: list[str], told: str
) -> None:
    (cluster.folder / "broken").write_text("just words")
    done = await cluster.edl("status", "--release", "edl", *words)
    assert done.code == 2
    assert told in done.err
    assert done.err.count("\n") == 1
    assert cluster.requests == []


async def test_options_of_a_cluster_need_a_release(cluster: Cluster) -> None:
    done = await cluster.edl("status", "--namespace", "team")
    assert (done.code, done.err) == (2, "edl: --namespace: only valid with --release\n")


async def test_a_real_master_does_what_is_asked(cluster: Cluster) -> None:
    job = cluster.objects["configmaps"]["edl-job"]
    pod_of_a_worker = yaml.safe_dump({"spec": {"containers": [{"name": "worker"}], "volumes": []}})
    cluster.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": pod_of_a_worker}})
    cluster.put("leases", {"metadata": {"name": "edl-master"}})

    async def workers(number: int) -> None:
        async with asyncio.timeout(SECONDS):
            while sum("worker" in name for name in cluster.objects["pods"]) != number:
                await asyncio.sleep(0.01)

    environment = {"KUBECONFIG": str(cluster.folder / "kubeconfig")}
    with master.master(cluster.folder / "master", NAMESPACE, environment, "edl-master"):
        await workers(4)
        assert (await cluster.edl("wait", "--for", "starting", "--release", "edl")).code == 0
        scaled = await cluster.edl("scale", 5, "--release", "edl")
        assert (scaled.code, scaled.out) == (0, "workers 4 -> 5\n"), scaled.err
        await workers(5)
        told = (await cluster.edl("status", "--release", "edl")).out
        assert told.startswith(("digits: Starting, ", "digits: Starting\n"))
        assert "edl scale: 5 workers in place of the chart's 4\n" in told
        assert "Scaled: workers 4 -> 5" in told
        stopped = await cluster.edl("stop", "--release", "edl")
        assert (stopped.code, stopped.out.partition("\n")[0]) in (
            (0, "the job is ending"),
            (0, "the job has ended: Stopped, stopped by edl stop"),
        )
        done = await cluster.edl("wait", "--release", "edl")
        assert (done.code, done.out) == (1, "Stopped: stopped by edl stop\n")
        told = (await cluster.edl("status", "--release", "edl")).out
        assert told.startswith("Stopped after ")
