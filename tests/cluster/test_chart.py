# SPDX-License-Identifier: Apache-2.0
"""The chart on a real cluster: what Helm does with it at install, upgrade, rollback and uninstall."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import ROOT, Images, Namespace, Object

CHART = ROOT / "chart"
OLDEST = ROOT / "tests" / "chart" / "edl-0.1.0.tgz"  # as it was before it had a version of its own
FILES = sorted(CHART.glob("ci/*-values.yaml"))
NOT_KUBERNETES_OWN = "serviceMonitor", "podMonitor", "prometheusRule"
CLUSTER_WIDE = (
    "Namespace",
    "PriorityClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
MASTERS = "app.kubernetes.io/component=master"
ROLE = yaml.safe_load((ROOT / "tests" / "chart" / "role.yaml").read_text())


@pytest.fixture
def empty(namespace: Namespace, images: Images) -> Any:
    """Installs a release that should have no workers: what is tested is the chart."""

    def install(name: str = "edl", *more: str, chart: object = CHART) -> None:
        said = ",".join(f"{key}={value}" for key, value in images.values.items())
        words = ("--set", said, "--set", "workers=0", *more, "--wait", "--timeout", "90s")
        namespace.helm("install", name, chart, *words, seconds=120)

    return install


def master(namespace: Namespace) -> Object:
    [pod] = [p for p in namespace.get("pods", "-l", MASTERS) if "deletionTimestamp" not in p["metadata"]]
    return pod


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_api_server_takes_every_values_file(namespace: Namespace, file: Path) -> None:
    namespace.cluster.kubectl(
        "label", "namespace", namespace.name, "pod-security.kubernetes.io/warn=restricted"
    )
    without = [word for kind in NOT_KUBERNETES_OWN for word in ("--set", f"metrics.{kind}.enabled=false")]
    objects = namespace.cluster.run(
        "helm", "template", "edl", CHART, "--namespace", namespace.name, "-f", file, *without
    )
    job = next(o for o in yaml.safe_load_all(objects) if o and o["metadata"]["name"].endswith("-job"))
    pods = [yaml.safe_load(text) for key, text in job["data"].items() if key.startswith("worker")]
    for pod in pods:
        pod["metadata"]["name"] = "worker"
    # A pod's account and classes are to be there; whether they are is not what is asked here.
    everything = [o for o in yaml.safe_load_all(objects) if o]
    for o in [*everything, *pods]:
        o["metadata"].setdefault("namespace", namespace.name)
        if o["kind"] in CLUSTER_WIDE:
            del o["metadata"]["namespace"]
        if o["kind"] == "Pod":
            for key in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
                o["spec"].pop(key, None)
    of_the_nodes = [o for o in [*everything, *pods] if "hostPath" in json.dumps(o)]
    others = [o for o in [*everything, *pods] if o not in of_the_nodes]
    assert "Warning" not in taken(namespace, others)
    taken(namespace, of_the_nodes)


def taken(namespace: Namespace, objects: list[Object]) -> str:
    """What the API server says to objects, and it would take all of them."""
    every = {"apiVersion": "v1", "kind": "List", "items": objects}
    command = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    done = subprocess.run(
        ["kubectl", *command],
        input=json.dumps(every),
        capture_output=True,
        text=True,
        env=namespace.cluster.env,
    )
    assert done.stdout.count("(server dry run)") == len(objects), done.stdout + done.stderr
    return done.stderr


def test_an_upgrade_keeps_the_token_the_master_and_what_it_wrote(namespace: Namespace, empty: Any) -> None:
    empty()
    before, token = master(namespace), namespace.get("secret", "edl-token")["data"]["token"]
    status = {"data": {"written": "by the master"}}
    namespace.kubectl("patch", "configmap", "edl-status", "--type=merge", "-p", json.dumps(status))
    lease = namespace.get("lease", "edl-master")["spec"]
    assert lease["holderIdentity"].startswith(before["metadata"]["name"])
    flags = ("--reset-then-reuse-values", "--set", "maxWorkers=9,priorityClass.value=-20", "--wait")
    namespace.helm("upgrade", "edl", CHART, *flags)
    values = json.loads(namespace.get("configmap", "edl-job")["data"]["values.json"])
    assert values["maxWorkers"] == 9
    classes = namespace.cluster.get("priorityclasses", "-l", "app.kubernetes.io/instance=edl")
    mine = [c for c in classes if c["metadata"]["name"].startswith(f"{namespace.name}-edl-worker-")]
    assert [c["value"] for c in mine] == [-20], "a class cannot be changed: it is a new one"
    assert namespace.get("secret", "edl-token")["data"]["token"] == token, "a rollback would restore it"
    namespace.helm("rollback", "edl", "1", "--wait")
    assert master(namespace)["metadata"]["uid"] == before["metadata"]["uid"]
    assert namespace.get("configmap", "edl-status")["data"]["written"] == "by the master"
    assert namespace.get("lease", "edl-master")["spec"] == lease


def test_an_upgrade_from_the_oldest_chart_waits_for_the_end_of_its_job(
    namespace: Namespace, images: Images
) -> None:
    flags = [word for key, value in images.values.items() for word in ("--set", f"{key}={value}")]
    namespace.helm("install", "edl", OLDEST, "--set", "workers=0", *flags)
    # There are no images of then: what its master would have written is written here.
    namespace.kubectl("scale", "deployment/edl-master", "--replicas=0")
    namespace.until("pods", lambda pods: not pods)

    def told(**data: str) -> None:
        state = json.dumps({"runId": "a-run", "nextId": 2})
        patch = {"data": {"state": state, **data}}
        namespace.kubectl("patch", "configmap", "edl-status", "--type=merge", "-p", json.dumps(patch))

    told(phase="Training")
    before = namespace.get("configmap", "edl-job"), namespace.get("deployment", "edl-master")
    said = namespace.helm("upgrade", "edl", CHART, "--reuse-values", ok=False)
    assert "the job is Training with edl 0.1.0, and this chart is of edl 0.2.0" in said
    assert f"edl wait --release edl -n {namespace.name}" in said
    assert before == (namespace.get("configmap", "edl-job"), namespace.get("deployment", "edl-master"))
    told(phase="Succeeded", endedAt="2026-01-01T00:00:00Z", **{"summary.json": "{}"})
    namespace.helm("upgrade", "edl", CHART, "--reuse-values", "--wait", "--timeout", "90s", seconds=120)
    assert namespace.get("configmap", "edl-status")["data"]["phase"] == "Succeeded", (
        "another run was not asked for"
    )
    namespace.helm("upgrade", "edl", CHART, "--reuse-values", "--set", "training.epochs=3,runId=2")
    namespace.helm("test", "edl", seconds=120)


def umbrella(folder: Path, **jobs: Object) -> Path:
    """A chart with ours as a dependency, under each of these names, with these values."""
    shutil.copytree(CHART, folder / "charts" / "edl")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    needs = [{"name": "edl", "version": version, "alias": name} for name in jobs]
    about = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": needs}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    (folder / "values.yaml").write_text(yaml.safe_dump(jobs))
    return folder


def test_releases_and_the_jobs_of_one_release_live_together_and_nothing_is_left_of_them(
    namespace: Namespace, empty: Any, images: Images, tmp_path: Path
) -> None:
    empty("edl")
    small = {"resources": {"requests": {"cpu": "100m"}}}
    image = {"registry": images.registry, "tag": images.tag}
    jobs: dict[str, Object] = {
        name: {
            "workers": 1,
            "training": {"epochs": 2},
            "image": image,
            "worker": small,
            "nameOverride": "job",
            "fullnameOverride": f"job-{name}",
        }
        for name in ("one", "two")
    }
    namespace.helm("install", "other", umbrella(tmp_path / "umbrella", **jobs))
    for name in jobs:
        done = f"configmap/job-{name}-status"
        namespace.wait(done, "jsonpath={.data.phase}=Succeeded", seconds=120)
    namespace.helm("test", "edl", seconds=120)
    namespace.helm("uninstall", "edl", "--wait")
    masters = namespace.get("pods", "-l", f"app.kubernetes.io/instance=other,{MASTERS}")
    assert len(masters) == 2
    namespace.helm("uninstall", "other", "--wait")
    namespace.until("pods", lambda pods: not pods)
    kinds = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,networkpolicies"
    assert namespace.get(kinds, "-l", "app.kubernetes.io/part-of=edl") == []
    assert namespace.cluster.get("priorityclasses", "-l", "app.kubernetes.io/instance=other") == []


def test_another_token_is_taken_while_the_master_runs(namespace: Namespace, empty: Any) -> None:
    empty()
    before, first = master(namespace), namespace.get("secret", "edl-token")["data"]["token"]
    flags = ("--reset-then-reuse-values", "--set", "token.value=another")
    namespace.helm("upgrade", "edl", CHART, *flags)
    data = namespace.get("secret", "edl-token")["data"]
    assert data["token"] == base64.b64encode(b"another").decode()
    assert base64.b64decode(first) in base64.b64decode(data["token-kept"]).split(), "for the next master"
    # The kubelet brings it within a minute or two; `helm test` calls with the new one and with a wrong one.
    deadline = time.monotonic() + 150
    while "the token has changed" not in namespace.kubectl("logs", "deployment/edl-master"):
        assert time.monotonic() < deadline
        namespace.helm("test", "edl", ok=False, seconds=120)  # any call has the master look
    namespace.helm("test", "edl", seconds=120)
    assert master(namespace)["metadata"]["uid"] == before["metadata"]["uid"]


def test_it_starts_where_no_lease_is_applied(namespace: Namespace, images: Images) -> None:
    said = ",".join(f"{key}={value}" for key, value in images.values.items())
    flags = ("--set", said, "--set", "workers=0,priorityClass.create=false")
    objects = namespace.cluster.run("helm", "template", "edl", CHART, "--namespace", namespace.name, *flags)
    for o in yaml.safe_load_all(objects):  # as Argo CD does it
        if o and o["kind"] not in ("Lease", "Pod"):
            namespace.cluster.kubectl("apply", "-f", "-", text=json.dumps(o))

    def holder(leases: list[Object]) -> str:
        [name] = [(o.get("spec") or {}).get("holderIdentity", "") for o in leases] or [""]
        return str(name)

    namespace.until("leases", holder, seconds=60)
    assert holder(namespace.get("leases")).startswith(master(namespace)["metadata"]["name"])
    namespace.kubectl("delete", "configmap", "edl-job")
    namespace.until("leases", lambda leases: not leases, seconds=60)


def test_the_chart_comes_from_a_registry_and_a_release_may_be_called_42(
    namespace: Namespace, empty: Any, images: Images
) -> None:
    http = ("--plain-http",) if namespace.cluster.own else ()
    version = f"0.0.0-{images.tag.replace('_', '-')}"  # of this tree: no other one is mistaken for it
    pushing = (f"{images.registry}/charts", *http, "--version", version, "--app-version", images.tag)
    namespace.cluster.run(ROOT / "scripts" / "dev" / "chart", "push", *pushing)
    place = f"oci://{images.registry}/charts/edl"
    empty("42", "--version", version, "--set", "image.tag=", *http, chart=place)
    [release] = json.loads(namespace.helm("list", "--output", "json"))
    assert release["chart"] == f"edl-{version}"
    namespace.helm("test", "42", seconds=120)


def test_the_claim_for_the_result_stays(namespace: Namespace) -> None:
    flags = "--set", "workers=0,output.size=1Mi"
    namespace.helm("install", "edl", CHART, *flags)
    namespace.helm("uninstall", "edl", "--wait")
    claims = [claim["metadata"]["name"] for claim in namespace.get("persistentvolumeclaims")]
    assert claims == ["edl-output", "edl-storage"]
    namespace.helm("install", "edl", CHART, *flags)  # and the next release of the name takes it again


def rights(namespace: Namespace, account: str) -> list[Object]:
    """What `kubectl auth can-i --list` shows of an account."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace.name},
    }
    account_of = f"--as=system:serviceaccount:{namespace.name}:{account}"
    said = namespace.cluster.kubectl(
        "create", "--validate=false", "-f", "-", "-o", "json", account_of, text=json.dumps(review)
    )
    return list(json.loads(said)["status"]["resourceRules"])


def test_each_account_has_the_rights_of_the_golden_file_and_no_more(namespace: Namespace) -> None:
    namespace.helm("install", "edl", CHART, "--set", "workers=0,mode=hybrid")
    everybodys = rights(namespace, "default")
    assert rights(namespace, "edl-worker") == everybodys
    masters = [rule for rule in rights(namespace, "edl-master") if rule not in everybodys]

    def sorted_rules(rules: list[Object]) -> list[str]:
        return sorted(json.dumps({k: sorted(v) for k, v in rule.items()}, sort_keys=True) for rule in rules)

    assert sorted_rules(masters) == sorted_rules(ROLE)


def test_the_master_of_a_namespace_can_install_it_without_a_right_of_the_cluster(
    namespace: Namespace,
) -> None:
    namespace.kubectl("create", "rolebinding", "boss", "--clusterrole=admin", "--user=jane")
    jane = ("--set", "workers=0", "--kube-as-user", "jane")
    refused = namespace.helm("install", "edl", CHART, *jane, ok=False)
    assert 'cannot get resource "priorityclasses"' in refused or 'list resource "storageclasses"' in refused
    namespace.helm("install", "edl", CHART, *jane, "--set", "priorityClass.create=false")
    assert namespace.get("role", "edl-master")
