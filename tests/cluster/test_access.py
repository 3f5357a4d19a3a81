"""Who may talk to a job: what docs/access.md says, asked of a real one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from edl.contract.proto import edl_pb2
from tests.cluster.cluster import Namespace
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(600)
METHODS = edl_pb2.DESCRIPTOR.services_by_name["Master"].methods
LISTENING = "0A"  # in /proc/net/tcp


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
    with forwarded(job.namespace, 8500) as address, grpc.insecure_channel(address) as channel:
        for method in METHODS:
            for token in (None, "", "wrong", "x" * 40):
                code, why = answer(channel, method.name, token)
                assert code == grpc.StatusCode.UNAUTHENTICATED, (method.name, token, code, why)
    # Nothing of it has reached the job: at its end that is told of no stale message.


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
