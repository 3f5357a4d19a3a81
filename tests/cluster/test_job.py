# SPDX-License-Identifier: Apache-2.0
"""The job on a real cluster: what docs/kubernetes.md shows, with the same commands.

Also what docs/access.md says of access to it, and docs/lost-workers.md of a drain.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from edl.contract import artifacts
from edl.contract.proto import edl_pb2
from edl.contract.reasons import Reason
from edl.errors import MasterUnavailable
from edl.net.master_client import Client
from tests.cluster.cluster import Namespace, Nodes, Object
from tests.cluster.release import WORKERS, Release, in_ring, on
from tests.support.kubernetes.certificates import Authority

pytestmark = pytest.mark.timeout(600)
METHODS = edl_pb2.DESCRIPTOR.services_by_name["Master"].methods
SECRET = "edl-master-tls"
LISTENING = "0A"  # in /proc/net/tcp


def prepare(namespace: Namespace, folder: Path) -> dict[str, str]:
    """A certificate as cert-manager would write it; the job's whole traffic with its master then is TLS."""
    files = certificate(namespace, Authority.new(folder / "authority"), folder / "certificate")
    namespace.kubectl("create", "secret", "generic", SECRET, *files)
    more = {
        "admissionPolicy.enabled": "true",
        "worker.terminationGracePeriodSeconds": "30",  # in which the next master of a drained one starts
    }
    return {"tls.existingSecret": SECRET, **more}


def certificate(namespace: Namespace, authority: Authority, folder: Path) -> list[str]:
    """Flags for a Secret with a new certificate of the master."""
    made = authority.issue(folder, f"edl-master.{namespace.name}.svc")
    return [f"--from-file={file}" for file in sorted(made.iterdir())]


def test_a_start_asks_the_api_server_for_little_and_training_for_nothing(
    job: Release,
) -> None:
    """The first test of this job: nothing has happened to it but its start."""

    def asked(of: str = "") -> Counter[tuple[str, str]]:
        found = (kind_of(request) for request in job.namespace.requests("edl-master"))
        return Counter((verb, kind) for verb, kind in found if of in ("", kind))

    about_pods = asked("pods")
    about_pods.pop(("patch", "pods"), None)  # the labels, for people
    # For the workers and for the masters.
    assert about_pods == {("create", "pods"): 4, ("list", "pods"): 2, ("watch", "pods"): 2}
    maps = asked("configmaps")
    assert (maps["list", "configmaps"], maps["watch", "configmaps"], maps["get", "configmaps"]) == (1, 1, 1)
    rank = f"{WORKERS},edl.dev/rank"
    job.namespace.until("pods", lambda pods: len(pods) == 4, rank)  # the last of the labels is written
    before, progress = asked(), job.status["progress"]
    job.until(lambda d: int(d["progress"].strip("%")) >= int(progress.strip("%")) + 6)
    news = asked() - before
    assert news.keys() <= {("patch", "configmaps"), ("create", "events"), ("patch", "events")}, "no polling"


def kind_of(request: Object) -> tuple[str, str]:
    """Return the verb and the kind of resource of an audit event."""
    kind = re.search(r"/namespaces/[^/]+/(\w+)", request["requestURI"])
    return request["verb"], kind[1] if kind else request["requestURI"]


@contextmanager
def forwarded(namespace: Namespace, port: int) -> Iterator[str]:
    """host:port of this machine that leads to a port of the master."""
    command = ["kubectl", "-n", namespace.name, "port-forward", "deployment/edl-master", f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=namespace.cluster.env) as tunnel:
        try:
            assert tunnel.stdout is not None
            (address,) = re.findall(r"from (127\.0\.0\.1:\d+)", tunnel.stdout.readline())
            yield address
        finally:
            tunnel.kill()


@contextmanager
def calling(job: Release) -> Iterator[grpc.Channel]:
    """A channel to the master, from outside of the cluster."""
    data = job.namespace.get("secret", SECRET)["data"]
    credentials = grpc.ssl_channel_credentials(base64.b64decode(data["ca.crt"]))
    name = (("grpc.ssl_target_name_override", f"edl-master.{job.namespace.name}.svc"),)
    with (
        forwarded(job.namespace, 8500) as address,
        grpc.secure_channel(address, credentials, options=name) as channel,
    ):
        yield channel


