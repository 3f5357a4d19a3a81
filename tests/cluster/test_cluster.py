# SPDX-License-Identifier: Apache-2.0
"""The cluster itself is what it promises to be: what the other tests stand on, told in small pods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Namespace, Nodes

SLEEP = "trap 'exit 0' TERM; sleep 3600 & wait"
PATIENT = [  # however long it takes the node to come back: the pod is not evicted
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
    for taint in ("unreachable", "not-ready")
]

Object = dict[str, Any]


def pod(name: str, image: str, script: str = SLEEP, **spec: Any) -> Object:
    resources = spec.pop("resources", {})
    container = {"name": "main", "image": image, "command": ["sh", "-c", script], "resources": resources}
    described = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        **spec,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": described,
    }


def cpus(amount: str) -> Object:
    return {"requests": {"cpu": amount}}


def condition(thing: Object, kind: str) -> Object:
    return next((c for c in thing["status"].get("conditions", []) if c["type"] == kind), {})


def ready_is(*states: str) -> Callable[[list[Object]], bool]:
    return lambda things: bool(things) and all(condition(t, "Ready").get("status") in states for t in things)


def test_pods_run_on_both_nodes_and_reach_each_other_by_name(
    cluster: Cluster, namespace: Namespace, nodes: Nodes
) -> None:
    serving = "mkdir /tmp/w; hostname >/tmp/w/index.html; httpd -f -p 8000 -h /tmp/w"
    namespace.apply(
        *(pod(f"on-{name}", cluster.busybox, serving, nodeName=name) for name in nodes.names),
        *(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": f"on-{name}"},
                "spec": {"selector": {"app": f"on-{name}"}, "ports": [{"port": 80, "targetPort": 8000}]},
            }
            for name in nodes.names
        ),
    )
    namespace.wait("pod", "condition=Ready", "--all")
    # Each from each, also from itself, through the Service's address: its own bare name would be
    # looked up in its hosts file.
    for asking in nodes.names:
        for asked in nodes.names:
            fetch = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 on-{asked}.{namespace.name} 80 | tail -1"
            # A node learns of a Service's pods when it comes to it: once a second at most.
            ask = f"until {fetch} | grep .; do sleep 0.2; done"
            said = namespace.kubectl("exec", f"on-{asking}", "--", "sh", "-c", ask)
            assert said.strip() == f"on-{asked}"
        assert namespace.kubectl("logs", f"on-{asking}") == ""


def test_a_pushed_image_is_pulled_by_both_nodes(
    cluster: Cluster, namespace: Namespace, nodes: Nodes, tmp_path: Path
) -> None:
    if not cluster.own:
        pytest.skip("a given cluster may pull from elsewhere")
    image = f"{cluster.registry}/test/pushed:{namespace.name}"
    container = cluster.run("buildah", "from", "scratch").strip()
    try:
        cluster.run("buildah", "copy", container, "/bin/busybox", "/bin/sh")
        cluster.run("buildah", "commit", "--rm", container, image)
        cluster.run("buildah", "push", "--tls-verify=false", image)
    finally:
        cluster.run("buildah", "rm", container, ok=False)
        cluster.run("buildah", "rmi", image, ok=False)
    namespace.apply(*(pod(name, image, "echo pulled", nodeName=name) for name in nodes.names))
    namespace.wait("pod", "jsonpath={.status.phase}=Succeeded", "--all")
    assert [namespace.kubectl("logs", name).strip() for name in nodes.names] == ["pulled", "pulled"]


def test_four_half_cpus_fill_a_node(cluster: Cluster, namespace: Namespace, nodes: Nodes) -> None:
    room = 4 * len(nodes.names)
    pods = [pod(f"p{i}", cluster.busybox, resources=cpus("500m")) for i in range(room + 1)]
    namespace.apply(*pods)

    def all_placed_but_one(found: list[Object]) -> bool:
        refused = [condition(p, "PodScheduled").get("reason") for p in found]
        return refused.count("Unschedulable") == 1 and sum("nodeName" in p["spec"] for p in found) == room

    found = namespace.until("pods", all_placed_but_one)
    placed = [p["spec"].get("nodeName") for p in found]
    assert [placed.count(name) for name in nodes.names] == [4, 4]


def test_a_pod_of_higher_priority_takes_the_place_of_a_lower_one(
    cluster: Cluster, namespace: Namespace, nodes: Nodes, request: pytest.FixtureRequest
) -> None:
    classes = {f"{namespace.name}-{name}": value for name, value in {"low": -10, "high": 100}.items()}
    low, high = classes
    request.addfinalizer(lambda: cluster.kubectl("delete", "priorityclass", low, high, "--ignore-not-found"))
    for name, value in classes.items():
        metadata = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        cluster.apply({**metadata, "value": value})
    home = nodes.names[0]
    where: Object = {"nodeSelector": {"kubernetes.io/hostname": home}, "resources": cpus("2")}
    namespace.apply(pod("low", cluster.busybox, priorityClassName=low, **where))
    namespace.wait("pod/low", "condition=Ready")

    namespace.apply(pod("high", cluster.busybox, priorityClassName=high, **where))

    def told_why(found: list[Object]) -> bool:
        return any(condition(p, "DisruptionTarget").get("reason") == "PreemptionByScheduler" for p in found)

    namespace.until("pods", told_why, labels="app=low")
    namespace.wait("pod/high", "condition=Ready")
    namespace.until("pods", lambda found: not found, labels="app=low")


def test_a_node_that_is_cut_off_is_not_ready_and_its_pods_go_on(
    cluster: Cluster, namespace: Namespace, nodes: Nodes
) -> None:
    home = nodes.names[1]
    namespace.apply(pod("steady", cluster.busybox, nodeName=home, tolerations=PATIENT))
    namespace.wait("pod/steady", "condition=Ready")
    before = namespace.get("pod/steady")

    nodes.cut(home)
    by_name = f"kubernetes.io/hostname={home}"
    cluster.until("nodes", ready_is("Unknown"), labels=by_name, seconds=30)
    nodes.join(home)
    cluster.until("nodes", ready_is("True"), labels=by_name, seconds=30)

    after = namespace.get("pod/steady")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]


def test_a_node_that_is_powered_off_comes_back_and_what_ran_there_has_ended(
    cluster: Cluster, namespace: Namespace, nodes: Nodes
) -> None:
    home = nodes.names[1]
    namespace.apply(
        pod("once", cluster.busybox, nodeName=home, tolerations=PATIENT),
        pod("always", cluster.busybox, nodeName=home, tolerations=PATIENT, restartPolicy="Always"),
    )
    namespace.wait("pod", "condition=Ready", "--all")

    nodes.off(home)
    cluster.until("nodes", ready_is("Unknown"), labels=f"kubernetes.io/hostname={home}", seconds=30)
    nodes.on(home)
    cluster.until("nodes", ready_is("True"), labels=f"kubernetes.io/hostname={home}", seconds=30)

    def ended_and_restarted(found: list[Object]) -> bool:
        told = {p["metadata"]["name"]: p["status"] for p in found}
        restarts = told["always"]["containerStatuses"][0]["restartCount"]
        return told["once"]["phase"] == "Failed" and restarts > 0 and told["always"]["phase"] == "Running"

    namespace.until("pods", ended_and_restarted)


def test_what_an_account_asks_of_the_api_server_is_written_down(
    cluster: Cluster, namespace: Namespace, tmp_path: Path
) -> None:
    if not cluster.own:
        pytest.skip("the audit log of a given cluster is not ours to read")
    token = namespace.kubectl("create", "token", "default").strip()
    server = cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
    empty = tmp_path / "kubeconfig"
    empty.write_text("")
    as_account = ["--kubeconfig", empty, "--server", server, "--token", token, "--insecure-skip-tls-verify"]
    path = f"/api/v1/namespaces/{namespace.name}/pods"
    said = cluster.kubectl(*as_account, "get", "--raw", path, ok=False)
    assert "Forbidden" in said
    asked = [(r["verb"], r["requestURI"], r["responseStatus"]["code"]) for r in namespace.requests("default")]
    assert asked == [("list", path, 403)]
