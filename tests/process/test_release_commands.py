"""`edl status`, `logs`, `wait`, `scale` and `stop` of a release, against a server with Kubernetes' protocol.

The commands are real processes with a real kubeconfig. What a chart and a master would have made is put there
by hand; what they make of what the commands ask is the business of test_kubernetes_pods and of tests/cluster.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.contract import artifacts
from edl.contract.tokens import for_reading
from edl.kubernetes import overrides
from tests import kubernetes_master
from tests.fakes.kubernetes_api import NAMESPACE, KubernetesApi, Object
from tests.kubernetes_driver import job_values

pytestmark = pytest.mark.waits

EDL = str(Path(sys.executable).with_name("edl"))
SECONDS = 60.0
RUN = "run-1"


def labels(release: str, component: str) -> dict[str, str]:
    keys = {"name": "edl", "part-of": "edl", "instance": release, "component": component}
    return {f"app.kubernetes.io/{key}": value for key, value in keys.items()}


def install(server: KubernetesApi, release: str = "edl", *sets: str, full: str = "") -> None:
    """What `helm install` leaves, as far as the commands read it."""
    full = full or release
    volume = {"name": "output", "persistentVolumeClaim": {"claimName": "models"}}
    data = {
        "values.json": json.dumps(job_values("workers=4", *sets)),
        "worker.yaml": yaml.safe_dump({"spec": {"volumes": [volume]}}),
    }
    for name, more in ((f"{full}-job", {"data": data}), (f"{full}-status", {})):
        server.put("configmaps", {"metadata": {"name": name, "labels": labels(release, "job")}, **more})


def says(server: KubernetesApi, phase: str, **more: str) -> None:
    """The master writes its status."""
    status = server.objects["configmaps"]["edl-status"]
    state = json.dumps({"runId": RUN, "nextId": 4})
    told = {"phase": phase, "reason": "because", "workers": "4", "state": state, **more}
    server.put("configmaps", {**status, "data": {**(status.get("data") or {}), **told}})


def data(server: KubernetesApi) -> dict[str, str]:
    """Of the job's ConfigMap."""
    return dict(server.objects["configmaps"]["edl-job"]["data"])


def pod(
    server: KubernetesApi, component: str, number: int | None = None, runs: bool = True, **more: str
) -> str:
    """A pod, which runs."""
    name = f"edl-{component}" + ("" if number is None else f"-{number}")
    mine = labels("edl", component) | {f"edl.dev/{key}": value for key, value in more.items()}
    if number is not None:
        mine |= {"edl.dev/worker-id": str(number), "edl.dev/run-id": RUN}
    server.put("pods", {
        "metadata": {"name": name, "labels": mine}, "spec": {"nodeName": "n1"},
        "status": {"phase": "Pending"},
    })  # fmt: skip
    if runs:
        server.run_pod(name)
    return name


@dataclass
class Done:
    code: int
    out: str
    err: str


class Running:
    """A command that has started."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def line(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), SECONDS)).decode()

    async def complains(self, words: str) -> None:
        """Until it says so, as an error."""
        assert self._process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while words not in (line := (await self._process.stderr.readline()).decode()):
                assert line, "it has ended"

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Read no more of it."""
        assert self._process.stdout is not None
        self._process.stdout._transport.close()  # type: ignore[attr-defined]

    async def end(self) -> Done:
        out, err = await asyncio.wait_for(self._process.communicate(), SECONDS)
        assert "Traceback" not in err.decode()
        return Done(self._process.returncode or 0, out.decode(), err.decode())


class Cluster(KubernetesApi):
    """The server, and the command line with a kubeconfig for it."""

    folder: Path

    async def start(self, *words: object) -> Running:
        environment = {**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}
        return Running(
            await asyncio.create_subprocess_exec(
                EDL, *map(str, words), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment, cwd=self.folder,
            )
        )  # fmt: skip

    async def edl(self, *words: object) -> Done:
        return await (await self.start(*words)).end()

    async def asked(self, verb: str, resource: str, times: int = 1) -> None:
        """Until so many of these requests have come."""
        async with asyncio.timeout(SECONDS):
            while self.count()[verb, resource] < times:
                await asyncio.sleep(0.01)


