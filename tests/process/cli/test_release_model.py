# SPDX-License-Identifier: Apache-2.0
"""`edl model get` and `edl token` of a release, against a server of release_commands.py."""

from __future__ import annotations

import base64
import hashlib
import json
import os

import pytest
import yaml

from edl.contract import artifacts
from edl.contract.tokens import for_reading
from tests.support.kubernetes.release_commands import Cluster, install, says

pytestmark = pytest.mark.waits


def keep(server: Cluster, files: dict[str, bytes]) -> None:
    """The output volume holds these, and the list of them; the job has ended."""
    pod = {
        "spec": {
            "containers": [{"name": "worker", "image": "edl-worker", "env": [{"name": "A", "value": "b"}]}],
            "volumes": [{"name": "output", "persistentVolumeClaim": {"claimName": "models"}}],
            "nodeSelector": {"disk": "fast"},
            "priorityClassName": "low",
        }
    }
    job = server.objects["configmaps"]["edl-job"]
    server.put("configmaps", {**job, "data": {**job["data"], "worker.yaml": yaml.safe_dump(pod)}})
    formats = {
        name: {
            "format": name,
            "path": path,
            "verified": True,
            "files": {
                file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for file, data in files.items()
                if file.partition("/")[0] == path
            },
        }
        for name, path in artifacts.FORMATS.items()
        if any(file.startswith(path) for file in files)
    }
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
    container = {"name": "worker", "env": [{"name": "EDL_TOKEN_FILE", "value": "/etc/edl/token/password"}]}
    volumes = [{"name": "token", "secret": {"secretName": "given"}}]
    job = cluster.objects["configmaps"]["edl-job"]
    text = yaml.safe_dump({"spec": {"containers": [container], "volumes": volumes}})
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
    install(cluster, "edl", "mode=horovod,model.script=train.py")
    assert "release edl: the job runs a script, which saves its files itself" in (await cluster.edl(*get)).err
    assert sorted(p.name for p in cluster.folder.iterdir() if "model" in p.name) == []
    assert list(cluster.objects["pods"]) == ["edl-master"], "a pod is left"
