# SPDX-License-Identifier: Apache-2.0
"""Safe by default: restricted pods, few rights, secrets where they belong, few connections."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.chart.conftest import POLICY, Helm, Refused, Rendered, labels

HERE = Path(__file__).parent


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


def test_the_role_is_the_golden_one(rendered: dict[str, Rendered], helm: Helm) -> None:
    golden = yaml.safe_load((HERE / "role.yaml").read_text())
    assert helm.template("mode=hybrid").one("Role")["rules"] == golden
    without_servers = [rule for rule in golden if rule["apiGroups"] != ["apps"]]
    assert rendered[""].one("Role")["rules"] == without_servers
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
        (container,) = spec["containers"]
        assert {"name": "EDL_TOKEN_FILE", "value": "/etc/edl/token/password"} in container["env"]
        assert {"name": "token", "mountPath": "/etc/edl/token", "readOnly": True} in container["volumeMounts"]
        assert {"name": "token", "secret": {"secretName": "shared"}} in spec["volumes"]
        assert not [e for e in container["env"] if "secretKeyRef" in e.get("valueFrom", {})]


def test_a_release_can_do_without_any_right_of_the_cluster(rendered: dict[str, Rendered]) -> None:
    cluster_wide = {"PriorityClass", "ClusterRole", "ClusterRoleBinding", "Namespace"}
    assert {o["kind"] for o in rendered[""].objects} & cluster_wide == {"PriorityClass"}
    release = rendered["no-cluster-right-values.yaml"]
    assert not {o["kind"] for o in release.objects} & {*cluster_wide, "Role", "RoleBinding", "ServiceAccount"}
    assert "priorityClassName" not in release.worker["spec"]
    assert release.worker["spec"]["serviceAccountName"] == "default"


def test_who_may_talk_to_whom(rendered: dict[str, Rendered], helm: Helm) -> None:
    release = helm.template("mode=hybrid")
    worker, master = (release.one("NetworkPolicy", f"edl-{side}")["spec"] for side in ("worker", "master"))
    workers = {"podSelector": {"matchLabels": labels("edl", "worker") | {"edl.dev/job": "edl"}}}
    assert worker["policyTypes"] == ["Ingress"]
    assert worker["ingress"] == [{"from": [workers]}]
    rpc, metrics = master["ingress"]
    clients = {"podSelector": {"matchLabels": {"edl.dev/client": "edl"}}}
    servers = {"podSelector": {"matchLabels": labels("edl", "ps") | {"edl.dev/job": "edl"}}}
    assert rpc["from"] == [workers, clients, servers]
    assert (rpc["ports"][0]["port"], metrics["ports"][0]["port"]) == (8500, 8501)
    test = rendered[""].one("Pod", "edl-test")
    assert test["metadata"]["labels"]["edl.dev/client"] == "edl"
    locked = rendered["gitops-values.yaml"].one("NetworkPolicy", "edl-worker")["spec"]
    assert [[p["port"] for p in rule.get("ports", [])] for rule in locked["egress"]] == [
        [],
        [8500],
        [53, 53],
        [9000],
    ]


def test_the_masters_policy_allows_what_the_releases_own_workers_have(helm: Helm) -> None:
    assert not helm.template().all(POLICY)
    release = helm.template(
        "admissionPolicy.enabled=true",
        "tls.existingSecret=certificate",
        "output.hostPath=/srv/out",
        "data.existingClaim=flowers",
        "worker.volumes[0].name=share",
        "worker.volumes[0].nfs.server=a",
        "worker.volumes[1].name=secret",
        "worker.volumes[1].secret.secretName=mine",
        "worker.securityContext.capabilities.add[0]=SYS_NICE",
        "worker.podTemplate.spec.hostIPC=true",
        namespace="team",
    )
    policy, binding = release.one(POLICY), release.one(f"{POLICY}Binding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["matchResources"]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "team"}
    }
    [condition] = policy["spec"]["matchConditions"]
    assert condition["expression"] == 'request.userInfo.username == "system:serviceaccount:team:edl-master"'
    said = " ".join(v["expression"] for v in policy["spec"]["validations"])
    for words in (
        'secretName.orValue("") in ["edl-token","mine"]',
        '"certificate" && v.secret.?items.orValue([]).map(i, i.key) == ["ca.crt"]',
        'claimName.orValue("") in ["flowers"]',
        'path.orValue("") in ["/srv/out"]',
        '(v.name == "share" && has(v.nfs) && dyn(v).nfs.?server.orValue(dyn(null)) == dyn("a")',
        '"capabilities": dyn({"add": dyn([dyn("SYS_NICE")]), "drop"',
        "dyn(object.spec).?hostIPC.orValue(dyn(null)) == dyn(true)",
    ):
        assert words in said, words
    assert "hostNetwork" not in said and "privileged" not in said, "no field but those of the rendered worker"
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
