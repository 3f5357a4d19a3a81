# SPDX-License-Identifier: Apache-2.0
"""What the master reads from a worker's pod: statuses as Kubernetes writes them, and what they mean."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from edl.contract.exit_codes import ANNOUNCED, WorkerExit
from edl.contract.ids import RunId, WorkerId
from edl.errors import ConfigError
from edl.exit_announcements import termination_message
from edl.kubernetes import pods
from edl.kubernetes.client import ApiError
from edl.kubernetes.names import Names
from edl.master.backends.kubernetes.exit_cause import exit_cause
from edl.master.backends.kubernetes.pod_template import Identity, excluding, render
from edl.master.backends.kubernetes.retry import refusal
from edl.master.core import events as ev

W = WorkerId(3)


def a_pod(phase: str = "Running", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    beside = {"name": "log-shipper", "state": {"running": {}}}
    own = [beside, {"name": "worker", "state": state}] if state is not None else []
    limits = {"name": "worker", "resources": {"limits": {"memory": "2Gi"}}}
    return {
        "metadata": {"name": "edl-worker-3", "uid": "u", "labels": {}},
        "spec": {"containers": [limits]},
        "status": {"phase": phase, "containerStatuses": own, **status},
    }


def exited(
    code: int, reason: str = "Error", finished: str = "2026-01-01T00:00:10Z", message: str = ""
) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": reason, "finishedAt": finished, "message": message}
    return {"terminated": ended}


def deleted(pod: dict[str, Any], at: str = "2026-01-01T00:00:40Z", grace: int = 30) -> dict[str, Any]:
    """The deletion was asked for `grace` seconds before `at`."""
    pod["metadata"] |= {"deletionTimestamp": at, "deletionGracePeriodSeconds": grace}
    return pod


TOKEN = "the master does not know its token: the Secret has changed"


def disrupted(reason: str, status: str = "True") -> list[dict[str, str]]:
    kind = "TerminationTarget" if reason.startswith("Workload") else "DisruptionTarget"
    return [{"type": kind, "status": status, "reason": reason, "message": "to make room"}]


def gone(pod: dict[str, Any], by_us: bool = False, **more: Any) -> ev.Gone:
    return exit_cause(W, pod, by_us, **more)


@pytest.mark.parametrize(
    "reason",
    [
        "PreemptionByScheduler",
        "DeletionByTaintManager",
        "EvictionByEvictionAPI",
        "DeletionByPodGC",
        "TerminationByKubelet",
        "WorkloadEvictedDueToPreempted",  # of Kueue 0.17
    ],
)
def test_a_disruption_is_free_whatever_else_is_known(reason: str) -> None:
    pod = deleted(a_pod("Failed", exited(137, "OOMKilled"), conditions=disrupted(reason)))
    assert gone(pod) == ev.Gone(W, code=137, free=True, why=f"{reason}: to make room")


def test_a_disruption_that_was_seen_earlier_still_counts() -> None:
    assert gone(a_pod("Failed", exited(1)), disrupted="PreemptionByScheduler: x").free
    assert not gone(a_pod("Failed", exited(1), conditions=disrupted("EvictionByEvictionAPI", "False"))).free


def test_somebodys_deletion_is_free_but_not_a_crash_from_before() -> None:
    assert gone(deleted(a_pod("Failed", exited(1, finished="2026-01-01T00:00:20Z")))) == ev.Gone(
        W, code=1, free=True, why="its pod was deleted"
    )
    assert gone(deleted(a_pod("Failed", exited(1, finished="2026-01-01T00:00:09Z")))) == ev.Gone(W, code=1)


def test_out_of_memory_is_charged_and_names_the_limit() -> None:
    why = "OOMKilled: container memory limit 2Gi"
    assert gone(a_pod("Failed", exited(137, "OOMKilled"))) == ev.Gone(W, code=137, why=why)
    assert gone(deleted(a_pod("Failed", exited(137, "OOMKilled"))), by_us=True).why == why


# Pods as the kubelet of Kubernetes 1.34 leaves them: its reasons and messages are
# pkg/kubelet/eviction/helpers.go and pkg/kubelet/active_deadline.go.
STORAGE = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
DEADLINE = "Pod was active on the node longer than the specified deadline"


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (137, "Evicted", STORAGE),
        (137, "Evicted", 'Container worker exceeded its local ephemeral storage limit "1Gi". '),
        (137, "Evicted", 'Usage of EmptyDir volume "shm" exceeds the limit "64Mi". '),
        (0, "Evicted", STORAGE),
        (143, "DeadlineExceeded", DEADLINE),
        (75, "DeadlineExceeded", DEADLINE),
    ],
)
def test_every_limit_of_a_pod_is_charged_and_named(code: int, reason: str, message: str) -> None:
    pod = a_pod("Failed", exited(code), reason=reason, message=message)
    assert gone(pod) == ev.Gone(W, code=code, limit=f"{reason}: {message.strip()}")


@pytest.mark.parametrize("reason", ["DeadlineExceeded", "Evicted"])
def test_a_limit_is_charged_when_the_container_never_ran(reason: str) -> None:
    pod = a_pod("Failed", reason=reason, message="over")
    assert gone(pod) == ev.Gone(W, limit=f"{reason}: over")


@pytest.mark.parametrize(
    "message",
    ["The node was low on resource: ephemeral-storage. Threshold ...", "The node had condition: [x]. "],
)
def test_pressure_on_the_node_is_free_without_a_condition_of_the_pod(message: str) -> None:
    pod = a_pod("Failed", exited(137), reason="Evicted", message=message)
    assert gone(pod) == ev.Gone(W, code=137, free=True, why=f"Evicted: {message.strip()}")


@pytest.mark.parametrize(
    ("code", "by_us", "told"),
    [
        (0, False, ev.Gone(W, code=0)),
        (1, False, ev.Gone(W, code=1)),
        (1, True, ev.Gone(W, code=1)),
        (75, False, ev.Gone(W, code=75, free=True, why="its peers broke the ring")),
        (4, False, ev.Gone(W, code=4, free=True, why=TOKEN)),
        (134, False, ev.Gone(W, signal="SIGABRT")),
        (139, True, ev.Gone(W, signal="SIGSEGV")),
        (143, False, ev.Gone(W, signal="SIGTERM")),
        (137, True, ev.Gone(W, signal="SIGKILL", free=True, why="the master deleted its pod")),
        (255, False, ev.Gone(W, code=255)),
    ],
)
def test_an_exit_code_is_a_code_or_a_signal(code: int, by_us: bool, told: ev.Gone) -> None:
    message = termination_message(code)  # as edl's code writes it
    assert gone(a_pod("Failed", exited(code, message=message)), by_us) == told


@pytest.mark.parametrize("code", sorted(ANNOUNCED))
@pytest.mark.parametrize("message", ["", "of the user's code", termination_message(1)])
def test_an_exit_code_of_edls_that_was_not_announced_is_charged(code: int, message: str) -> None:
    pod = a_pod("Failed", exited(code, message=message))
    assert gone(pod) == ev.Gone(W, code=WorkerExit.USER_CODE)


def test_what_a_node_does_is_nobodys_fault() -> None:
    unknown = a_pod("Failed", exited(137, "ContainerStatusUnknown"))
    assert gone(unknown) == ev.Gone(W, free=True, why="its node was lost (ContainerStatusUnknown)")
    assert gone(a_pod("Failed", None, reason="NodeShutdown", message="off")).free
    refused = a_pod("Failed", None, reason="OutOfcpu", message="Node didn't have enough resource: cpu")
    assert gone(refused) == ev.Gone(W, free=True, why="OutOfcpu: Node didn't have enough resource: cpu")


def test_an_init_container_that_fails_is_the_jobs_own_failure() -> None:
    waiting = {"waiting": {"reason": "PodInitializing"}}
    init = [{"name": "fetch", "state": {"terminated": {"exitCode": 4, "reason": "Error"}}}]
    why = "its init container fetch ended with exit code 4"
    assert gone(a_pod("Failed", waiting, initContainerStatuses=init)) == ev.Gone(W, code=4, why=why)


def test_only_the_workers_own_container_counts() -> None:
    assert pods.running(a_pod("Running", {"running": {}}))
    assert not pods.running(a_pod("Running", {"waiting": {"reason": "ContainerCreating"}}))
    assert pods.ended(a_pod("Running", exited(0))), "though another container goes on"
    assert not pods.ended(a_pod("Running", {"running": {}}))
    pod = a_pod("Running", exited(0))
    assert pods.goes_on(pod)
    pod["status"]["containerStatuses"][0]["state"] = exited(0)
    assert not pods.goes_on(pod), "the pod's phase comes a moment later"


def test_why_it_does_not_run() -> None:
    assert pods.delay(a_pod("Pending", {"waiting": {"reason": "ContainerCreating"}})) == ""
    stuck = {"waiting": {"reason": "ErrImagePull", "message": "not\n  found"}}
    assert pods.delay(a_pod("Pending", stuck)) == "ErrImagePull: not found"
    held = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    gated = a_pod("Pending", conditions=held)
    gated["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    assert pods.delay(gated) == "it is held back by the scheduling gate kueue.x-k8s.io/admission"
    gated["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    assert pods.delay(gated) == "it waits for quota of Kueue's queue team-a"
    assert pods.delay(a_pod("Pending", conditions=held)) == "", "admitted, and not looked at by the scheduler"
    full = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m" * 999}]
    assert pods.delay(a_pod("Pending", conditions=full)) == f"no node has room for it: {'m' * 300}..."
    unbound = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    lacks = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unbound}]
    assert pods.delay(a_pod("Pending", conditions=lacks)) == f"its volume is not there: {unbound}"


def test_only_a_right_that_is_missing_is_told_with_the_role() -> None:
    def said(message: str) -> str:
        return refusal(ApiError("create pods", 403, "Forbidden", message))

    right = 'pods is forbidden: User "system:serviceaccount:a:edl-master" cannot create resource "pods"'
    assert said(right).endswith("(the Role of the master's account; rbac.create)")
    profile = 'violates PodSecurity "restricted:latest": restricted volume types'
    assert said(profile) == f"Kubernetes does not allow it: {profile}"


IDENTITY = Identity(Names("edl"), "edl", RunId("r"), "edl-master:8500", {"uid": "o"})


def test_a_template_needs_a_container_named_worker() -> None:
    template = {"spec": {"containers": [{"name": "beside"}, {"name": "worker"}]}}
    pod = render(template, IDENTITY, W, high=False)
    assert {"name": "EDL_WORKER_ID", "value": "3"} in pod["spec"]["containers"][1]["env"]
    assert pods.of(pod) == ("r", 3)
    loop = render(template, replace(IDENTITY, script="import numpy\n", threads=1), W, high=False)
    env = loop["spec"]["containers"][1]["env"]
    assert {"name": "EDL_SCRIPT_IMPORTS", "value": "numpy"} in env
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in env, "training.deterministic"
    assert "metadata" not in template, "the template is left as it is"
    with pytest.raises(ConfigError, match="no container named worker"):
        render({"spec": {"containers": [{"name": "beside"}]}}, IDENTITY, W, high=False)


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ({"metadata": []}, "metadata: [] is not a map"),
        ({"metadata": {"labels": "ours"}}, 'metadata.labels: "ours" is not a map'),
        ({"metadata": {"annotations": [1]}}, "metadata.annotations: [1] is not a map"),
        ({"spec": 3}, "spec: 3 is not a map"),
        ({"spec": {"containers": {"name": "worker"}}}, "spec.containers: {"),
        ({"spec": {"containers": ["worker"]}}, 'spec.containers: ["worker"] is not a list of maps'),
        ({"spec": {"containers": None}}, "no container named worker"),
        ({"spec": {"containers": [{"name": "worker", "env": {"A": "B"}}]}}, "spec.containers[].env: {"),
    ],
)
def test_a_template_of_a_wrong_shape_is_refused_where_it_is_wrong(template: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"worker.yaml: {where}" if ":" in where else where)):
        render(template, IDENTITY, W, high=False)


@pytest.mark.parametrize("affinity", ["none", [], {"nodeAffinity": 3}])
def test_nodes_are_not_excluded_from_an_affinity_of_a_wrong_shape(affinity: Any) -> None:
    with pytest.raises(ConfigError, match=r"spec\.affinity"):
        excluding({"spec": {"affinity": affinity}}, ["n1"])


def test_a_pod_for_any_node_but_some_keeps_what_it_asks_of_a_node() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    named = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone, named]}}
    affinity = {"podAffinity": {"some": "thing"}, "nodeAffinity": node}
    template: dict[str, Any] = {"spec": {"affinity": affinity, "containers": []}}
    assert excluding(template, []) is template
    pod = excluding(template, ["n1", "n2"])
    first, second = ({"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2"))
    assert pod["spec"]["affinity"]["podAffinity"] == {"some": "thing"}
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {**zone, "matchFields": [first, second]},
        {"matchFields": [*named["matchFields"], first, second]},
    ], "any of the terms is enough for Kubernetes: each excludes them"
    assert template["spec"]["affinity"]["nodeAffinity"] is node, "the chart's own is as it was"
    for nothing in ({}, {"affinity": None}, {"affinity": {"nodeAffinity": None}}):
        (term,) = excluding({"spec": nothing}, ["n1"])["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert term == {"matchFields": [first]}
