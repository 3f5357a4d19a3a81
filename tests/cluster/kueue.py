# SPDX-License-Identifier: Apache-2.0
"""Kueue on the cluster, by its own chart, and queues of teams that lend each other what they do not use."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.cluster import LACKING, ROOT, Cluster, Lacking, Namespace, Object

BUILD = ROOT / "scripts" / "dev" / "kueue"
NAME, HOME = "kueue", "kueue-system"
API = "kueue.x-k8s.io/v1beta2"
LABEL = {"edl.test/kueue": "managed"}  # of the namespaces whose pods it admits; others never call it
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "managedJobsNamespaceSelector": {"matchLabels": LABEL},
    "integrations": {"frameworks": ["pod", "batch/job"]},
}


def built() -> Path | None:
    """The folder of Kueue, which only EDL_STORMS=all builds; None if it is not there."""
    words = [] if os.environ.get("EDL_STORMS") == "all" else ["--cached"]
    done = subprocess.run([BUILD, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode == LACKING:
        return None
    done.check_returncode()
    return Path(done.stdout.strip())


@contextmanager
def kueue(cluster: Cluster, home: Path) -> Iterator[None]:
    """Run the Kueue of this folder meanwhile.

    Raises:
        Lacking: no registry of the cluster is known.
    """
    if not cluster.registry:
        raise Lacking("EDL_REGISTRY is not set: the image of Kueue has no registry to go to")
    image, tag = f"{cluster.registry}/kueue", home.name.partition("-")[2]
    _push(cluster, home / "kueue", f"{image}:{tag}")
    manager = {
        "image": {"repository": image, "tag": tag, "pullPolicy": "IfNotPresent"},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    }
    probe = {"initialDelaySeconds": 1}
    values = {
        "controllerManager": {"manager": manager, "readinessProbe": probe},
        "managerConfig": {"controllerManagerConfigYaml": json.dumps(CONFIGURATION)},
    }
    release = "--namespace", HOME
    try:
        install = "upgrade", "--install", NAME, home / "chart", "--create-namespace", "-f", "-", "--wait"
        cluster.run("helm", *release, *install, text=json.dumps(values), seconds=300)
        yield
    finally:
        cluster.run("helm", *release, "uninstall", NAME, "--ignore-not-found", "--wait", seconds=120)
        cluster.kubectl("delete", "namespace", HOME, "--wait=false", "--ignore-not-found")


def _push(cluster: Cluster, program: Path, image: str) -> None:
    container = cluster.run("buildah", "from", "scratch").strip()
    try:
        cluster.run("buildah", "copy", container, program, "/manager")
        cluster.run("buildah", "config", "--user", "65532:65532", container)
        cluster.run("buildah", "commit", "--rm", container, image)
        cluster.run("buildah", "push", "--tls-verify=false", image)
    finally:
        cluster.run("buildah", "rm", container, ok=False)
        cluster.run("buildah", "rmi", image, ok=False)


def _thing(kind: str, name: str, **spec: Any) -> Object:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


@contextmanager
def queues(namespace: Namespace, **cpus: str) -> Iterator[None]:
    """Create queues in one cohort: for each a LocalQueue of the namespace, with so much CPU of its own.

    A queue takes what the others do not use, and gives it back when they need it.
    """
    cluster, cohort = namespace.cluster, namespace.name
    names = {name: f"{cohort}-{name}" for name in cpus}  # of ClusterQueues, which have no namespace
    cluster.kubectl("label", "namespace", namespace.name, *(f"{k}={v}" for k, v in LABEL.items()))
    cluster.apply(
        _thing("ResourceFlavor", cohort),
        *(_cluster_queue(names[name], cohort, cpu) for name, cpu in cpus.items()),
    )
    namespace.apply(*(_thing("LocalQueue", name, clusterQueue=names[name]) for name in cpus))
    try:
        yield
    finally:
        namespace.kubectl("delete", "jobs,pods,localqueues", "--all", "--now")
        cluster.kubectl("delete", "clusterqueues", *names.values())
        cluster.kubectl("delete", "resourceflavor", cohort)


def _cluster_queue(name: str, cohort: str, cpu: str) -> Object:
    quota = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "64Gi"}]
    group = {
        "coveredResources": ["cpu", "memory", "ephemeral-storage"],
        "flavors": [
            {"name": cohort, "resources": [*quota, {"name": "ephemeral-storage", "nominalQuota": "64Gi"}]}
        ],
    }
    return _thing(
        "ClusterQueue",
        name,
        cohortName=cohort,
        namespaceSelector={},
        preemption={"reclaimWithinCohort": "Any"},
        resourceGroups=[group],
    )


def hold(namespace: Namespace, queue: str, held: bool) -> None:
    """Have a queue admit nothing, or admit again."""
    patch = json.dumps({"spec": {"stopPolicy": "Hold" if held else "None"}})
    namespace.cluster.kubectl(
        "patch", "clusterqueue", f"{namespace.name}-{queue}", "--type=merge", "-p", patch
    )
