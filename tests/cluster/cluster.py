"""A real Kubernetes, for the tests and the benchmark: the cluster, a namespace of one's own, the images.

It is the cluster of `scripts/cluster`, or one that is there already. A cluster that was up before is
used and left up; one that we started goes with us, and if we are killed, the next
`scripts/cluster up` replaces it.

Who uses it waits for what is to be seen (`wait`, `until`: both watch), never a while.
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
LACKING = 77  # scripts/cluster: this machine has not what it takes
SECONDS = 60.0
OURS = "edl.test/process"  # the label of our namespaces: whose they are
GROUPS = {"deployments": "apis/apps/v1", "jobs": "apis/batch/v1", "leases": "apis/coordination.k8s.io/v1"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """A cluster that tests and benchmarks may use."""

    kubeconfig: str
    registry: str  # host:port, plain http where it is our own; empty where we know of none
    busybox: str
    own: bool = False  # of scripts/cluster: its nodes may be cut off and powered off
    started: bool = False  # by us: nobody else uses it
    tools: str = ""

    @property
    def env(self) -> dict[str, str]:
        """For a command that is to find the cluster and its tools."""
        path = os.pathsep.join(filter(None, [self.tools, os.environ["PATH"]]))
        return os.environ | {"KUBECONFIG": self.kubeconfig, "PATH": path}

    def run(self, *words: object, text: str | None = None, ok: bool = True, seconds: float = SECONDS) -> str:
        """What a command prints; with `ok=False` it may fail, and then also what it complains of.

        Raises:
            AssertionError: it failed, and `ok` asks that it does not.
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
        """Wait for what `kubectl wait --for=...` can say: `condition=Ready`, `delete`, `jsonpath=...`.

        Raises:
            AssertionError: it is not so after `seconds`.
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
        """List and watch the objects of a kind (`pods`) until something is so of them; as they are then.

        Raises:
            AssertionError: it is not so after `seconds`; with the objects.
        """
        listed, command = self.watching(kind, namespace, labels, seconds)
        there = {thing["metadata"]["uid"]: thing for thing in listed}
        if so(listed):
            return listed
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.env) as watch:
            try:
                assert watch.stdout is not None
                for line in watch.stdout:  # ends when the server's time is up
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
    """The cluster, seen from one namespace of ours."""

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
        """Let only pods of the restricted Pod Security profile in."""
        label = "pod-security.kubernetes.io/enforce=restricted"
        self.cluster.kubectl("label", "namespace", self.name, label)

    def requests(self, account: str) -> list[Object]:
        """What a service account has asked of the API server, oldest first, as audit events.

        Each has its `verb`, `requestURI` and `responseStatus.code`; a watch is there from when it began.
        """
        user = f"system:serviceaccount:{self.name}:{account}"
        log = Path(self.cluster.kubeconfig).parent / "logs" / "audit.log"
        events = (json.loads(line) for line in log.read_text().splitlines() if user in line)
        return list(
            {event["auditID"]: event for event in events if event["user"]["username"] == user}.values()
        )

    def delete(self) -> None:
        """And wait until its pods are gone: the next test is to have the nodes to itself.

        Not until the name is: Kubernetes takes five seconds for that, however empty it is.
        """
        self.cluster.kubectl(
            "delete", "namespace", self.name, "--wait=false", "--ignore-not-found"
        )  # nobody makes pods there now
        everyone = f"/api/v1/namespaces/{self.name}/pods?gracePeriodSeconds=1"
        self.kubectl("delete", "--raw", everyone)
        self.until("pods", lambda found: not found, seconds=120)

    def story(self) -> str:
        """What there is and what happened, for who has to find out why a test failed."""
        told = [self.kubectl("get", "all,configmaps", "-o", "wide", ok=False)]
        told.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", ok=False))
        for pod in re.findall(r"^pod/\S+", told[0], re.MULTILINE)[:12]:
            told.append(f"--- {pod}\n{self.kubectl('logs', pod, '--all-containers', '--tail=40', ok=False)}")
        return "\n".join(told)


@dataclass(frozen=True)
class Nodes:
    """The two real nodes, and what may be done to them."""

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
        """Cut these addresses off from each other, and nobody else: pods', or `machine`."""
        script("part", *(f"{a}={b}" for a, b in pairs))

    def mend(self, cluster: Cluster) -> None:
        """Have them whole again, whatever was done."""
        self.part()
        for name in self.names:
            self.on(name)
            self.join(name)
        cluster.wait("node", "condition=Ready", *self.names)


