# SPDX-License-Identifier: Apache-2.0
"""The documents of ElasticDL, replayed with their own command lines: public cloud, on premises.

What the chart makes of the document for GKE is the subject of tests/unit/compat/test_elasticdl_flags.py.

Amounts of CPU and memory are smaller, and each command names the registry of edl's images. The module of the
zoo counts its records (tests/models/elasticdl/model_zoo/counting.py).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT, Cluster, Images, Namespace, Nodes, Object
from tests.cluster.release import CHART, WORKERS, Release, in_ring
from tests.cluster.test_commands import EDL, edl
from tests.support.checkpoints.s3 import Account, serving
from tests.support.elasticdl_documents import ON_PREM, PUBLIC_CLOUD, SPEC
from tests.support.jobs.evidence import saved_weights

pytestmark = pytest.mark.timeout(600)
MODEL = ROOT / "tests" / "models" / "elasticdl" / "model_zoo" / "counting.py"
RECORDS, HELD_OUT = 30_720, 64  # 120 steps of 4 x 64 in an epoch
SECRET = "store-account"


@dataclass(frozen=True)
class Zoo:
    """An image of a model zoo, built and pushed with the commands of the documents."""

    folder: Path  # that has `model_zoo`
    images: Images

    @property
    def image(self) -> str:
        # A node that has this tag does not pull again, so the tag changes with the model.
        return f"{self.images.registry}/project/elasticdl:{self.images.tag}-{crc32(MODEL.read_bytes()):x}"


@pytest.fixture(scope="module")
def zoo(cluster: Cluster, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    found = Zoo(tmp_path_factory.mktemp("code"), images)
    models = found.folder / "model_zoo"
    (module := models / "mnist_functional_api").mkdir(parents=True)
    shutil.copy(MODEL, module / "mnist_functional_api.py")
    elasticdl(cluster, f"zoo init --base_image=edl-worker:{images.tag}", models)
    elasticdl(cluster, f"zoo build --image={found.image} .", models)
    elasticdl(cluster, f"zoo push {found.image} --plain-http", models)
    return found


def elasticdl(cluster: Cluster, line: str, folder: Path) -> str:
    """Run a command line of ElasticDL in a folder; return what it prints."""
    words = ["env", "-C", folder, EDL, "elasticdl", *shlex.split(line)]
    return cluster.run(*words, seconds=300)


def train(zoo: Zoo, namespace: Namespace, document: str, *others: str) -> str:
    """Run `edl elasticdl train` with a document's flags, followed by others, which override them."""
    ours = [
        f"--namespace={namespace.name}",
        f"--image_name={zoo.image}",
        f"--chart={CHART}",
        f"--set image.registry={zoo.images.registry}",
        f"--set image.tag={zoo.images.tag}",
        "--set worker.terminationGracePeriodSeconds=10",
        "--set export.verify=false",
    ]
    return elasticdl(namespace.cluster, " ".join(["train", document, *ours, *others]), zoo.folder)


def write_data(folder: Path) -> Path:
    """Write the numbers of records as RecordIO below `folder`, where the documents have their data."""
    splits = {"train/data-00000": (0, RECORDS // 2), "train/data-00001": (RECORDS // 2, RECORDS)}
    for name, (start, stop) in {**splits, "test/data-00000": (0, HELD_OUT)}.items():
        texts = [str(number).encode() for number in range(start, stop)]
        body = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        head = struct.pack("<5I", 0x01020304, crc32(body), 0, len(body), len(texts))
        path = folder / "mnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(head + body)
    return folder


@pytest.fixture
def volume(claim: Callable[..., None], tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that creates a claim, and returns the folder of its volume."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(0o777)
        claim(name, folder, "ReadWriteMany")
        return folder

    return make


def nginx(namespace: Namespace, replicas: int) -> Object:
    """The Deployment of the document for public clouds."""
    amounts = {"cpu": "600m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
    container = {
        "name": "nginx",
        "image": namespace.cluster.busybox,
        "command": ["sleep", "3600"],
        "resources": {"limits": amounts, "requests": amounts},
    }
    pod = {
        "containers": [container],
        "priorityClassName": "high",
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 0,
    }
    labels = {"app": "nginx"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "test-nginx", "labels": labels},
        "spec": spec,
    }


def serves(namespace: Namespace, replicas: int) -> None:
    """Wait until so many pods of nginx are ready."""

    def ready(found: list[Object]) -> bool:
        return bool(found) and found[0]["status"].get("readyReplicas", 0) == replicas

    namespace.until("deployments", ready, "app=nginx")


def copy_to_the_volume(namespace: Namespace, data: Path) -> None:
    """Copy the data with the document's pod and `kubectl cp`."""
    claim = {"claimName": "fileserver-claim", "readOnly": False}
    container = {
        "name": "test-pod",
        "image": namespace.cluster.busybox,
        "command": ["sleep", "3600"],
        "volumeMounts": [{"mountPath": "/data", "name": "mypvc"}],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "mypvc", "persistentVolumeClaim": claim}],
        "terminationGracePeriodSeconds": 0,
    }
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "my-pod"}, "spec": spec})
    namespace.wait("pod/my-pod", "condition=Ready")
    namespace.kubectl("cp", data, "my-pod:/data")
    namespace.kubectl("delete", "pod", "my-pod")


