# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes cluster for tests and benchmarks, with private namespaces and the images.

It is the cluster of `scripts/cluster`, or an existing cluster. A cluster that was up before is used and left
up. A cluster that this process started ends with it; if the process is killed, the next `scripts/cluster up`
replaces the cluster.

Tests wait for observable conditions (`wait` and `until`, which both watch), and never for a fixed time.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import subprocess
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT, IMAGES = ROOT / "scripts" / "cluster", ROOT / "scripts" / "images"
LACKING = 77  # the exit code of scripts/cluster if this machine lacks a requirement
SECONDS = 60.0
OURS = "edl.test/process"  # the label of our namespaces, with the owner's process ID
GROUPS = {"deployments": "apis/apps/v1", "jobs": "apis/batch/v1", "leases": "apis/coordination.k8s.io/v1"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """A cluster that tests and benchmarks may use."""

    kubeconfig: str
    registry: str  # host:port, plain http in our own cluster; empty if no registry is known
    busybox: str
    own: bool = False  # the cluster of scripts/cluster: its nodes may be cut off and powered off
    started: bool = False  # started by this process: it has no other users
    tools: str = ""

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands that use the cluster and its tools."""
        path = os.pathsep.join(filter(None, [self.tools, os.environ["PATH"]]))
        return os.environ | {"KUBECONFIG": self.kubeconfig, "PATH": path}

    def run(self, *words: object, text: str | None = None, ok: bool = True, seconds: float = SECONDS) -> str:
        """Run a command and return its output; with `ok=False` it may fail, and stderr is added then.

        Raises:
            AssertionError: the command failed although `ok` is true.
        """
        command = [str(word) for word in words]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, env=self.env
        )
        assert not ok or done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def kubectl(self, *words: object, **how: Any) -> str:
        return self.run("kubectl", *words, **how)

    def get(self, *words: object) -> Any:
        """The object, or the list of objects, of `kubectl get ...`."""
        found = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found["items"] if found["kind"] == "List" else found

    def apply(self, *objects: Object) -> None:
        everything = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", text=json.dumps(everything))

    def wait(self, what: str, condition: str, *words: object, seconds: float = SECONDS) -> None:
        """Wait for a condition of `kubectl wait --for=...`: `condition=Ready`, `delete`, `jsonpath=...`.

        Raises:
            AssertionError: the condition is not met after `seconds`.
        """
        self.kubectl(
            "wait", f"--for={condition}", what, f"--timeout={seconds:.0f}s", *words, seconds=seconds + 30
        )

    def watching(
        self, kind: str, namespace: str = "", labels: str = "", seconds: float = SECONDS
    ) -> tuple[list[Object], list[str]]:
        """The objects of a kind (`pods`), and a command that prints each change since as a line of JSON."""
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"/{GROUPS.get(kind, 'api/v1')}{where}/{kind}?labelSelector={urllib.parse.quote(labels)}"
        listed = json.loads(self.kubectl("get", "--raw", path))
        since = listed["metadata"]["resourceVersion"]
        watch = f"{path}&watch=1&resourceVersion={since}&timeoutSeconds={math.ceil(seconds)}"
        return listed["items"], ["kubectl", "get", "--raw", watch]

    def until(
        self,
        kind: str,
        so: Callable[[list[Object]], object],
        namespace: str = "",
        labels: str = "",
        seconds: float = SECONDS,
    ) -> list[Object]:
        """List and watch the objects of a kind (`pods`) until `so` is true of them; return them.

        Raises:
            AssertionError: the condition is not met after `seconds`; the message contains the objects.
        """
        listed, command = self.watching(kind, namespace, labels, seconds)
        there = {thing["metadata"]["uid"]: thing for thing in listed}
        if so(listed):
            return listed
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.env) as watch:
            try:
                assert watch.stdout is not None
                for line in watch.stdout:  # ends after the server's timeout
                    event = json.loads(line)
                    thing = event["object"]
                    there[thing["metadata"]["uid"]] = thing
                    if event["type"] == "DELETED":
                        del there[thing["metadata"]["uid"]]
                    if so(list(there.values())):
                        return list(there.values())
            finally:
                watch.kill()
        seen = {thing["metadata"]["name"]: thing.get("status", thing.get("data")) for thing in there.values()}
        raise AssertionError(f"not so of {kind} after {seconds:.0f} s: {json.dumps(seen, indent=1)}")


@dataclass(frozen=True)
class Namespace:
    """The cluster as seen from one of our namespaces."""

    cluster: Cluster
    name: str

    def kubectl(self, *words: object, **how: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *words, **how)

    def helm(self, *words: object, **how: Any) -> str:
        return self.cluster.run("helm", "--namespace", self.name, *words, **how)

    def get(self, *words: object) -> Any:
        return self.cluster.get("--namespace", self.name, *words)

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(*({**o, "metadata": {**o["metadata"], "namespace": self.name}} for o in objects))

    def wait(self, what: str, condition: str, *words: object, seconds: float = SECONDS) -> None:
        self.cluster.wait(what, condition, "--namespace", self.name, *words, seconds=seconds)

    def until(
        self, kind: str, so: Callable[[list[Object]], object], labels: str = "", seconds: float = SECONDS
    ) -> list[Object]:
        return self.cluster.until(kind, so, self.name, labels, seconds)

    def restrict(self) -> None:
        """Allow only pods of the restricted Pod Security profile."""
        label = "pod-security.kubernetes.io/enforce=restricted"
        self.cluster.kubectl("label", "namespace", self.name, label)

    def requests(self, account: str) -> list[Object]:
        """The requests of a service account to the API server, oldest first, as audit events.

        Each has its `verb`, `requestURI` and `responseStatus.code`; a watch is listed from its begin.
        """
        user = f"system:serviceaccount:{self.name}:{account}"
        log = Path(self.cluster.kubeconfig).parent / "logs" / "audit.log"
        events = (json.loads(line) for line in log.read_text().splitlines() if user in line)
        return list(
            {event["auditID"]: event for event in events if event["user"]["username"] == user}.values()
        )

    def delete(self) -> None:
        """Delete the namespace and wait until its pods are gone, so that the next test has the nodes alone.

        It does not wait until the name is gone: Kubernetes takes five seconds for that even if it is empty.
        """
        # No further pods are created there.
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found")
        everyone = f"/api/v1/namespaces/{self.name}/pods?gracePeriodSeconds=1"
        self.kubectl("delete", "--raw", everyone)
        self.until("pods", lambda found: not found, seconds=120)

    def story(self) -> str:
        """Objects, events and logs of the namespace, to find out why a test failed."""
        told = [self.kubectl("get", "all,configmaps", "-o", "wide", ok=False)]
        told.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", ok=False))
        for pod in re.findall(r"^pod/\S+", told[0], re.MULTILINE)[:12]:
            told.append(f"--- {pod}\n{self.kubectl('logs', pod, '--all-containers', '--tail=40', ok=False)}")
        return "\n".join(told)


@dataclass(frozen=True)
class Nodes:
    """The two real nodes, with the faults that a test may cause."""

    names: tuple[str, ...] = ("n1", "n2")
    machine: str = "10.231.0.1"  # the address of the API server and DNS (machine/settings.py: HOST)

    def cut(self, name: str) -> None:
        script("node", "cut", name)

    def join(self, name: str) -> None:
        script("node", "join", name)

    def off(self, name: str) -> None:
        script("node", "off", name)

    def on(self, name: str) -> None:
        script("node", "on", name)

    def part(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """Cut exactly these pairs of addresses off from each other: addresses of pods, or `machine`."""
        script("part", *(f"{a}={b}" for a, b in pairs))

    def mend(self, cluster: Cluster) -> None:
        """Repair the nodes after any fault."""
        self.part()
        for name in self.names:
            self.on(name)
            self.join(name)
        cluster.wait("node", "condition=Ready", *self.names)
        # Kubernetes takes the taint of a lost node off a while after the node is ready.
        cluster.until(
            "nodes",
            lambda found: (
                not any(
                    node["spec"].get("taints") for node in found if node["metadata"]["name"] in self.names
                )
            ),
        )


@dataclass(frozen=True)
class Images:
    """edl's images of this tree, in a registry that the nodes pull from."""

    registry: str
    tag: str

    def __getitem__(self, side: str) -> str:
        """The full name of the image of `master` or `worker`."""
        return f"{self.registry}/edl-{side}:{self.tag}"

    @property
    def values(self) -> dict[str, str]:
        """The values for `helm install --set`."""
        return {"image.registry": self.registry, "image.tag": self.tag}


class Lacking(Exception):
    """This machine, or the given cluster, lacks a requirement; the text names it."""


@contextmanager
def running() -> Iterator[Cluster]:
    """The cluster of `scripts/cluster`, started if necessary; it is stopped only if it was not up before.

    Raises:
        Lacking: this machine cannot run a cluster.
        AssertionError: the cluster does not come up.
    """
    was_up = subprocess.run([SCRIPT, "status"], capture_output=True).returncode == 0
    starting = subprocess.run(
        [SCRIPT, "up", f"--owner={os.getpid()}"], capture_output=True, text=True, timeout=240
    )
    if starting.returncode == LACKING:
        raise Lacking(starting.stderr.strip().splitlines()[-1])
    assert starting.returncode == 0, starting.stderr
    said = dict(re.findall(r"(\w+)=(\S+)", script("env")))
    found = Cluster(
        said["KUBECONFIG"],
        said["EDL_REGISTRY"],
        "localhost/busybox:1",
        own=True,
        started=not was_up,
        tools=said["PATH"].partition(":")[0],
    )
    try:
        sweep(found)
        yield found
    finally:
        if not was_up:
            script("down")


def given(kubeconfig: str, busybox: str) -> Cluster:
    """An existing cluster.

    Raises:
        Lacking: kubectl or helm is missing.
    """
    if not shutil.which("kubectl") or not shutil.which("helm"):
        raise Lacking("kubectl or helm is missing, and a given cluster brings none")
    found = Cluster(str(Path(kubeconfig).resolve()), os.environ.get("EDL_REGISTRY", ""), busybox)
    sweep(found)
    return found


@contextmanager
def new_namespace(cluster: Cluster, name: str) -> Iterator[Namespace]:
    """Create a namespace whose name begins with `name`, and delete it with its contents afterwards."""
    mine = Namespace(cluster, f"{name[:40].strip('-')}-{secrets.token_hex(3)}")
    labels = {OURS: str(os.getpid())}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": mine.name, "labels": labels}}
    )
    try:
        mine.until("serviceaccounts", bool)  # pods need the default account
        yield mine
    finally:
        mine.delete()


