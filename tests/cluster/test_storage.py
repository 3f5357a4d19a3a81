# SPDX-License-Identifier: Apache-2.0
"""With a default StorageClass of ReadWriteOnce, state and model outlive the master and all workers."""

from __future__ import annotations

import base64
import io
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT, Cluster, Images, Namespace
from tests.cluster.release import MASTER, WORKERS, Release
from tests.cluster.test_evaluation import another
from tests.support.jobs.evidence import check_weights

EDL = Path(sys.executable).with_name("edl")
RECORDS, EPOCHS = 3200, 4
MODEL = f"""
import os

os.environ.update(EDL_COUNTING_RECORDS="{RECORDS}", EDL_COUNTING_SLEEP="0.1")
import edl.zoo.counting
from edl.zoo.counting import feed, model


def data(split):
    return edl.zoo.counting.data("train") if split in ("train", "predict") else None
"""


def readme_commands() -> list[str]:
    """The commands of the README's section about Kubernetes, each on one line."""
    section = (ROOT / "README.md").read_text().partition("## Kubernetes")[2].partition("\n## ")[0]
    block = re.findall(r"```console\n(.*?)```", section, re.DOTALL)[0].replace("\\\n", "")
    return [line.removeprefix("$ ") for line in block.splitlines()]


@pytest.mark.timeout(420)
def test_the_commands_of_the_readme_keep_state_and_model_when_all_pods_die_at_once(
    namespace: Namespace, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "chart").symlink_to(ROOT / "chart")
    job = Release(namespace, {})
    push, install, wait, get = readme_commands()
    assert push == "scripts/images build --push REGISTRY"  # the fixture has done it
    # Beyond the README: the images of this tree, and a job that is short.
    more = f" --set image.tag={images.tag} --set training.epochs={EPOCHS} --set checkpoint.seconds=2"
    namespace.helm(*shlex.split(install.replace("REGISTRY", images.registry) + more)[1:])
    job.ring_of(4)
    (claim,) = namespace.get("pvc")
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("edl-storage", ["ReadWriteOnce"])
    job.told("master://checkpoints", reason=Reason.Checkpointed)

    for pods in (WORKERS, MASTER):
        namespace.kubectl("delete", "pods", "-l", pods, "--grace-period=0", "--force", "--wait=false")
    job.told("is restored from master://checkpoints", reason=Reason.Restored, seconds=180)

    def edl(command: str, *words: str) -> str:
        flags = ("--namespace", namespace.name, *words)
        return namespace.cluster.run(EDL, *shlex.split(command)[1:], *flags, seconds=300)

    edl(wait)

    def place_of(name: str) -> str:
        """Where `edl status` says that this is on the master's volume."""
        told = edl("edl status --release edl")
        found = re.search(rf"(run-\S+/{name}) in persistentvolumeclaim/edl-storage", told)
        assert found, told
        return found[1]

    model = place_of(artifacts.MODEL)
    edl(get)
    assert check_weights(tmp_path / artifacts.MODEL, RECORDS, EPOCHS) == ""
    edl("edl audit --release edl")

    sets = f"runId=predict,mode=predict,workers=2,initFrom.path=master://{model}"
    namespace.helm("upgrade", "edl", ROOT / "chart", "--reset-then-reuse-values", "--set", sets)
    another(job, "predict")
    predictions = place_of(artifacts.PREDICTIONS)
    copy = f"tar c -C /var/lib/edl {predictions} | base64"
    told = namespace.kubectl("exec", "deployment/edl-master", "--", "sh", "-c", copy)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(told))) as copied:
        copied.extractall(tmp_path, filter="data")
    parts = [np.load(part) for part in sorted((tmp_path / predictions).glob("part-*.npz"))]
    assert np.concatenate([part["ids"] for part in parts]).tolist() == list(range(RECORDS))
    assert np.concatenate([part["output"] for part in parts]).tolist() == [EPOCHS] * RECORDS
    edl("edl audit --release edl")
    namespace.helm("uninstall", "edl", "--wait")
    assert [c["metadata"]["name"] for c in namespace.get("pvc")] == ["edl-storage"]


@pytest.fixture
def no_default_class(cluster: Cluster) -> Iterator[None]:
    """The StorageClass of the cluster is not the default."""
    change = "storageclass.kubernetes.io/is-default-class={}"
    cluster.kubectl("annotate", "--overwrite", "storageclass", "local", change.format("false"))
    yield
    cluster.kubectl("annotate", "--overwrite", "storageclass", "local", change.format("true"))


def test_without_a_default_class_the_job_runs_and_says_what_would_be_lost(
    no_default_class: None, namespace: Namespace, images: Images
) -> None:
    job = Release(namespace, images.values)
    said = namespace.helm("install", "edl", ROOT / "chart", *job._sets({"workers": "1"}))
    assert (
        "no volume to keep that on: this cluster has no default StorageClass: set storage.storageClass"
        in said
    )
    job.ring_of(1)
    assert namespace.get("pvc") == []
    flags = ("--release", "edl", "--namespace", namespace.name)
    status = namespace.cluster.run(EDL, "status", *flags)
    assert re.search("the trained model (will be|is) lost with the worker", status)