@pytest.fixture
def store(nodes: Nodes) -> Iterator[Account]:
    """A store of checkpoints, on the machine of the nodes."""
    with serving(nodes.machine) as account:
        yield account


def keep(namespace: Namespace, account: Account) -> None:
    """Replace the Secret with the account of the store."""
    literals = [f"--from-literal={name}={text}" for name, text in account.variables.items()]
    namespace.kubectl("delete", "secret", SECRET, "--ignore-not-found")
    namespace.kubectl("create", "secret", "generic", SECRET, *literals)


def restored(job: Release, times: int) -> None:
    """Wait until the job has resumed that often from the store."""

    def so(events: list[Object]) -> bool:
        mine = (e for e in events if e["reason"] == Reason.Restored)
        return times <= sum(e.get("count", 1) for e in mine if "is restored from s3://" in e["message"])

    job.namespace.until("events", so)


def seconds(*steps: Callable[[], object]) -> float:
    """Measure the duration of some steps."""
    began = time.monotonic()
    for step in steps:
        step()
    return time.monotonic() - began


def run_id(job: Release) -> str:
    return str(json.loads(job.status["state"])["runId"])


def uids(job: Release) -> set[str]:
    return {p["metadata"]["uid"] for p in in_ring(job.namespace.get("pods", "-l", WORKERS))}


def counts(model: Path, epochs: int) -> str:
    """Describe what is wrong in the counts of the trained model; "" if each record counts once an epoch."""
    weights = saved_weights(model)
    [total] = [float(w[0, 0]) for w in weights if w.shape == (1, 1)]
    [rows] = [w for w in weights if w.ndim == 2 and w.shape[1] == 2]
    wrong = [] if np.isclose(total, RECORDS * epochs) else [f"the weight counts {total:g} records"]
    expected = np.where(np.arange(len(rows)) < RECORDS, epochs, 0)[:, None]
    # A third of a batch is not a power of two: the mean of its losses is rounded.
    if len(off := np.flatnonzero((np.abs(rows - expected) > 0.001).any(1))):
        wrong.append(f"record {off[0]} counts {rows[off[0]]}; {len(off)} are wrong")
    return "; ".join(wrong)


SMALLER = " ".join(
    [
        *(f"--{pod}_resource_request=cpu=50m,memory=128Mi" for pod in ("master", "ps")),
        *(f"--{pod}_resource_limit=cpu=2,memory=1024Mi" for pod in ("master", "ps", "worker")),
        "--worker_resource_request=cpu=600m,memory=512Mi",  # three fill a node, with a master or two servers
    ]
)


def test_the_public_cloud(
    zoo: Zoo,
    namespace: Namespace,
    volume: Callable[[str], Path],
    priority_classes: Callable[..., None],
    store: Account,
    tmp_path: Path,
) -> None:
    """Two servers and four workers. One worker is deleted; nginx preempts three, and later all of them.

    At last the release is uninstalled, and the next one continues from the store of checkpoints.
    """
    priority_classes(high=1_000_000, low=1000)
    data, output = volume("fileserver-claim"), volume("output")
    copy_to_the_volume(namespace, write_data(tmp_path / "written") / "mnist")
    keep(namespace, store)
    document = (
        f"{PUBLIC_CLOUD} {SMALLER} --checkpoint_dir={store.url} --set checkpoint.existingSecret={SECRET}"
        " --set checkpoint.seconds=2 --set output.existingClaim=output"
    )
    job = Release(namespace, {}, "test-mnist")
    first = seconds(lambda: train(zoo, namespace, document), lambda: job.ring_of(4))
    assert "1 edl.layers.Embedding: its rows are on 2 parameter servers" in log(job)

    worker = f"{job.full}-worker-0"
    assert worker in job.workers()
    namespace.kubectl("delete", "pod", worker)
    job.until(lambda _: f"{job.full}-worker-4" in job.workers())
    job.ring_of(4)

    namespace.apply(nginx(namespace, 5))
    serves(namespace, 5)
    job.ring_of(1)
    job.told("PreemptionByScheduler")
    waiting = job.until(lambda status: "waiting" in status)["waiting"]
    assert "no node has room" in waiting, waiting
    scale = ("scale", "deployment.v1.apps/test-nginx")
    back = seconds(lambda: namespace.kubectl(*scale, "--replicas=1"), lambda: job.ring_of(4))
    assert back <= 2 * first, "nothing starts but workers"
    assert "waiting" not in job.status
    assert not any(event.startswith(Reason.StateLost) for event in job.events())
    job.until(lambda status: status.get("progress", "0%") not in ("0%", ""))

    namespace.kubectl(*scale, "--replicas=6")
    serves(namespace, 6)
    status = job.until(lambda status: status.get("ringSize") == "0")
    assert status["phase"] == "Waiting", status
    assert "no node has room" in status["waiting"]
    assert job.workers() == []
    with pytest.raises(AssertionError, match="not so of configmaps"):  # it waits on
        job.until(lambda status: status.get("phase") != "Waiting", seconds=5)
    namespace.kubectl("delete", "deployment", "test-nginx")
    job.ring_of(4)
    restored(job, 1)
    assert json.loads(job.status["status.json"])["failures"] == 0, "preemption is not charged"

    first_run, before = run_id(job), uids(job)
    namespace.helm("uninstall", job.name)  # its pods exist for a while
    keep(namespace, store.forged)
    again = f"{document} --set checkpoint.resume=true"
    train(zoo, namespace, again)
    refused = job.phase("Failed")["reason"]
    assert f"{store.url}: cannot list the checkpoints: The request signature" in refused
    namespace.helm("uninstall", job.name)
    keep(namespace, store)
    train(zoo, namespace, again)
    job.ring_of(4)
    restored(job, 2)
    assert run_id(job) != first_run
    assert not before & uids(job)
    assert not any(event.startswith(Reason.FailedOver) for event in job.events())

    (data / "go").touch()
    summary = succeeded(job)
    assert "Evaluation at step 200 on 64 records" in log(job)
    assert "Loss" in namespace.kubectl("logs", f"{job.full}-worker-0")
    assert summary["failures"] == []
    # A leaving worker keeps its state to its end; when the others are gone, the job continues from it.
    assert summary["state_losses"] == 0
    [model] = output.rglob(artifacts.MODEL)  # in a folder of its run, if an earlier run left results
    assert counts(model, epochs=5) == ""