@dataclass(frozen=True)
class Images:
    """edl's images as they are in this tree, in a registry that the nodes pull from."""

    registry: str
    tag: str

    def __getitem__(self, side: str) -> str:
        """The whole name of the image of `master` or `worker`."""
        return f"{self.registry}/edl-{side}:{self.tag}"

    @property
    def values(self) -> dict[str, str]:
        """For `helm install --set`."""
        return {"image.registry": self.registry, "image.tag": self.tag}


class Lacking(Exception):
    """This machine, or the cluster that was given, has not what it takes; the text says what."""


@contextmanager
def running() -> Iterator[Cluster]:
    """The cluster of `scripts/cluster`: one that was up before is left up, one that was not goes down again.

    Raises:
        Lacking: this machine cannot run one.
        AssertionError: it does not come up.
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
    """A cluster that is there already.

    Raises:
        Lacking: a tool to use it with is missing.
    """
    if not shutil.which("kubectl") or not shutil.which("helm"):
        raise Lacking("kubectl or helm is missing, and a given cluster brings none")
    found = Cluster(str(Path(kubeconfig).resolve()), os.environ.get("EDL_REGISTRY", ""), busybox)
    sweep(found)
    return found


@contextmanager
def new_namespace(cluster: Cluster, name: str) -> Iterator[Namespace]:
    """A namespace whose name begins like this, gone afterwards with all that is in it."""
    mine = Namespace(cluster, f"{name[:40].strip('-')}-{secrets.token_hex(3)}")
    labels = {OURS: str(os.getpid())}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": mine.name, "labels": labels}}
    )
    try:
        mine.until("serviceaccounts", bool)  # without its default account no pod can be made
        yield mine
    finally:
        mine.delete()


def push_images(cluster: Cluster) -> Images:
    """Build the images of this tree where they are not built, and have them on every node.

    Raises:
        Lacking: the cluster has no registry that we know of.
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
    """Have the images on every node, before anybody's patience counts: a node may take a minute for each."""
    names = {f"pull-{node['metadata']['name']}": node["metadata"]["name"] for node in cluster.get("nodes")}
    containers = [
        {"name": f"image-{i}", "image": image, "command": ["true"]} for i, image in enumerate(images)
    ]
    cluster.kubectl("delete", "pods", "-n", "default", *names, "--ignore-not-found", "--now")
    cluster.apply(*(
        {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
            "spec": {"nodeName": node, "restartPolicy": "Never", "containers": containers},
        }
        for name, node in names.items()
    ))  # fmt: skip
    for name in names:
        cluster.wait(f"pod/{name}", "jsonpath={.status.phase}=Succeeded", "-n", "default", seconds=300)
    cluster.kubectl("delete", "pods", "-n", "default", *names, "--now")


def images_tag() -> str:
    """What the images of this tree are tagged with."""
    return subprocess.run([IMAGES, "tag"], capture_output=True, text=True, check=True).stdout.strip()


def script(*words: str, seconds: float = 120) -> str:
    """What `scripts/cluster` prints.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"scripts/cluster {' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def sweep(cluster: Cluster) -> None:
    """Remove what tests and benchmarks that were killed have left."""
    for namespace in cluster.get("namespaces", "-l", OURS):
        owner = namespace["metadata"]["labels"][OURS]
        if not Path(f"/proc/{owner}").exists():
            Namespace(cluster, namespace["metadata"]["name"]).delete()