def kubeconfig(url: str, **more: Any) -> Object:
    return {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "here", **more,
    }  # fmt: skip


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    server = Cluster(0.2)
    server.folder = tmp_path
    await server.up()
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(server.url)))
    install(server)
    pod(server, "master")
    try:
        yield server
    finally:
        await server.close()


# --- status


TOLD = {
    "model": "digits", "phase": "Training", "reason": "ring 1: 2 ready", "rate": 3899.0, "eta_seconds": 13.0,
    "loss": 0.5, "records": {"size": 20000, "total": 80000, "applied": 29152},
    "task": {"kind": "train", "epoch": 2, "epochs": 4, "step": 911, "steps": 2500},
    "workers": [
        {"id": 0, "handle": "edl-worker-0", "rank": 0, "state": "member", "step": 913, "rate": 1404.0,
         "memory": 330301440},
        {"id": 3, "handle": "", "rank": None, "state": "pending", "step": 0, "rate": 0.0, "memory": 0,
         "delay": "exceeded quota: small"},
    ],
}  # fmt: skip


async def test_status_tells_of_the_job_its_workers_and_what_has_happened(cluster: Cluster) -> None:
    says(cluster, "Training", reason="ring 1: 2 ready", **{"status.json": json.dumps(TOLD)})
    pod(cluster, "worker", 0, rank="0", state="member")
    waiting = pod(cluster, "worker", 1, state="starting")
    cluster.hold_pod(waiting, "Unschedulable", "0/2 nodes are available")
    ended = pod(cluster, "worker", 2, state="gone")
    cluster.end_pod(ended, 0)
    cluster.put("events", {
        "metadata": {"name": "e"}, "involvedObject": {"name": "edl-job"}, "reason": "RingReshaped",
        "message": "ring 0 -> 2 in 0.11 s", "lastTimestamp": "2026-01-01T00:00:00Z",
    })  # fmt: skip
    done = await cluster.edl("status", "--release", "edl")
    assert done.code == 0, done.err
    assert "digits: Training, ring 1: 2 ready\n" in done.out
    assert "step 911 of 2,500, 3,899 records/s, ETA 13 s" in done.out
    assert re.search(r"0 +edl-worker-0 +0 +member +913 +1,404 +315 MiB +n1", done.out), done.out
    assert "worker 1 is pending: no node has room for it: 0/2 nodes are available" in done.out
    assert "worker 3 is pending: exceeded quota: small" in done.out
    assert "edl-worker-2" not in done.out
    assert "ago  RingReshaped: ring 0 -> 2 in 0.11 s" in done.out
    told = json.loads((await cluster.edl("status", "--release", "edl", "--json")).out)
    assert [(w["id"], w["rank"], w["node"]) for w in told["workers"]] == [
        (0, 0, "n1"), (1, None, "n1"), (3, None, ""),
    ]  # fmt: skip
    assert told["records"]["applied"] == 29152


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
        cluster.put("events", {
            "metadata": {"name": f"of-{name}"}, "involvedObject": {"name": name}, "type": "Warning",
            "reason": reason, "message": message, "lastTimestamp": "2026-01-01T00:00:00Z",
        })  # fmt: skip

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
        "phase": "Succeeded", "reason": "every record", "traceback": "", "seconds": 12.0, "step": 7,
        "loss": 0.1,
        "records": {"size": 100, "applied": 100, "skipped": 0, "bad": 0},
        "task": {"kind": "train", "epochs": 1, "epochs_done": 1, "steps": 4, "steps_done": 4, "skipped": []},
        "metrics": {"accuracy": 0.97},
        "goodput_seconds": {"useful": 9.0}, "generations": [], "state_losses": 0,
    }  # fmt: skip
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


# --- logs


