# SPDX-License-Identifier: Apache-2.0
"""A user's model reaches the workers, as the pages of docs/ show: in an image, from a volume, as one file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from tests.cluster.cluster import ROOT, Images, Namespace, Object
from tests.cluster.release import WORKERS, Release
from tests.cluster.test_commands import edl

pytestmark = pytest.mark.timeout(420)
RECORDS = 256
# Learns nothing, in two seconds. `size` stands in a file beside it, or in itself.
MODEL = """
import edl, keras, numpy
{size}

def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model

def data(split):
    if split != "train":
        return None
    return {data}
"""
IN_MEMORY = 'edl.arrays(numpy.ones((size, 4), "float32"), numpy.ones(size, "float32"))'
BESIDE, ALONE = "from sizes import size", f"size = {RECORDS}"


# An S3 server that checks credentials; the account goes to the log.
STORE = f"""
import json, os, threading
import fsspec
from tests.support.checkpoints.s3 import serving

with serving("0.0.0.0") as account:
    os.environ.update(account.variables)
    with fsspec.open(account.url + "/train.csv", "w") as file:
        file.write("a,b,c,d,y\\n" + "1.0,1.0,1.0,1.0,1.0\\n" * {RECORDS})
    print(json.dumps([account.url, account.variables]), flush=True)
    open("/tmp/ready", "w").close()
    threading.Event().wait()
"""


@pytest.fixture
def release(namespace: Namespace, images: Images) -> Release:
    return Release(namespace, {**images.values, "workers": "1", "training.epochs": "1"})


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that both nodes see, with a model of two files and its data."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 1:  # pytest makes them for its own user only
            folder.chmod(0o755)
    (tmp_path / "my_model.py").write_text(MODEL.format(size=BESIDE, data=IN_MEMORY))
    (tmp_path / "sizes.py").write_text(f"size = {RECORDS}\n")
    code = f"from numpy import *; x = ones(({RECORDS}, 4), 'f'); save('x.npy', x); save('y.npy', x[:, 0])"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    return tmp_path


def trained(job: Release) -> dict[str, Any]:
    """The job succeeds, with each record counted once; its summary."""
    data = job.phase("Succeeded", "Failed", "Stopped", "Incomplete")
    assert data["phase"] == "Succeeded", data
    summary = job.summary()
    assert summary["records"]["applied"] == summary["records"]["size"]
    return summary


def test_from_a_claim_with_its_data_from_another(
    release: Release, shared: Path, claim: Callable[[str, Path], None]
) -> None:
    release.namespace.restrict()
    claim("my-models", shared)
    claim("my-data", shared)
    text = MODEL.format(size=BESIDE, data='edl.npy("/data/x.npy", "/data/y.npy")')
    (shared / "my_model.py").write_text(text)
    release.install(
        workers=2,  # one on each node
        model__existingClaim="my-models",
        model__module="/models/my_model.py",
        data__existingClaim="my-data",
    )
    assert trained(release)["records"]["size"] == RECORDS


def test_with_its_data_from_an_object_store_and_the_account_from_a_secret(
    release: Release, images: Images, tmp_path: Path
) -> None:
    if not release.namespace.cluster.own:
        pytest.skip("a given cluster's nodes do not see the folders of this machine")
    release.namespace.apply(store_pod(images))
    release.namespace.wait("pod/store", "condition=Ready")
    folder, account = json.loads(release.namespace.kubectl("logs", "store").splitlines()[-1])
    address = release.namespace.get("pod", "store")["status"]["podIP"]
    account["AWS_ENDPOINT_URL"] = account["AWS_ENDPOINT_URL"].replace("0.0.0.0", address)
    release.namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "store-account"},
            "stringData": account,
        }
    )
    file = tmp_path / "my_model.py"
    file.write_text(MODEL.partition("def data")[0].format(size=""))
    release.values["worker.envFrom[0].secretRef.name"] = "store-account"
    release.install(
        model__source=file,
        data__train=f"{folder}/train.csv",
        data__label="y",
        data__workers=1,
        data__validationFraction=0.5,
    )
    assert trained(release)["records"]["size"] == RECORDS // 2


def store_pod(images: Images) -> Object:
    """A pod with `STORE`, run by the Python of this machine: the image's has no S3 server."""
    folders = {"repository": ROOT, "packages": sys.prefix, "python": sys.base_prefix}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "store"},
        "spec": {
            "volumes": [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()],
            "containers": [
                {
                    "name": "store",
                    "image": images["worker"],
                    "command": [sys.executable, "-c", STORE],
                    "workingDir": str(ROOT),
                    "securityContext": {"runAsUser": 0},
                    "volumeMounts": [
                        {"name": name, "mountPath": str(path), "readOnly": True}
                        for name, path in folders.items()
                    ],
                    "readinessProbe": {"exec": {"command": ["cat", "/tmp/ready"]}, "periodSeconds": 1},
                }
            ],
        },
    }


