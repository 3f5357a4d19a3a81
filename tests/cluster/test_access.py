"""Who may talk to a job: what docs/access.md says, asked of a real one."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from edl.client import Client
from edl.contract import artifacts
from edl.contract.proto import edl_pb2
from edl.errors import MasterUnavailable
from tests.certificates import Authority
from tests.cluster.cluster import Namespace, Object
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(600)
SECRET = "edl-master-tls"
METHODS = edl_pb2.DESCRIPTOR.services_by_name["Master"].methods
LISTENING = "0A"  # in /proc/net/tcp


def prepare(namespace: Namespace, folder: Path) -> dict[str, str]:
    """A certificate as cert-manager would write it; the job's whole traffic with its master then is TLS."""
    files = certificate(namespace, Authority.new(folder / "authority"), folder / "certificate")
    namespace.kubectl("create", "secret", "generic", SECRET, *files)
    return {"tls.existingSecret": SECRET, "admissionPolicy.enabled": "true"}


def certificate(namespace: Namespace, authority: Authority, folder: Path) -> list[str]:
    """Flags for a Secret with a new certificate of the master."""
    made = authority.issue(folder, f"edl-master.{namespace.name}.svc")
    return [f"--from-file={file}" for file in sorted(made.iterdir())]


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


def answer(channel: grpc.Channel, method: str, token: str | None) -> tuple[grpc.StatusCode, str]:
    """What a call with no message at all is answered, streams or not."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    call = channel.stream_stream(f"/edl.Master/{method}")
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
    # Nothing of it has reached the job: at its end that is told of no stale message.


def test_who_does_not_speak_tls_is_told(job: Release) -> None:
    told = pytest.raises(MasterUnavailable, match="it speaks TLS: set EDL_TLS_CA")
    with forwarded(job.namespace, 8500) as address, told:
        Client(artifacts.Contact(address, "any", 0)).status()
    job.namespace.helm("test", "edl", seconds=120)  # which has ca.crt
    for worker in job.workers():
        assert job.namespace.kubectl("exec", worker, "--", "ls", "/etc/edl/tls").split() == ["ca.crt"]
    said = job.upgrade("--set", "tls.existingSecret=", ok=False)
    assert "tls.existingSecret: the job is Training with TLS" in said


def test_the_master_can_make_no_pod_but_its_workers(job: Release) -> None:
    namespace, worker = job.namespace, job.workers()[0]
    there = namespace.get("pod", worker)
    kept = ("labels", "annotations", "ownerReferences")
    meta = {key: there["metadata"][key] for key in kept}
    spec = {key: value for key, value in there["spec"].items() if key not in ("nodeName", "priority")}
    account = f"--as=system:serviceaccount:{namespace.name}:edl-master"

    def made(name: str = "edl-worker-999", owners: list[Object] | None = None, **more: Any) -> str:
        """What the API server says when the master's account makes such a pod."""
        named = {**meta, "name": name, "namespace": namespace.name}
        if owners is not None:
            named["ownerReferences"] = owners
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": {**spec, **more}}
        flags = ("--dry-run=server", account, "-f", "-")
        return namespace.kubectl("create", *flags, text=json.dumps(pod), ok=False)

    def container(**more: Any) -> list[Object]:
        return [{**spec["containers"][0], **more}]

    def mounting(**volume: Any) -> list[Object]:
        return [*spec["volumes"], {"name": "more", **volume}]

    assert "created" in made()
    theirs = {"valueFrom": {"secretKeyRef": {"name": SECRET, "key": "tls.key"}}}
    for said, answer in {
        "its own workers: edl-worker-N": made(name="other"),
        "owned by configmap edl-job": made(owners=[]),
        "of the service account edl-worker": made(serviceAccountName="edl-master"),
        "the host's namespaces and privileges": made(hostNetwork=True),
        "namespaces and privileges": made(containers=container(securityContext={"privileged": True})),
        "the volumes that": made(volumes=mounting(hostPath={"path": "/"})),
        "volumes that the release's have": made(
            volumes=mounting(secret={"secretName": "sh.helm.release.v1.edl.v1"})
        ),
        "create workers with the volumes": made(volumes=mounting(secret={"secretName": SECRET})),
        "with the volumes": made(volumes=mounting(projected={"sources": [{"secret": {"name": SECRET}}]})),
        "the Secrets and ConfigMaps": made(containers=container(env=[{"name": "KEY", **theirs}])),
    }.items():
        assert "ValidatingAdmissionPolicy" in answer, said
        assert said in answer
    other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
    namespace.apply({**other, "spec": {"containers": [{"name": "a", "image": "nowhere:1"}]}})
    for words in (
        ("delete", "pod", "other"),
        ("label", "pod", "other", "a=b"),
        ("delete", "pod", job.master()["metadata"]["name"]),
    ):
        assert "its own workers" in namespace.kubectl(*words, account, "--dry-run=server", ok=False)
    namespace.kubectl("label", "pod", worker, "a=b", account)
    image = ("set", "image", f"pod/{worker}", "worker=nowhere:1")
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
        assert {address for address, _ in ring} <= {own, "127.0.0.1"}, "the ring's, and what nobody can reach"