async def test_logs_of_master_and_workers_with_their_names(cluster: Cluster) -> None:
    says(cluster, "Training")
    for name in (pod(cluster, "worker", 10), pod(cluster, "worker", 2), "edl-master"):
        for n in range(3):
            cluster.say(name, f"line {n}")
    waiting = pod(cluster, "worker", 11, runs=False)
    cluster.hold_pod(waiting, "Unschedulable", "0/2 nodes are available")
    done = await cluster.edl("logs", "--release", "edl", "--tail", 1)
    assert done.out.splitlines() == ["edl-master: line 2", "edl-worker-2: line 2", "edl-worker-10: line 2"]
    assert "edl-worker-11 has no log yet: no node has room for it" in done.err
    done = await cluster.edl("logs", "worker-2", "--release", "edl")
    assert done.out.splitlines() == [f"edl-worker-2: line {n}" for n in range(3)]
    done = await cluster.edl("logs", "worker-7", "--release", "edl")
    assert (done.code, done.err) == (1, "edl: release edl: no pod of worker-7 found\n")


async def test_followed_logs_survive_pods_that_come_and_go_and_streams_that_break(cluster: Cluster) -> None:
    says(cluster, "Training")
    first = pod(cluster, "worker", 0)
    cluster.say(first, "hello")
    following = await cluster.start("logs", "--follow", "--release", "edl")
    assert await following.line() == "edl-worker-0: hello\n"
    cluster.cut()  # every watch and every log, in the middle of it
    cluster.say(first, "still here")
    assert await following.line() == "edl-worker-0: still here\n"
    cluster.drop("pods", first)
    second = pod(cluster, "worker", 1)
    cluster.say(second, "I am new")
    assert await following.line() == "edl-worker-1: I am new\n"
    cluster.say(second, "good bye")
    # The kubelet does not give the log of a container that ends at this moment.
    cluster.refuse("log", "pods", status=400, reason="BadRequest", times=2)
    says(cluster, "Succeeded")
    done = await following.end()
    assert (done.code, done.out, done.err) == (0, "edl-worker-1: good bye\n", "")


async def test_what_is_missing_at_the_end_of_a_followed_log_is_told(cluster: Cluster) -> None:
    says(cluster, "Training")
    cluster.say(pod(cluster, "worker", 0), "hello")
    following = await cluster.start("logs", "--follow", "--release", "edl")
    assert await following.line() == "edl-worker-0: hello\n"
    cluster.refuse("log", "pods", status=400, reason="BadRequest", times=100)
    says(cluster, "Succeeded")
    done = await following.end()
    assert done.code == 0
    assert "edl: the end of the log of edl-worker-0 cannot be read: " in done.err


async def test_it_ends_when_nobody_reads_any_more(cluster: Cluster) -> None:
    says(cluster, "Training")
    following = await cluster.start("logs", "master", "--follow", "--release", "edl")
    await cluster.asked("log", "pods")
    following.close()
    cluster.say("edl-master", "hello")
    assert (await following.end()).code == 1


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
        (0, "workers: cannot scale a running job to 0: only workers hold the state"),
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
    assert (late.code, late.err) == (1, "edl: release edl: the job has ended: Stopped\n")


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
        return {"stop": json.dumps({"id": asked.id, **failed})} if asked and not asked.force else None

    stop = ("stop", "--checkpoint", "--release", "edl")
    done, _ = await asyncio.gather(cluster.edl(*stop), answering(cluster, goes_on))
    assert done.code == 1 and "the job goes on: worker 0: No space left on device." in done.err
    assert "waiting for the checkpoint" in done.out
    assert asks(cluster, overrides.FAREWELL) is None, "the next master does not try it again"

    def ends() -> dict[str, str] | None:
        asked = asks(cluster, overrides.FAREWELL)
        return {"phase": "Stopped", "reason": "by edl stop"} if asked == overrides.Asked(
            RUN, asked.id if asked else "", True
        ) else None  # fmt: skip

    done, _ = await asyncio.gather(cluster.edl(*stop, "--force"), answering(cluster, ends))
    assert done.code == 0 and "the job has ended: Stopped, by edl stop\n" in done.out


async def test_a_checkpoint_is_asked_of_a_release(cluster: Cluster) -> None:
    says(cluster, "Training")
    none = await cluster.edl("checkpoint", "--release", "edl")
    assert none.code == 1 and "its checkpoint.dir is empty" in none.err
    install(cluster, "edl", "checkpoint.dir=s3://bucket/here")
    says(cluster, "Training")

    def written() -> dict[str, str] | None:
        asked = asks(cluster, overrides.CHECKPOINT)
        return {"checkpointStep": "1200"} if asked is not None and asked.run == RUN else None

    done, _ = await asyncio.gather(cluster.edl("checkpoint", "--release", "edl"), answering(cluster, written))
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