def succeeded(job: Release) -> dict[str, Any]:
    """Wait for the end of the job, which has trained all records; return its summary."""
    data = job.phase("Succeeded", "Failed", "Stopped", "Incomplete", seconds=300)
    assert data["phase"] == "Succeeded", data
    summary = job.summary()
    records = summary["records"]
    assert records["applied"] == summary["task"]["epochs"] * records["size"]
    assert len(set(summary["digests"].values())) == 1
    return summary


def log(job: Release) -> str:
    """The log of the master."""
    return job.namespace.kubectl("logs", f"deployment/{job.full}-master")


@pytest.fixture
def pool(nodes: Nodes, cluster: Cluster) -> Iterator[str]:
    """A taint of both nodes, which only the pods of the document's pool tolerate."""
    taint = "mycluster.com/app-pool=elasticdl:NoSchedule"
    cluster.kubectl("taint", "nodes", *nodes.names, taint)
    yield taint
    cluster.kubectl("taint", "nodes", *nodes.names, f"{taint}-")


POOL = {"key": "mycluster.com/app-pool", "value": "elasticdl", "effect": "NoSchedule"}
TOLERATION = {"operator": "Equal", **POOL}
SPEC_JSON = {
    "pod_spec": {"labels": {"my_app": "elasticdl"}, "tolerations": [TOLERATION]},
    "worker_pod_spec": {"env": [{"name": "POOL", "value": "elasticdl"}]},
    "service_spec": {"type": "ClusterIP", "clusterIP": "None"},
}


def test_on_premises(
    zoo: Zoo, namespace: Namespace, volume: Callable[[str], Path], pool: str, tmp_path: Path
) -> None:
    """The nodes accept only pods with what the cluster_spec adds, as Python and as JSON."""
    data = write_data(volume("data"))
    (zoo.folder / "spec.py").write_text(SPEC)
    document = (
        f"{ON_PREM} {SMALLER} --docker_image_prefix={zoo.images.registry}/user/"
        " --volume=mount_path=/data,claim_name=data"
    )
    said = train(zoo, namespace, document, "--dry-run")
    for command in ("build", "push"):  # the image's third command, `zoo init`, was the fixture's
        [line] = re.findall(rf"edl elasticdl (zoo {command} .*?)(?: &&|\n)", said)
        elasticdl(namespace.cluster, line + (" --plain-http" if command == "push" else ""), zoo.folder)
    train(zoo, namespace, document, "--cluster_spec=spec.py")
    spec_json = f"--cluster_spec_json={shlex.quote(json.dumps(SPEC_JSON))}"
    train(
        zoo, namespace, document, "--job_name=json --num_workers=1 --docker_image_prefix=", spec_json
    )  # with the fixture's image
    job, of_json = (Release(namespace, {}, name) for name in ("test-mnist", "json"))
    job.ring_of(2)
    of_json.ring_of(1)

    pods = namespace.get("pods", "-l", "my_app=elasticdl")
    assert sorted(p["metadata"]["labels"]["app.kubernetes.io/component"] for p in pods) == [
        *["master"] * 2,
        *["worker"] * 3,
    ]
    for pod in pods:
        assert TOLERATION in pod["spec"]["tolerations"]
        env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
        assert (env.get("POOL") == "elasticdl") == pod["metadata"]["name"].startswith("json-edl-worker")
    for each in (job, of_json):
        assert namespace.get("service", f"{each.full}-master")["spec"]["clusterIP"] == "None"

    (data / "go").touch()
    assert succeeded(job)["failures"] == []
    assert succeeded(of_json)["failures"] == []
    assert edl(job, "audit").startswith(f"exactly once: {RECORDS:,} records x 2 epochs")