def push_images(cluster: Cluster) -> Images:
    """Build the images of this tree if necessary, push them, and pull them on every node.

    Raises:
        Lacking: no registry of the cluster is known.
    """
    if not cluster.registry:
        raise Lacking("EDL_REGISTRY is not set: the images have no registry to go to")
    found = Images(cluster.registry, images_tag())
    command = [str(IMAGES), "build", "--tag", found.tag, "--push", found.registry]
    done = subprocess.run(
        [*command, *(["--plain-http"] if cluster.own else [])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    _pull(cluster, [found["master"], found["worker"]])
    return found


def _pull(cluster: Cluster, images: list[str]) -> None:
    """Pull the images on every node, before any time limit counts: a node may take a minute for each."""
    names = {f"pull-{node['metadata']['name']}": node["metadata"]["name"] for node in cluster.get("nodes")}
    containers = [
        {"name": f"image-{i}", "image": image, "command": ["true"]} for i, image in enumerate(images)
    ]
    cluster.kubectl("delete", "pods", "-n", "default", *names, "--ignore-not-found", "--now")
    cluster.apply(
        *(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"nodeName": node, "restartPolicy": "Never", "containers": containers},
            }
            for name, node in names.items()
        )
    )
    for name in names:
        cluster.wait(f"pod/{name}", "jsonpath={.status.phase}=Succeeded", "-n", "default", seconds=300)
    cluster.kubectl("delete", "pods", "-n", "default", *names, "--now")


def images_tag() -> str:
    """The tag of the images of this tree."""
    return subprocess.run([IMAGES, "tag"], capture_output=True, text=True, check=True).stdout.strip()


def script(*words: str, seconds: float = 120) -> str:
    """Run `scripts/cluster` and return its output.

    Raises:
        AssertionError: the script failed.
    """
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"scripts/cluster {' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def sweep(cluster: Cluster) -> None:
    """Remove the namespaces left by killed tests and benchmarks."""
    for namespace in cluster.get("namespaces", "-l", OURS):
        owner = namespace["metadata"]["labels"][OURS]
        if not Path(f"/proc/{owner}").exists():
            Namespace(cluster, namespace["metadata"]["name"]).delete()