async def test_a_right_that_lacks_is_named(cluster: Cluster) -> None:
    why = 'pods is forbidden: User "jane" cannot list resource "pods"'
    cluster.refuse("list", "pods", 403, "Forbidden", why)
    done = await cluster.edl("status", "--release", "edl")
    assert done.code == 1
    expected = f"permission denied by Kubernetes: {why} (docs/kubernetes.md lists the rights needed)"
    assert done.err == f"edl: {expected}\n"


@pytest.mark.parametrize("command", ["wait", "logs --follow"])
async def test_a_right_to_watch_that_lacks_ends_the_waiting(cluster: Cluster, command: str) -> None:
    says(cluster, "Training")
    cluster.refuse("watch", "configmaps", 403, "Forbidden", "no watching", times=99)
    done = await cluster.edl(*command.split(), "--release", "edl")
    assert done.code == 1
    assert "permission denied by Kubernetes: no watching" in done.err


async def test_a_token_that_is_not_known_is_told(cluster: Cluster) -> None:
    cluster.refuse("list", "configmaps", 401, "Unauthorized", "Unauthorized")
    done = await cluster.edl("status", "--release", "edl")
    assert (done.code, done.err) == (
        1, f"edl: the Kubernetes API at {cluster.url} does not accept the credentials: Unauthorized\n",
    )  # fmt: skip


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


# --- with a real master


# --- model get


def keep(server: Cluster, files: dict[str, bytes]) -> None:
    """The output volume holds these, and the list of them; the job has ended."""
    pod = {
        "spec": {
            "containers": [{"name": "worker", "image": "edl-worker", "env": [{"name": "A", "value": "b"}]}],
            "volumes": [{"name": "output", "persistentVolumeClaim": {"claimName": "models"}}],
            "nodeSelector": {"disk": "fast"}, "priorityClassName": "low",
        }
    }  # fmt: skip
    job = server.objects["configmaps"]["edl-job"]
    server.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": yaml.safe_dump(pod)}})
    formats = {
        name: {
            "format": name, "path": path, "verified": True,
            "files": {
                file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for file, data in files.items() if file.partition("/")[0] == path
            },
        }
        for name, path in artifacts.FORMATS.items() if any(file.startswith(path) for file in files)
    }  # fmt: skip
    listed = json.dumps({"exports": list(formats.values())}).encode()
    for file, data in {**files, artifacts.EXPORTS: listed}.items():
        server.files[f"/var/lib/edl/{file}"] = data
    says(server, "Succeeded")


async def test_the_trained_model_is_fetched_from_the_claim_by_a_pod_that_has_nothing_else(
    cluster: Cluster,
) -> None:
    refused = await cluster.edl("model", "get", "--release", "edl")
    assert "the job has not ended" in refused.err
    files = {"model.keras": os.urandom(1 << 20), "model.savedmodel/a": b"", "model.savedmodel/b/c": b"12"}
    keep(cluster, files)
    done = await cluster.edl("model", "get", "--release", "edl", "mine.keras")
    assert (done.code, done.out) == (0, "mine.keras: 1,048,576 bytes, as they were written (SHA-256)\n"), (
        done.err
    )
    assert (cluster.folder / "mine.keras").read_bytes() == files["model.keras"]
    done = await cluster.edl("model", "get", "--release", "edl", "--format", "savedmodel", "served")
    assert "2 bytes in 2 files" in done.out, done.err
    assert (cluster.folder / "served" / "b" / "c").read_bytes() == b"12"

    made = [thing for _, kind, change, thing in cluster.history if (kind, change) == ("pods", "ADDED")][-1]
    assert made["metadata"]["labels"]["app.kubernetes.io/component"] == "model"
    assert made["metadata"]["ownerReferences"][0]["name"] == "edl-job"
    (container,) = made["spec"]["containers"]
    assert (container["image"], "env" in container) == ("edl-worker", False)
    assert container["volumeMounts"] == [{"name": "output", "mountPath": "/var/lib/edl", "readOnly": True}]
    assert (made["spec"]["nodeSelector"], "priorityClassName" in made["spec"]) == ({"disk": "fast"}, False)
    assert list(cluster.objects["pods"]) == ["edl-master"], "the pod is left"
    assert cluster.count()["create", "pods"] == 2