def test_from_a_folder_of_the_nodes(release: Release, shared: Path, tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.mkdir()
    written.chmod(0o777)
    release.install(
        model__hostPath=shared,
        model__mountPath="/elsewhere",
        model__module="/elsewhere/my_model.py",
        output__hostPath=written,
        export__verify="true",
        export__formats="{savedmodel}",
    )
    assert trained(release)["records"]["size"] == RECORDS
    fetched = tmp_path / "mine.keras"
    said = edl(release, "model", "get", fetched)
    assert said == f"{fetched}: {fetched.stat().st_size:,} bytes, as they were written (SHA-256)\n"
    assert fetched.read_bytes() == (written / artifacts.MODEL).read_bytes()
    assert all(e["verified"] for e in json.loads((written / artifacts.EXPORTS).read_text())["exports"])
    edl(release, "model", "get", "--format", "savedmodel", tmp_path / "served")
    assert (tmp_path / "served" / "saved_model.pb").is_file()
    left = release.namespace.get("pods", "-l", "app.kubernetes.io/component=model")
    assert all("deletionTimestamp" in pod["metadata"] for pod in left), "the pod that reads it is left"


def test_as_one_file_that_upgrades_replace(release: Release, tmp_path: Path) -> None:
    """One release of `model.source`: files that are refused, a run, another run, and another master."""
    release.namespace.restrict()
    file = tmp_path / "my_model.py"
    flags = ("--set-file", f"model.source={file}")

    # A file that is no model is refused before a pod is made.
    file.write_text("def model(:\n")
    release.install(*flags)
    data = release.phase("Failed", seconds=60)
    assert data["reason"] == "model.source: line 1: invalid syntax: def model(:"
    file.write_text("def model(size):\n    return size\n")
    release.upgrade(*flags)
    data = release.until(lambda data: "called as" in data["reason"], seconds=60)
    assert data["reason"].splitlines() == [
        "model.source: has no function data(). A model file defines model() and data(split), or the values "
        "name the records (data.train)",
        "model.source: line 1: model(size) is called as model()",
    ]
    assert release.namespace.get("pods", "-l", WORKERS) == []
    assert release.master()["status"]["containerStatuses"][0]["restartCount"] == 0

    # A corrected file is trained with; a different one needs a different run.
    file.write_text(MODEL.format(size=ALONE, data=IN_MEMORY))
    release.upgrade(*flags)
    release.until(lambda data: data["phase"] != "Failed")  # that of the file before
    first = trained(release)
    assert first["records"]["size"] == RECORDS
    file.write_text(file.read_text().replace(str(RECORDS), "128"))
    release.upgrade(*flags)
    release.until(lambda data: data.get("valuesApplied") == "False")
    assert "model.source refused" in release.status["refused"]
    assert json.loads(release.status["state"])["runId"] == first["run_id"]
    long: dict[str, Any] = {"training__epochs": 100_000, "runId": "2"}
    release.upgrade(*flags, **long)
    before = release.until(lambda data: data["phase"] == "Training" and run_id(data) != first["run_id"])
    assert json.loads(before["status.json"])["records"]["size"] == 128

    # The run goes on while the chart has a file that is no model, also when the next master finds only that.
    file.write_text("def model(:\n")
    release.upgrade(*flags, **long)
    refused = "SpecRefused: the new values are refused: model.source: line 1: invalid syntax"
    events = release.namespace.until(
        "events", lambda found: any(told(event).startswith(refused) for event in found)
    )
    assert events
    release.namespace.kubectl("delete", "pod", release.master()["metadata"]["name"])
    gone = release.status
    after = release.until(lambda data: data["phase"] == "Training" and data["epoch"] != gone["epoch"])
    assert run_id(after) == run_id(before)
    assert release.master()["status"]["containerStatuses"][0]["restartCount"] == 0


def run_id(status: dict[str, str]) -> str:
    return str(json.loads(status["state"])["runId"])


def told(event: Object) -> str:
    return f"{event['reason']}: {event['message']}"


def test_in_an_image(release: Release, images: Images, shared: Path) -> None:
    """The three commands; the models have a helper beside them, and packages of their own."""
    release.namespace.restrict()
    (shared / "sizes.py").write_text(f"import humanize\nsize = {RECORDS}\n")
    (shared / "sizes.py").chmod(0o600)
    (shared / "requirements.txt").write_text("humanize==4.9.0\n")
    image = f"{images.registry}/team/my-models:{images.tag}"

    def edl_image(*words: object) -> str:
        command = [sys.executable, "-m", "edl.cli", "image", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    subprocess.run(
        [ROOT / "scripts" / "images", "build", "--only", "worker", "--tag", images.tag], check=True
    )
    edl_image("init", shared, "--image", image, "--base-image", f"edl-worker:{images.tag}")
    said = edl_image("build", "--image", image, shared)
    assert f"worker.image.repository={images.registry}/team/my-models,worker.image.tag={images.tag}" in said
    edl_image("push", image, *(["--plain-http"] if release.namespace.cluster.own else []))
    del release.values["image.registry"]
    release.values["master.image.repository"] = f"{images.registry}/edl-master"
    release.install("-f", str(shared / "values.yaml"))
    assert trained(release)["records"]["size"] == RECORDS