def answer(channel: grpc.Channel, method: str, token: str | None) -> tuple[grpc.StatusCode, str]:
    """What a call with no message at all is answered, streams or not."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/edl.Master/{method}")
    try:
        list(call(iter([b""]), metadata=metadata, timeout=10))
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def test_a_call_without_the_token_is_refused(job: Release) -> None:
    assert {m.name for m in METHODS} >= {"Scale", "Stop", "Watch"}
    with calling(job) as channel:
        for method in METHODS:
            for token in (None, "", "wrong", "x" * 40):
                code, why = answer(channel, method.name, token)
                assert code == grpc.StatusCode.UNAUTHENTICATED, (method.name, token, code, why)
    # Nothing of it has reached the job: at its end it reports no stale message.


def test_who_does_not_speak_tls_is_told(job: Release) -> None:
    told = pytest.raises(MasterUnavailable, match="it speaks TLS: set EDL_TLS_CA")
    with forwarded(job.namespace, 8500) as address, told:
        Client(artifacts.Contact(address, "any", 0)).status()
    job.namespace.helm("test", "edl", seconds=120)  # which has ca.crt
    for worker in job.workers():
        assert job.namespace.kubectl("exec", worker, "--", "ls", "/etc/edl/tls").split() == ["ca.crt"]
    said = job.upgrade("--set", "tls.existingSecret=", ok=False)
    assert "tls.existingSecret: the job is Training with TLS" in said
    for name in ("fullnameOverride", "nameOverride"):
        said = job.upgrade("--set", f"{name}=other", ok=False)
        assert "the job edl is Training, and would be deleted with its workers" in said, name


def test_the_master_can_make_no_pod_but_its_workers(job: Release) -> None:
    namespace, worker = job.namespace, job.workers()[0]
    there = namespace.get("pod", worker)
    kept = ("labels", "annotations", "ownerReferences")
    meta = {key: there["metadata"][key] for key in kept}
    spec = {
        key: value
        for key, value in there["spec"].items()
        if key not in ("nodeName", "priority", "preemptionPolicy")
    }
    account = f"--as=system:serviceaccount:{namespace.name}:edl-master"

    def made(name: str = "edl-worker-999", named: Object | None = None, **more: Any) -> str:
        """What the API server says when the master's account makes such a pod."""
        named = {**meta, "name": name, "namespace": namespace.name, **(named or {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": {**spec, **more}}
        flags = ("--dry-run=server", account, "-f", "-")
        return namespace.kubectl("create", *flags, text=json.dumps(pod), ok=False)

    def container(**more: Any) -> list[Object]:
        return [{**spec["containers"][0], **more}]

    def mounting(**volume: Any) -> list[Object]:
        return [*spec["volumes"], {"name": "more", **volume}]

    assert "created" in made()
    theirs = {"valueFrom": {"secretKeyRef": {"name": SECRET, "key": "tls.key"}}}

    def secure(**more: Any) -> list[Object]:
        return container(securityContext={**spec["containers"][0].get("securityContext", {}), **more})

    def secured(**more: Any) -> Object:
        return {**spec.get("securityContext", {}), **more}

    owner, unconfined = meta["ownerReferences"][0], {"type": "Unconfined"}
    others, fields = "its own workers: edl-worker-N", "with the fields that"
    values, containers, volumes = (
        "the values that the release's have",
        "the containers, privileges",
        "the volumes that",
    )
    answers = [
        (others, made(name="other")),
        (others, made(named={"ownerReferences": []})),
        (others, made(named={"ownerReferences": [owner, {**owner, "name": "foreign", "uid": "1"}]})),
        ("the labels and annotations", made(named={"labels": {**meta["labels"], "app": "web"}})),
        ("the labels and annotations", made(named={"annotations": {"k8s.v1.cni.cncf.io/networks": "x"}})),
        ("the labels and annotations", made(named={"finalizers": ["example.org/never"]})),
        ("of the service account edl-worker", made(serviceAccountName="edl-master")),
        (fields, made(hostNetwork=True)),
        (fields, made(hostPID=True)),
        (fields, made(hostIPC=True)),
        (fields, made(shareProcessNamespace=True)),
        (fields, made(nodeName="n1")),
        (fields, made(hostUsers=False, containers=secure(procMount="Unmasked"))),
        (fields, made(imagePullSecrets=[{"name": SECRET}])),
        (fields, made(hostname="edl-master", subdomain="edl")),
        (fields, made(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["edl-master"]}])),
        (fields, made(initContainers=container(name="before"))),
        (values, made(priorityClassName="system-node-critical")),
        (values, made(restartPolicy="Always")),
        (values, made(automountServiceAccountToken=True)),
        (values, made(securityContext=secured(seccompProfile=unconfined))),
        (values, made(securityContext=secured(appArmorProfile=unconfined))),
        (values, made(securityContext=secured(seLinuxOptions={"type": "spc_t"}))),
        (values, made(securityContext=secured(sysctls=[{"name": "net.ipv4.ip_forward", "value": "1"}]))),
        (values, made(securityContext=secured(runAsUser=0, runAsNonRoot=False))),
        ("the tolerations that", made(tolerations=[{"operator": "Exists"}])),
        (containers, made(containers=[*spec["containers"], *container(name="beside")])),
        (containers, made(containers=container(ports=[{"containerPort": 80, "hostPort": 80}]))),
        (containers, made(containers=container(lifecycle={"postStart": {"exec": {"command": ["x"]}}}))),
        *(
            (containers, made(containers=secure(**more)))
            for more in (
                {"privileged": True, "allowPrivilegeEscalation": True},
                {"allowPrivilegeEscalation": True},
                {"runAsUser": 0},
                {"capabilities": {"add": ["SYS_ADMIN"]}},
                {"seccompProfile": unconfined},
            )
        ),
        (volumes, made(volumes=mounting(hostPath={"path": "/"}))),
        (volumes, made(volumes=mounting(secret={"secretName": "sh.helm.release.v1.edl.v1"}))),
        (volumes, made(volumes=mounting(secret={"secretName": SECRET}))),
        (volumes, made(volumes=mounting(projected={"sources": [{"secret": {"name": SECRET}}]}))),
        (volumes, made(volumes=mounting(nfs={"server": "a", "path": "/"}))),
        ("the Secrets and ConfigMaps", made(containers=container(env=[{"name": "KEY", **theirs}]))),
    ]
    for said, answer in answers:
        assert "ValidatingAdmissionPolicy" in answer and said in answer, (said, answer)
    other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
    namespace.apply({**other, "spec": {"containers": [{"name": "a", "image": "nowhere:1"}]}})
    for words in (
        ("delete", "pod", "other"),
        ("label", "pod", "other", "a=b"),
        ("delete", "pod", job.master()["metadata"]["name"]),
    ):
        assert "its own workers" in namespace.kubectl(*words, account, "--dry-run=server", ok=False)
    for pod, container_name in ((worker, "worker"), (job.master()["metadata"]["name"], "master")):
        namespace.kubectl("label", "pod", pod, "edl.dev/rank=9", "--overwrite", "--dry-run=server", account)
        assert "edl's labels" in namespace.kubectl("label", "pod", pod, "a=b", account, ok=False)
        image = ("set", "image", f"pod/{pod}", f"{container_name}=nowhere:1")
        assert "labels and annotations" in namespace.kubectl(*image, account, ok=False)


def listening(namespace: Namespace, pod: str) -> set[tuple[str, int]]:
    """(address, port) of each socket of the pod that takes connections; the address is "" if it is any."""
    found = set()
    for line in namespace.kubectl("exec", pod, "--", "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines():
        place, local, _, state = line.split()[:4]
        if not place.endswith(":") or state != LISTENING:
            continue  # a heading
        host, port = local.split(":")
        number = bytes.fromhex(host)[::-1] if len(host) == 8 else b""
        address = ".".join(map(str, number)) if any(number) else ""
        found.add((address, int(port, 16)))
    return found


def test_only_the_documented_ports_are_open(job: Release) -> None:
    master = job.master()["metadata"]["name"]
    assert {port for _, port in listening(job.namespace, master)} == {8500, 8501}
    for worker in job.workers():
        own = job.namespace.get("pod", worker)["status"]["podIP"]
        ring = listening(job.namespace, worker)
        assert {address for address, _ in ring} <= {own, "127.0.0.1"}, "the ring's, and an unreachable one"


def test_a_deleted_worker_is_replaced_by_the_next_one(job: Release) -> None:
    first, *others = job.workers()
    unused, before = 1 + max(map(number, job.workers())), len(job.reshaped())
    job.namespace.kubectl("delete", "pod", first, "--wait=false")
    wanted = {*others, f"edl-worker-{unused}"}
    job.namespace.until(
        "pods", lambda pods: {p["metadata"]["name"] for p in in_ring(pods)} == wanted, WORKERS
    )
    left = re.compile(r"ring 4 -> 3 in \d+\.\d+ s, \d+ records redone")
    job.namespace.until("events", lambda _: any(map(left.search, job.reshaped()[before:])))
    assert re.search(r"Loss -?\d", job.namespace.kubectl("logs", others[0]))


def number(worker: str) -> int:
    return int(worker.removeprefix("edl-worker-"))


def test_an_upgrade_changes_the_ring_and_restarts_nothing(job: Release) -> None:
    master, before = job.master(), job.reshaped()
    revision = json.loads(job.namespace.helm("status", "edl", "-o", "json"))["version"]
    job.upgrade(workers=2)
    job.ring_of(2)
    job.namespace.helm("test", "edl", seconds=120)
    job.upgrade(workers=6)
    job.ring_of(6)
    job.namespace.helm("rollback", "edl", revision + 1)
    job.ring_of(2)
    job.upgrade(workers=2, suspend="true")
    job.phase("Suspended")
    said = job.upgrade(workers=2, training__batchSize=64)
    assert "NOT APPLIED: training.batchSize. A run keeps" in said
    job.told("training.batchSize", reason=Reason.SpecRefused)
    job.ring_of(2)
    assert job.status["valuesApplied"] == "False", "the live value was applied, and the other one was not"
    job.upgrade(workers=4)
    job.ring_of(4)
    assert job.master()["metadata"]["uid"] == master["metadata"]["uid"]
    assert restarts(job.master()) == restarts(master)
    changes = job.reshaped()[len(before) :]
    assert changes
    assert all("0 records redone" in change for change in changes), changes


def test_the_node_of_the_master_and_of_some_workers_is_drained(
    job: Release, nodes: Nodes, request: pytest.FixtureRequest
) -> None:
    """The next master has the workers hand over, as it does however master and workers end together."""
    namespace, before = job.namespace, job.reshaped()
    node, takeovers = job.master()["spec"]["nodeName"], taken_over(namespace.get("events"))
    lost = on(namespace, node)
    assert lost
    request.addfinalizer(lambda: namespace.cluster.kubectl("uncordon", node))
    mine = "--pod-selector=app.kubernetes.io/instance=edl"
    namespace.cluster.kubectl("drain", node, "--force", "--delete-emptydir-data", mine, seconds=90)

    def replaced(pods: list[Object]) -> bool:
        return len({p["metadata"]["name"] for p in in_ring(pods)} - lost) == 4

    namespace.until("pods", replaced, WORKERS)
    assert on(namespace, node) == set()
    job.told("EvictionByEvictionAPI")
    assert taken_over(namespace.get("events")) > takeovers
    changes = job.reshaped()[len(before) :]
    assert changes
    assert all("0 records redone" in change for change in changes), "they left at a step boundary"


def test_the_master_is_killed_and_the_next_one_takes_over(job: Release) -> None:
    namespace = job.namespace
    workers = {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)}
    before = taken_over(namespace.get("events"))
    delete = ("delete", "pod", "--wait=false")
    kills: list[Callable[[Object], object]] = [
        lambda master: namespace.kubectl(*delete, master["metadata"]["name"]),
        lambda master: namespace.kubectl(*delete, master["metadata"]["name"], "--grace-period=0", "--force"),
        lambda master: os.kill(process(master, "edl.master"), signal.SIGKILL),
    ]
    for times, kill in enumerate(kills, before + 1):
        kill(job.master())
        namespace.until("events", lambda events, n=times: taken_over(events) >= n)  # type: ignore[misc]
    assert {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)} == workers


def restarts(pod: Object) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def process(pod: Object, module: str) -> int:
    """The process of this machine that runs a Python module as a pod's first one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            if (
                command[1:4] == ["-P", "-m", module]
                and pod["metadata"]["uid"] in (folder / "cgroup").read_text()
            ):
                inside = re.search(r"^NSpid:.*\s(\d+)$", (folder / "status").read_text(), re.MULTILINE)
                if inside is not None and inside[1] == "1":
                    return int(folder.name)
        except OSError:
            continue  # it has just ended
    raise AssertionError(f"no process of {pod['metadata']['name']} runs {module}")


def taken_over(events: list[Object]) -> int:
    """How often a new master took a ring over: it trains on, or is formed anew."""
    told = [e for e in events if e["reason"] in (Reason.FailedOver, Reason.RingReshaped)]
    return sum(e.get("count", 1) for e in told if "a new master took over" in e["message"])