async def test_the_token_for_reading_is_made_of_the_one_that_the_workers_have(cluster: Cluster) -> None:
    source = {"secretKeyRef": {"name": "given", "key": "password"}}
    container = {"name": "worker", "env": [{"name": "EDL_TOKEN", "valueFrom": source}]}
    job = cluster.objects["configmaps"]["edl-job"]
    text = yaml.safe_dump({"spec": {"containers": [container]}})
    cluster.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": text}})
    lacking = await cluster.edl("token", "--read", "--release", "edl")
    assert lacking.code == 1 and 'secrets "given" not found' in lacking.err
    secret = {"metadata": {"name": "given"}, "data": {"password": base64.b64encode(b"token").decode()}}
    cluster.put("secrets", secret)
    done = await cluster.edl("token", "--read", "--release", "edl")
    assert (done.code, done.out) == (0, f"{for_reading('token')}\n"), done.err
    cluster.put("secrets", {**secret, "data": {"token": "eA=="}})
    other = await cluster.edl("token", "--read", "--release", "edl")
    assert other.code == 1 and "secret given: its key 'password' holds no token" in other.err


async def test_a_model_that_does_not_arrive_as_it_was_written_is_not_there(cluster: Cluster) -> None:
    keep(cluster, {"model.keras": os.urandom(1 << 20)})
    whole = cluster.files["/var/lib/edl/model.keras"]
    get = ("model", "get", "--release", "edl")
    cluster.files["/var/lib/edl/model.keras"] = whole[:-1]
    assert "1,048,575 bytes have arrived, 1,048,576 were written" in (await cluster.edl(*get)).err
    cluster.files["/var/lib/edl/model.keras"] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert "what has arrived is not what was written" in (await cluster.edl(*get)).err
    cluster.broken_after = 1
    assert "the connection broke" in (await cluster.edl(*get)).err
    cluster.broken_after = 0
    del cluster.files["/var/lib/edl/model.keras"]
    assert "No such file or directory" in (await cluster.edl(*get)).err
    assert "was not written as onnx (there is: keras)" in (await cluster.edl(*get, "--format", "onnx")).err
    cluster.refuse("exec", "pods", 403, "Forbidden", "pods is forbidden: cannot create pods/exec")
    done = await cluster.edl(*get)
    assert (done.code, "cannot create pods/exec" in done.err) == (1, True)
    assert sorted(p.name for p in cluster.folder.iterdir() if "model" in p.name) == []
    assert list(cluster.objects["pods"]) == ["edl-master"], "a pod is left"


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
    with kubernetes_master.master(cluster.folder / "master", NAMESPACE, environment, "edl-master"):
        await workers(4)
        assert (await cluster.edl("wait", "--for", "starting", "--release", "edl")).code == 0
        scaled = await cluster.edl("scale", 5, "--release", "edl")
        assert (scaled.code, scaled.out) == (0, "workers 4 -> 5\n"), scaled.err
        await workers(5)
        told = (await cluster.edl("status", "--release", "edl")).out
        assert told.startswith("digits: Starting, ")
        assert "edl scale: 5 workers in place of the chart's 4\n" in told
        assert "Scaled: workers 4 -> 5" in told
        stopped = await cluster.edl("stop", "--release", "edl")
        assert (stopped.code, stopped.out.partition("\n")[0]) in (
            (0, "the job is ending"), (0, "the job has ended: Stopped, stopped by edl stop"),
        )  # fmt: skip
        done = await cluster.edl("wait", "--release", "edl")
        assert (done.code, done.out) == (1, "Stopped: stopped by edl stop\n")
        told = (await cluster.edl("status", "--release", "edl")).out
        assert told.startswith("Stopped after ")
