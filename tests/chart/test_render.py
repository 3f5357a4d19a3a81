"""What `helm install` would make: valid to Kubernetes, safe by default, named so that nothing collides."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from edl import config
from edl.config import values
from edl.config.paths import keys
from tests.chart.conftest import CHART, FILES, ROOT, Helm, Object, Refused, Rendered, script

OLDEST, NEWEST = "v1.29.0", "v1.36.3"
HERE = Path(__file__).parent
POLICY = "ValidatingAdmissionPolicy"
CLASS = "default-edl-worker-" + hashlib.sha256(b"default/edl -10 Never").hexdigest()[:8]


# --- valid


@pytest.mark.parametrize("file", [None, *FILES], ids=lambda f: f.name if f else "no file")
def test_lint_finds_nothing(helm: Helm, file: Path | None) -> None:
    helm("lint", "--strict", str(CHART), *(["-f", str(file)] if file else []))


def strict(definition: Object) -> Object:
    """Kubernetes' schema, for jsonschema: unknown keys are mistakes, numbers may be quantities."""
    if definition.get("format") == "int-or-string" or "Quantity" in definition.get("description", "")[:40]:
        return {"type": ["string", "integer", "number"]}
    if "properties" in definition:
        properties = {key: strict(child) for key, child in definition["properties"].items()}
        return {**definition, "properties": properties, "additionalProperties": False}
    return {key: strict(child) if isinstance(child, dict) else child for key, child in definition.items()}


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def kubernetes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """A validator for each (apiVersion, kind) of a version of Kubernetes."""
    swagger = json.loads(Path(script("kube-schema", request.param)).read_text())
    definitions = {name: strict(d) for name, d in swagger["definitions"].items()}
    found = {}
    for name, definition in swagger["definitions"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", []):
            version = "/".join(filter(None, [kind["group"], kind["version"]]))
            schema = {"$ref": f"#/definitions/{name}", "definitions": definitions}
            found[version, kind["kind"]] = jsonschema.Draft4Validator(schema)
    return found


def mistakes(kubernetes: dict[tuple[str, str], Any], o: Object) -> list[str]:
    validator = kubernetes[o["apiVersion"], o["kind"]]
    return [f"{o['kind']}: {'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(o)]


def test_every_object_is_valid_to_the_oldest_and_the_newest_kubernetes(
    kubernetes: dict[tuple[str, str], Any], rendered: dict[str, Rendered]
) -> None:
    checked = set()
    for name, release in rendered.items():
        pods = [yaml.safe_load(text) for key, text in release.job["data"].items() if key.startswith("worker")]
        for o in [*release.objects, *pods]:
            if o["apiVersion"].startswith("monitoring.coreos.com/"):
                continue  # not Kubernetes' own
            if (o["apiVersion"], o["kind"]) not in kubernetes and o["kind"].startswith(POLICY):
                continue  # Kubernetes 1.30's
            assert mistakes(kubernetes, o) == [], name
            checked.add(o["kind"])
    assert len(checked) >= 12


def test_the_schemas_find_a_misspelt_key(kubernetes: dict[tuple[str, str], Any], helm: Helm) -> None:
    pod = helm.template("worker.podTemplate.spec.hostNetwrok=true").worker
    assert len(mistakes(kubernetes, pod)) == 1
    assert "hostNetwrok" in mistakes(kubernetes, pod)[0]


@pytest.mark.parametrize("release", ["no", "y", "42", "null", "1e3"])
def test_a_name_that_yaml_takes_for_something_else_stays_a_name(
    kubernetes: dict[tuple[str, str], Any], helm: Helm, release: str
) -> None:
    sets = ("output.size=1Gi", "metrics.podMonitor.enabled=true", "metrics.grafanaDashboard.enabled=true")
    odd = [f"token.existingSecret={release}", f"token.key={release}", f"nameOverride={release}"]
    odd += [f"serviceAccount.{side}.name={release}" for side in ("master", "worker")]
    odd += [f"worker.{key}={release}" for key in ("runtimeClassName", "schedulerName", "priorityClassName")]
    full = f"a-{release}"
    words = tuple(word for value in [*odd, f"fullnameOverride={full}"] for word in ("--set-string", value))
    rendered = helm.template(*sets, release=release, namespace="2024", words=words)
    for o in [*rendered.objects, rendered.worker]:
        if not o["apiVersion"].startswith("monitoring.coreos.com/"):
            assert mistakes(kubernetes, o) == []
        meta = o["metadata"]
        assert all(isinstance(value, str) for value in meta["labels"].values()), o["kind"]
        assert meta.get("namespace", "2024") == "2024"
        assert meta["labels"]["app.kubernetes.io/instance"] == release
    assert rendered.service["spec"]["selector"]["app.kubernetes.io/name"] == release
    for _, spec in rendered.pods():
        assert spec["serviceAccountName"] == release
        [token] = [e for e in spec["containers"][0]["env"] if e["name"] == "EDL_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": release, "key": release}}


# --- safe


def test_nothing_is_of_ipv4_alone(rendered: dict[str, Rendered]) -> None:
    for release in rendered.values():
        assert "0.0.0.0" not in json.dumps(release.objects)
        [master] = [
            c for c in release.master["spec"]["template"]["spec"]["containers"] if c["name"] == "master"
        ]
        assert master["args"][-2:] == ["--listen", "[::]:8500"]


def test_the_test_pulls_no_image_but_the_masters(rendered: dict[str, Rendered]) -> None:
    for release in rendered.values():
        [test] = release.all("Pod")
        [probe] = test["spec"]["containers"]
        image = release.master["spec"]["template"]["spec"]["containers"][0]["image"]
        assert probe["image"] == image


def test_every_pod_passes_the_restricted_profile(rendered: dict[str, Rendered]) -> None:
    for name, release in rendered.items():
        for pod, spec in release.pods():
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                secure = container["securityContext"]
                assert secure["allowPrivilegeEscalation"] is False
                assert secure["capabilities"] == {"drop": ["ALL"]}
                assert not secure.get("privileged")
                assert not any("hostPort" in port for port in container.get("ports", []))
            kinds = {kind for v in spec.get("volumes", []) for kind in v if kind != "name"}
            allowed = {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}
            # The one that the profile forbids is there only where it was asked for.
            assert kinds <= allowed | ({"hostPath"} if name == "storage-values.yaml" else set()), pod


def test_our_containers_cannot_write_to_their_image_and_have_limits(rendered: dict[str, Rendered]) -> None:
    for release in rendered.values():
        for _, spec in release.pods():
            ours = spec["containers"][0]
            assert ours["securityContext"]["readOnlyRootFilesystem"] is True
            assert ours["resources"]["limits"].keys() >= {"memory", "ephemeral-storage"}


def test_the_role_is_the_golden_one(rendered: dict[str, Rendered]) -> None:
    golden = yaml.safe_load((HERE / "role.yaml").read_text())
    assert rendered[""].one("Role")["rules"] == golden
    assert not rendered[""].all("ClusterRole")
    binding = rendered[""].one("RoleBinding")
    assert [s["name"] for s in binding["subjects"]] == ["edl-master"]


def test_workers_have_no_rights_and_no_token(rendered: dict[str, Rendered]) -> None:
    for release in rendered.values():
        for name, spec in release.pods():
            if name != "master":
                assert spec["automountServiceAccountToken"] is False
                assert (
                    spec["serviceAccountName"]
                    != release.master["spec"]["template"]["spec"]["serviceAccountName"]
                )
                bound = [s["name"] for b in release.all("RoleBinding") for s in b["subjects"]]
                assert spec["serviceAccountName"] not in bound


def test_the_token_is_nowhere_but_in_its_secret(helm: Helm) -> None:
    release = helm.template("token.value=verysecret")
    encoded = base64.b64encode(b"verysecret").decode()
    assert release.one("Secret")["data"] == {"token": encoded}
    texts = ("verysecret", encoded)
    assert [o["kind"] for o in release.objects if any(t in json.dumps(o) for t in texts)] == ["Secret"]


def test_a_made_token_is_long_and_new(helm: Helm) -> None:
    made = [helm.template().one("Secret")["data"]["token"] for _ in range(2)]
    tokens = [base64.b64decode(token).decode() for token in made]
    assert all(re.fullmatch("[A-Za-z0-9]{40}", token) for token in tokens)
    assert tokens[0] != tokens[1]


def test_a_secret_of_ones_own_is_used_and_none_is_made(rendered: dict[str, Rendered]) -> None:
    release = rendered["gitops-values.yaml"]
    assert not release.all("Secret")
    for _, spec in release.pods():
        [token] = [e for e in spec["containers"][0]["env"] if e["name"] == "EDL_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "shared", "key": "password"}}
    volumes = {v["name"]: v for v in release.master["spec"]["template"]["spec"]["volumes"]}
    assert volumes["token"]["secret"] == {"secretName": "shared"}
    env = release.master["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "EDL_TOKEN_FILE", "value": "/etc/edl/token/password"} in env


def test_a_release_can_do_without_any_right_of_the_cluster(rendered: dict[str, Rendered]) -> None:
    cluster_wide = {"PriorityClass", "ClusterRole", "ClusterRoleBinding", "Namespace"}
    assert {o["kind"] for o in rendered[""].objects} & cluster_wide == {"PriorityClass"}
    release = rendered["no-cluster-right-values.yaml"]
    assert not {o["kind"] for o in release.objects} & {*cluster_wide, "Role", "RoleBinding", "ServiceAccount"}
    assert "priorityClassName" not in release.worker["spec"]
    assert release.worker["spec"]["serviceAccountName"] == "default"


def test_who_may_talk_to_whom(rendered: dict[str, Rendered]) -> None:
    worker, master = (
        rendered[""].one("NetworkPolicy", f"edl-{side}")["spec"] for side in ("worker", "master")
    )
    workers = {"podSelector": {"matchLabels": labels("edl", "worker")}}
    assert worker["policyTypes"] == ["Ingress"]
    assert worker["ingress"] == [{"from": [workers]}]
    rpc, metrics = master["ingress"]
    assert rpc["from"] == [workers, {"podSelector": {"matchLabels": {"edl.dev/client": "edl"}}}]
    assert (rpc["ports"][0]["port"], metrics["ports"][0]["port"]) == (8500, 8501)
    test = rendered[""].one("Pod", "edl-test")
    assert test["metadata"]["labels"]["edl.dev/client"] == "edl"
    locked = rendered["gitops-values.yaml"].one("NetworkPolicy", "edl-worker")["spec"]
    assert [[p["port"] for p in rule.get("ports", [])] for rule in locked["egress"]] == [
        [], [8500], [53, 53], [9000],
    ]  # fmt: skip


def labels(release: str, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "edl",
        "app.kubernetes.io/instance": release,
        "app.kubernetes.io/component": component,
    }


# --- upgraded


def optional() -> list[str]:
    """The keys that may be empty, and so may be null."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = []
    for key in keys(config.File):
        node = schema
        for part in key.split("."):
            node = node["properties"][part]
        found += [key] if "null" in node.get("type", "") else []
    return found


@pytest.mark.parametrize("file", ["", "everything-values.yaml"])
def test_what_may_be_empty_may_be_null(helm: Helm, tmp_path: Path, file: str) -> None:
    nulls: Object = {}
    for key in optional():
        inside = nulls
        *parents, last = key.split(".")
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = None
    (tmp_path / "nulls").write_text(yaml.safe_dump(nulls))
    files = [*([CHART / "ci" / file] if file else []), tmp_path / "nulls"]
    release = helm.template(words=tuple(word for path in files for word in ("-f", str(path))))
    assert config.parse(release.values).model.name == "digits"
    assert "topologySpreadConstraints" not in release.worker["spec"]
    # A parent chart's nulls reach this one as they are.
    assert Rendered(helm("template", "edl", str(umbrella(tmp_path / "umbrella", edl=nulls)))).master


def umbrella(folder: Path, **charts: Object) -> Path:
    """A chart with ours as a dependency, under each of these names, with these values."""
    (folder / "charts").mkdir(parents=True)
    shutil.copytree(CHART, folder / "charts" / "edl")
    dependencies = [
        {"name": "edl", "version": "0.2.0", "alias": name, "condition": f"{name}.enabled"} for name in charts
    ]
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": dependencies}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (folder / "values.yaml").write_text(yaml.safe_dump(charts))
    return folder


def test_a_parent_chart_has_several_jobs_and_can_leave_one_out(helm: Helm, tmp_path: Path) -> None:
    parent = umbrella(tmp_path / "umbrella", one={}, two={"enabled": True}, three={"enabled": False})
    both = Rendered(helm("template", "both", str(parent), "--namespace", "team"))
    jobs = [o["metadata"]["name"] for o in both.all("ConfigMap") if o["metadata"]["name"].endswith("-job")]
    assert sorted(jobs) == ["both-one-job", "both-two-job"]
    names = [(o["kind"], o["metadata"]["name"]) for o in both.objects]
    assert len(names) == len(set(names))
    masters = both.all("Deployment")
    services = [s["spec"]["selector"] for s in both.all("Service")]
    for master in masters:
        its = master["spec"]["template"]["metadata"]["labels"] | ACTS
        assert len([s for s in services if s.items() <= its.items()]) == 1


def test_two_jobs_of_one_name_override_keep_apart(helm: Helm, tmp_path: Path) -> None:
    jobs: dict[str, Object] = {
        name: {
            "nameOverride": "job",
            "fullnameOverride": f"job-{name}",
            "metrics": {"serviceMonitor": {"enabled": True}},
        }
        for name in ("one", "two")
    }
    both = Rendered(helm("template", "both", str(umbrella(tmp_path / "umbrella", **jobs))))
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] | ACTS
        for d in both.all("Deployment")
    }
    services = {s["metadata"]["name"]: s["metadata"]["labels"] for s in both.all("Service")}
    pods |= {
        s["metadata"]["name"]: s["spec"]["template"]["metadata"]["labels"] for s in both.all("StatefulSet")
    }
    names = ["job-one-master", "job-one-ps", "job-two-master", "job-two-ps"]
    assert sorted(pods) == sorted(services) == names
    for service in both.all("Service"):
        assert selected(service["spec"]["selector"], pods) == [service["metadata"]["name"]]
    for monitor in both.all("ServiceMonitor"):
        assert selected(monitor["spec"]["selector"]["matchLabels"], services) == [monitor["metadata"]["name"]]


ACTS = {"edl.dev/acting": "true"}  # which a master gives itself


def selected(selector: Object, labels: dict[str, Object]) -> list[str]:
    return [name for name, its in labels.items() if selector.items() <= its.items()]


def test_a_deployment_selects_as_it_always_has(rendered: dict[str, Rendered]) -> None:
    # Kubernetes would refuse an upgrade that changes it.
    assert rendered[""].master["spec"]["selector"] == {"matchLabels": labels("edl", "master")}


def test_the_values_of_an_older_chart_are_enough(helm: Helm, tmp_path: Path) -> None:
    # `helm upgrade --reuse-values` brings the old defaults, and none of the new ones.
    reused = shutil.copytree(CHART, tmp_path / "chart")
    shutil.copy(ROOT / "scripts" / "values-0.1.0.yaml", reused / "values.yaml")
    old = Rendered(helm("template", "edl", str(reused), "--set", "token.value=x"))
    assert config.parse(old.values) == config.parse(helm.template().values)
    container = old.master["spec"]["template"]["spec"]["containers"][0]
    assert container == helm.template("token.value=x").master["spec"]["template"]["spec"]["containers"][0]


def test_every_template_begins_with_the_defaults_that_an_older_chart_lacks() -> None:
    for path in [*CHART.glob("templates/**/*.yaml"), CHART / "templates" / "NOTES.txt"]:
        assert path.read_text().startswith('{{- include "edl.complete" . }}'), path.name


# --- named


@pytest.mark.parametrize(
    ("release", "sets", "master"),
    [
        ("edl", [], "edl-master"),
        ("my-edl", [], "my-edl-master"),
        ("digits", [], "digits-edl-master"),
        ("digits", ["nameOverride=trainer"], "digits-trainer-master"),
        ("digits", ["fullnameOverride=x"], "x-master"),
        ("no", [], "no-edl-master"),
        ("42", [], "edl-42-master"),
        ("4edl", [], "edl-4edl-master"),
        ("a" * 36, [], "a" * 36 + "-edl-master"),
    ],
)
def test_the_objects_carry_the_releases_name(helm: Helm, release: str, sets: list[str], master: str) -> None:
    assert helm.template(*sets, release=release).service["metadata"]["name"] == master


def test_the_names_that_others_rely_on(rendered: dict[str, Rendered]) -> None:
    assert rendered[""].names() == [
        "ConfigMap/edl-job",
        "ConfigMap/edl-status",
        "Deployment/edl-master",
        "Lease/edl-master",
        "NetworkPolicy/edl-master",
        "NetworkPolicy/edl-ps",
        "NetworkPolicy/edl-worker",
        "Pod/edl-test",
        "PodDisruptionBudget/edl-ps",
        f"PriorityClass/{CLASS}",
        "Role/edl-master",
        "RoleBinding/edl-master",
        "Secret/edl-token",
        "Service/edl-master",
        "Service/edl-ps",
        "ServiceAccount/edl-master",
        "ServiceAccount/edl-worker",
        "StatefulSet/edl-ps",
    ]


@pytest.mark.parametrize("namespaces", [("one", "one"), ("one", "two")])
@pytest.mark.parametrize("other", ["vision", "edl-2", "a" * 50 + "xyz"])
def test_two_releases_live_together(helm: Helm, namespaces: tuple[str, str], other: str) -> None:
    mine = {"edl", "edl-1", "a" * 50 + "xyy"}
    for release in mine:
        name = other if namespaces[0] == namespaces[1] else release
        one, two = (
            helm.template(release=r, namespace=n)
            for r, n in ((release, namespaces[0]), (name, namespaces[1]))
        )
        keys = [
            {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in r.objects}
            for r in (one, two)
        ]
        assert not keys[0] & keys[1]
        selectors = [r.service["spec"]["selector"] for r in (one, two)]
        assert selectors[0] != selectors[1] or namespaces[0] != namespaces[1]


def test_a_priority_class_is_of_one_release_and_of_one_value(helm: Helm) -> None:
    def classes(*sets: str, release: str = "edl", namespace: str = "team") -> tuple[str, str]:
        rendered = helm.template(*sets, release=release, namespace=namespace)
        name = str(rendered.one("PriorityClass")["metadata"]["name"])
        assert rendered.worker["spec"]["priorityClassName"] == name
        return name, rendered.one("PriorityClass")["value"]

    found = [
        classes(release="vision"),  # its objects are called vision-edl
        classes(namespace="team-vision"),
        classes("priorityClass.value=-20", namespace="team-vision"),
        classes("priorityClass.preemptionPolicy=PreemptLowerPriority", namespace="team-vision"),
    ]
    assert len({name for name, _ in found}) == 4
    assert [value for _, value in found] == [-10, -10, -20, -10]
    assert classes() == classes()
    assert classes("priorityClass.name=mine,priorityClass.value=-20") == ("mine", -20)


def test_a_pods_name_fits_into_its_host_name(helm: Helm) -> None:
    service = helm.template(release="e" * 53).service["metadata"]["name"]
    assert len(service.removesuffix("-master") + "-worker-1234567890") <= 63


@pytest.mark.parametrize(("release", "sets"), [("my.job", ()), ("4edl", ("nameOverride=2nd",))])
def test_a_name_that_no_service_can_have_is_refused_in_words(
    helm: Helm, release: str, sets: tuple[str, ...]
) -> None:
    with pytest.raises(Refused, match=f'"[^"]*{release}(-edl)?" cannot name the release\'s Service'):
        helm.template(*sets, release=release)
    assert helm.template("fullnameOverride=fine", release=release).service


def test_all_objects_carry_the_recommended_labels(rendered: dict[str, Rendered]) -> None:
    wanted = {*labels("", ""), *(f"app.kubernetes.io/{key}" for key in ("part-of", "version", "managed-by"))}
    for o in rendered[""].objects:
        assert o["metadata"]["labels"].keys() >= wanted | {"helm.sh/chart"}, o["kind"]
    worker = rendered[""].worker["metadata"]["labels"]
    assert worker.keys() >= wanted
    assert worker["app.kubernetes.io/managed-by"] == "edl-master"
    for o in rendered["gitops-values.yaml"].objects:
        assert o["metadata"]["labels"]["team"] == "vision", o["kind"]
        assert o["metadata"]["annotations"]["example.org/owner"] == "vision", o["kind"]


# --- the job


def test_the_master_is_told_the_job_and_nothing_else(rendered: dict[str, Rendered]) -> None:
    for name, release in rendered.items():
        files = [CHART / "ci" / name] if name else []
        assert release.values.keys() == set(config.JOB)
        said = values.load(files)
        said["local"]["threads"] = 0  # which is about `edl run` only
        assert config.parse(release.values) == config.parse(said)


def test_the_masters_object_does_not_grow_with_what_it_need_not_know(helm: Helm) -> None:
    before, after = helm.template(), helm.template("master.nodeSelector.disk=fast", "commonAnnotations.a=b")
    assert before.job["data"]["values.json"] == after.job["data"]["values.json"]


def test_a_whole_number_stays_one_however_large(helm: Helm) -> None:
    text = helm.template("training.seed=2147483647").job["data"]["values.json"]
    assert '"seed": 2147483647' in text


@pytest.mark.parametrize(
    "change",
    ["workers=7", "suspend=true", "training.epochs=9", "worker.resources.limits.memory=9Gi", "logLevel=debug",
     "model.source=x", "worker.image.tag=v9", "highPriorityWorkers=1", "elastic.joinDelaySeconds=0.5"],
)  # fmt: skip
def test_a_change_of_job_or_workers_does_not_touch_the_master(helm: Helm, change: str) -> None:
    before, after = helm.template("token.value=x"), helm.template("token.value=x", change)
    differing = [a["metadata"]["name"] for b, a in zip(before.objects, after.objects, strict=True) if a != b]
    assert set(differing) in ({"edl-job"}, {"edl-job", "edl-test"})


@pytest.mark.parametrize("change", ["master.image.tag=v9", "image.registry=here", "master.env[0].name=A"])
def test_a_change_of_the_masters_own_pod_restarts_it(helm: Helm, change: str) -> None:
    assert helm.template().master != helm.template(change).master


def test_the_status_belongs_to_the_master_alone(rendered: dict[str, Rendered]) -> None:
    # What the chart does not set, an upgrade leaves as it is.
    status = rendered[""].one("ConfigMap", "edl-status")
    assert status.keys() == {"apiVersion", "kind", "metadata"}
    assert rendered[""].one("Lease").keys() == {"apiVersion", "kind", "metadata"}


def test_the_workers_pod_needs_only_a_name(rendered: dict[str, Rendered]) -> None:
    pod = rendered[""].worker
    assert "name" not in pod["metadata"]
    assert pod["spec"]["restartPolicy"] == "Never"
    [container] = pod["spec"]["containers"]
    assert (container["name"], container["command"]) == ("worker", ["python", "-m", "trainer.supervisor"])
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert env["EDL_MASTER"] == "edl-master.default.svc:8500"
    assert env["EDL_RING_INTERFACE"] == "eth0"
    assert "TF_NUM_INTRAOP_THREADS" in env
    assert rendered[""].service["spec"]["ports"][0]["port"] == 8500


@pytest.mark.parametrize(("said", "classes"), [
    ("0", {"worker.yaml": CLASS}),
    ("0%", {"worker.yaml": CLASS}),
    ("1", {"worker.yaml": CLASS, "worker-high.yaml": None}),
    ("50%", {"worker.yaml": CLASS, "worker-high.yaml": None}),
])  # fmt: skip
def test_some_workers_may_have_a_higher_priority(
    helm: Helm, said: str, classes: dict[str, str | None]
) -> None:
    data = helm.template(f"highPriorityWorkers={said}").job["data"]
    pods = {key: yaml.safe_load(text)["spec"] for key, text in data.items() if key.startswith("worker")}
    assert {key: spec.get("priorityClassName") for key, spec in pods.items()} == classes
    for spec in pods.values():
        spec.pop("priorityClassName", None)
    assert all(spec == pods["worker.yaml"] for spec in pods.values())


def test_the_autoscaler_may_remove_a_workers_node(helm: Helm, rendered: dict[str, Rendered]) -> None:
    evict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    for release in rendered.values():
        assert release.worker["metadata"]["annotations"][evict] == "true"
        assert evict not in (release.master["spec"]["template"]["metadata"].get("annotations") or {})
    flag = "worker.podAnnotations.cluster-autoscaler\\.kubernetes\\.io/safe-to-evict=null"
    assert "annotations" not in helm.template(flag).worker["metadata"]


def test_the_master_is_told_its_budget_of_writes(helm: Helm) -> None:
    for sets, told in (
        ((), ("20", "40")),
        (("kubernetesApi.qps=2.5", "kubernetesApi.burst=7"), ("2.5", "7")),
    ):
        [container] = helm.template(*sets).master["spec"]["template"]["spec"]["containers"]
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert (env["EDL_KUBERNETES_QPS"], env["EDL_KUBERNETES_BURST"]) == told


def test_data_models_and_results_have_their_places(rendered: dict[str, Rendered]) -> None:
    release = rendered["storage-values.yaml"]
    volumes = {v.pop("name"): v for v in release.worker["spec"]["volumes"]}
    assert volumes["data"] == {"persistentVolumeClaim": {"claimName": "flowers"}}
    assert volumes["model"] == {"hostPath": {"path": "/srv/models"}}
    assert volumes["output"] == {"persistentVolumeClaim": {"claimName": "edl-output"}}
    mounts = {m["mountPath"]: m for m in release.worker["spec"]["containers"][0]["volumeMounts"]}
    assert volumes["checkpoints"] == {"persistentVolumeClaim": {"claimName": "states"}}
    assert mounts.keys() == {"/tmp", "/var/lib/edl", "/data", "/models", "/checkpoints"}
    assert mounts["/data"]["readOnly"] and mounts["/models"]["readOnly"]
    assert mounts["/checkpoints"] == {"name": "checkpoints", "mountPath": "/checkpoints"}
    account = {"secretRef": {"name": "store-account"}}
    assert release.worker["spec"]["containers"][0]["envFrom"] == [account]
    assert "envFrom" not in release.master["spec"]["template"]["spec"]["containers"][0]
    claim = release.one("PersistentVolumeClaim", "edl-output")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"] == {"requests": {"storage": "5Gi"}}


def test_what_a_pod_may_have_is_passed_on_for_master_and_worker(rendered: dict[str, Rendered]) -> None:
    release = rendered["everything-values.yaml"]
    said = yaml.safe_load((CHART / "ci" / "everything-values.yaml").read_text())["worker"]
    for pod in (release.master["spec"]["template"], release.worker):
        spec, [ours, beside] = pod["spec"], pod["spec"]["containers"]
        assert beside["name"] == "beside"
        for key in ("nodeSelector", "tolerations", "affinity", "initContainers", "priorityClassName",
                    "runtimeClassName", "schedulerName", "terminationGracePeriodSeconds"):  # fmt: skip
            its = spec[key] if key != "tolerations" else spec[key][: len(said[key])]  # the master has its own
            assert its == said[key], key
        for kind, amounts in said["resources"].items():  # over the defaults, which are a map too
            assert amounts.items() <= ours["resources"][kind].items()
        assert said["env"][0] in ours["env"]
        assert ours["envFrom"] == said["envFrom"]
        assert said["volumes"][0] in spec["volumes"]
        assert said["volumeMounts"][0] in ours["volumeMounts"]
        assert pod["metadata"]["labels"]["tier"] == "batch"
        [spread] = spec["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_one_master_is_soon_made_anew_and_is_never_missing_in_a_rolling_update(
    rendered: dict[str, Rendered], helm: Helm
) -> None:
    one = rendered[""].master["spec"]
    assert one["replicas"] == 1
    assert one["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "affinity" not in one["template"]["spec"]
    assert [o["metadata"]["name"] for o in rendered[""].all("PodDisruptionBudget")] == ["edl-ps"]
    tolerated = {t["key"]: t for t in one["template"]["spec"]["tolerations"]}
    assert [key.rpartition("/")[2] for key in tolerated] == ["not-ready", "unreachable"]
    assert {t["tolerationSeconds"] for t in tolerated.values()} == {10}
    assert "tolerations" not in rendered[""].worker["spec"], "workers are given up by their master"
    key = "node.kubernetes.io/unreachable"
    mine = helm.template(f"master.tolerations[0].key={key}", "master.unreachableTolerationSeconds=20").master
    assert [t.get("tolerationSeconds") for t in mine["spec"]["template"]["spec"]["tolerations"]] == [None, 20]


def test_several_masters_are_on_several_nodes_and_go_one_after_the_other(helm: Helm) -> None:
    release = helm.template("master.replicas=2", "token.value=x")
    master = release.master["spec"]
    assert (master["replicas"], master["strategy"]["rollingUpdate"]) == (
        2, {"maxSurge": 0, "maxUnavailable": 1},
    )  # fmt: skip
    pod = master["template"]
    affinity = pod["spec"]["affinity"]["podAntiAffinity"]
    [preferred] = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    apart = preferred["podAffinityTerm"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    budget = release.one("PodDisruptionBudget", "edl-master")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert "affinity" not in release.worker["spec"]
    node = "master.affinity.nodeAffinity.x=y"
    assert helm.template("master.replicas=2", node).master["spec"]["template"]["spec"]["affinity"] == {
        "nodeAffinity": {"x": "y"}, "podAntiAffinity": affinity,
    }  # fmt: skip
    own = "master.affinity.podAntiAffinity.x=y"
    assert helm.template("master.replicas=2", own).master["spec"]["template"]["spec"]["affinity"] == {
        "podAntiAffinity": {"x": "y"}
    }


def test_the_overlay_is_merged_by_name(rendered: dict[str, Rendered], helm: Helm) -> None:
    release = rendered["everything-values.yaml"]
    for pod in (release.master["spec"]["template"], release.worker):
        assert pod["metadata"]["annotations"].items() >= {
            ("example.org/injected", "false"), ("example.org/more", "1"),
        }  # fmt: skip
        assert pod["spec"]["hostAliases"] == [{"ip": "10.1.2.3", "hostnames": ["store"]}]
        names = [v["name"] for v in pod["spec"]["volumes"]]
        assert [n for n in names if n != "token"] == ["tmp", "output", "certificates", "scratch"]
        assert pod["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": "1Gi"}
    pod = helm.template("worker.podTemplate.spec.containers[0].name=worker", "elastic.warmProcess=none",
                        "worker.podTemplate.spec.containers[0].stdin=true").worker  # fmt: skip
    [container] = pod["spec"]["containers"]
    assert container["stdin"] is True
    assert container["command"] == ["python", "-m", "trainer"]


def test_a_variable_in_the_overlay_takes_no_other_away(helm: Helm) -> None:
    container = "worker.podTemplate.spec.containers[0]"
    pod = helm.template(
        f"{container}.name=worker", f"{container}.env[0].name=TZ", f"{container}.env[0].value=UTC",
        f"{container}.env[1].name=POD_NAME", f"{container}.env[1].value=mine",
        f"{container}.volumeMounts[0].name=tmp", f"{container}.volumeMounts[0].mountPath=/tmp",
        f"{container}.volumeMounts[0].subPath=x",
    ).worker  # fmt: skip
    [container] = pod["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    assert env["EDL_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "edl-token"
    assert (env["TZ"]["value"], env["POD_NAME"]) == ("UTC", {"name": "POD_NAME", "value": "mine"})
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/tmp", "/var/lib/edl"]
    assert container["volumeMounts"][0]["subPath"] == "x"


@pytest.mark.parametrize(("sets", "image"), [
    ([], "edl-worker:0.2.0"),
    (["image.tag=v7"], "edl-worker:v7"),
    (["image.tag=v7", "worker.image.tag=mine"], "edl-worker:mine"),
    (["image.registry=r.example.org:5000/team/"], "r.example.org:5000/team/edl-worker:0.2.0"),
    ([f"worker.image.digest=sha256:{'ab' * 32}"], f"edl-worker@sha256:{'ab' * 32}"),
])  # fmt: skip
def test_the_image_has_a_registry_a_tag_or_a_digest(helm: Helm, sets: list[str], image: str) -> None:
    assert helm.template(*sets).worker["spec"]["containers"][0]["image"] == image


def test_objects_of_ones_own_go_with_the_release(rendered: dict[str, Rendered]) -> None:
    names = rendered["everything-values.yaml"].names()
    assert {"ConfigMap/more", "ConfigMap/edl-trainer-also"} <= set(names)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The chart with its notes in an object: `helm template` does not show them."""
    copy = shutil.copytree(CHART, tmp_path / "chart")
    shutil.copy(CHART / "templates" / "NOTES.txt", copy / "files")
    (copy / "templates" / "notes.yaml").write_text(
        "kind: Notes\nmetadata: {name: notes}\ntext: {{ tpl (.Files.Get `files/NOTES.txt`) . | toJson }}\n"
    )
    return copy


def test_the_notes_name_what_was_made(helm: Helm, notes: Path) -> None:
    flags = ("--namespace", "team", "--set", "workers=3")
    text = Rendered(helm("template", "vision", str(notes), *flags)).one("Notes")["text"]
    assert "trains digits with 3 workers in namespace team" in text
    assert "kubectl -n team wait --for=jsonpath='{.data.phase}'=Succeeded configmap/vision-edl-status" in text
    assert "helm uninstall vision -n team" in text
    assert "WARNING: the trained model will be lost with the worker's pod: set output.size" in text
    assert "WARNING: there are no checkpoints" in text
    assert text.count("WARNING") == 2
    kept = Rendered(helm("template", "vision", str(notes), *flags, "--set", "checkpoint.dir=/shared"))
    assert "checkpoints" not in kept.one("Notes")["text"]
    predicts = Rendered(helm("template", "vision", str(notes), *flags, "--set", "mode=predict")).one("Notes")
    assert "predicts the records of digits with 3 workers" in predicts["text"]
    assert "WARNING: the predictions will be lost with the worker's pod" in predicts["text"]
    assert predicts["text"].count("WARNING") == 1 and "edl model get" not in predicts["text"]


def test_the_masters_policy_allows_what_the_releases_own_workers_have(helm: Helm) -> None:
    assert not helm.template().all(POLICY)
    release = helm.template(
        "admissionPolicy.enabled=true", "tls.existingSecret=certificate", "output.hostPath=/srv/out",
        "data.existingClaim=flowers", "worker.volumes[0].name=share", "worker.volumes[0].nfs.server=a",
        "worker.volumes[1].name=secret", "worker.volumes[1].secret.secretName=mine",
        "worker.securityContext.capabilities.add[0]=SYS_NICE", "worker.podTemplate.spec.hostIPC=true",
        namespace="team",
    )  # fmt: skip
    policy, binding = release.one(POLICY), release.one(f"{POLICY}Binding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["matchResources"]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "team"}
    }
    [who] = policy["spec"]["matchConditions"]
    assert who["expression"] == 'request.userInfo.username == "system:serviceaccount:team:edl-master"'
    said = " ".join(v["expression"] for v in policy["spec"]["validations"])
    for words in (
        'secretName.orValue("") in ["mine"]',
        '"certificate" && v.secret.?items.orValue([]).map(i, i.key) == ["ca.crt"]',
        'claimName.orValue("") in ["flowers"]',
        'path.orValue("") in ["/srv/out"]', '(v.name == "share" && has(v.nfs))', 'a in ["SYS_NICE"]',
        'secretKeyRef.name in ["edl-token"]', "hostNetwork", "privileged",
    ):  # fmt: skip
        assert words in said, words
    assert "hostIPC" not in said
    for kind in (POLICY, f"{POLICY}Binding"):
        one = helm.template("admissionPolicy.enabled=true", release="vision-edl", namespace="team")
        other = helm.template("admissionPolicy.enabled=true", release="edl", namespace="team-vision")
        assert one.one(kind)["metadata"]["name"] != other.one(kind)["metadata"]["name"]
    with pytest.raises(Refused, match=r"this is Kubernetes v1\.29\.0: ValidatingAdmissionPolicy needs 1\.30"):
        helm.template("admissionPolicy.enabled=true", words=("--kube-version", "1.29.0"))


def test_one_value_turns_tls_on_and_only_the_master_and_servers_get_the_key(helm: Helm) -> None:
    without, release = helm.template(), helm.template("tls.existingSecret=certificate")
    ca = {"secretName": "certificate", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    for pod, spec in release.pods():
        volumes = {v["name"]: v for v in spec["volumes"]}
        container = spec["containers"][0]
        env = {e["name"]: e.get("value") for e in container["env"]}
        [path] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "edl-tls"]
        assert path == "/etc/edl/tls"
        if pod in ("master", "ps"):
            assert env["EDL_TLS_DIRECTORY"] == path
            assert volumes["edl-tls"]["secret"] == {"secretName": "certificate"}
        else:
            assert env["EDL_TLS_CA"] == f"{path}/ca.crt"
            assert volumes["edl-tls"]["secret"] == ca
    assert release.service["spec"]["ports"][0]["appProtocol"] == "https"
    assert without.service["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"
    assert "EDL_TLS" not in json.dumps(without.objects)


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_the_notes_warn_of_a_token_that_leaves_the_cluster_unencrypted(
    helm: Helm, notes: Path, kind: str
) -> None:
    flags = ("--set", f"service.type={kind}")
    words = f"WARNING: service.type is {kind}, and without TLS the token travels unencrypted"
    assert words in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]
    flags += ("--set", "tls.existingSecret=x")
    assert words not in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("suspend=true", "It is suspended"),
        ("output.size=1Gi", "The PersistentVolumeClaim edl-output with the trained model is kept."),
        ("networkPolicy.enabled=false", "WARNING: networkPolicy.enabled is false"),
        ("rbac.create=false", "the ServiceAccount edl-master needs the rights"),
        ("model.source=x", "trains the file of model.source with 4 workers"),
    ],
)
def test_the_notes_say_what_is_special(helm: Helm, notes: Path, said: str, words: str) -> None:
    assert words in Rendered(helm("template", "edl", str(notes), "--set", said)).one("Notes")["text"]


def test_a_variable_of_ones_own_takes_the_place_of_ours(helm: Helm) -> None:
    pod = helm.template("worker.env[0].name=EDL_RING_INTERFACE", "worker.env[0].value=net1").worker
    env = [e for e in pod["spec"]["containers"][0]["env"] if e["name"] == "EDL_RING_INTERFACE"]
    assert env == [{"name": "EDL_RING_INTERFACE", "value": "net1"}]


def test_no_label_of_ones_own_changes_what_selects_a_pod(helm: Helm) -> None:
    flags = [f"{where}.app\\.kubernetes\\.io/component=x" for where in ("commonLabels", "worker.podLabels")]
    release = helm.template(*flags)
    assert release.worker["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    assert release.master["spec"]["template"]["metadata"]["labels"].items() >= labels("edl", "master").items()
