# SPDX-License-Identifier: Apache-2.0
"""What `mode=hybrid` makes beside the rest: parameter servers that belong to the release.

That all objects are valid to Kubernetes and all pods restricted, test_schemas.py and test_safety.py check, of
chart/ci/hybrid-values.yaml too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from edl import config
from edl.cli.release.status import FoundRelease, token_secret
from edl.config import values
from edl.errors import ConfigError
from edl.kubernetes.names import Names
from edl.kubernetes.pods import SERVER_INDEX
from edl.master.core.ps import HANG_SECONDS, LAST_COPY_SECONDS
from tests.chart.conftest import ROOT, Helm, Object, Refused, Rendered

FILE = "hybrid-values.yaml"


def container(rendered: Rendered) -> Object:
    [only] = rendered.one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    return only


def arguments(rendered: Rendered) -> dict[str, str]:
    flags = container(rendered)["args"]
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_a_server_that_hangs_fails_its_liveness_probe(helm: Helm, tmp_path: Path) -> None:
    rendered, alive = helm.template("mode=hybrid"), tmp_path / "alive"
    path = arguments(rendered)["--alive-file"]
    _, *words = container(rendered)["livenessProbe"]["exec"]["command"]
    probe = [sys.executable, *(word.replace(path, str(alive)) for word in words)]

    def fails() -> bool:
        return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode != 0

    def until(happened: Callable[[], bool]) -> None:
        for _ in range(600):
            if happened():
                return
            time.sleep(0.1)
        raise AssertionError("it did not happen within a minute")

    files = ["--log-dir", str(tmp_path / "log"), "--alive-file", str(alive)]
    environment = {**os.environ, "EDL_TOKEN": "a-token", "PYTHONPATH": str(ROOT)}
    assert fails()
    server = psutil.Popen([sys.executable, "-P", "-m", "edl.ps", *files], cwd=ROOT, env=environment)
    try:
        until(lambda: not fails())
        server.suspend()
        until(lambda: server.status() == psutil.STATUS_STOPPED)
        os.utime(alive, (time.time() - 60,) * 2)  # a minute passes
        assert fails()
        server.resume()
        until(lambda: not fails())
    finally:
        server.kill()
        server.wait()


def test_a_server_whose_memory_alone_holds_rows_may_hang_for_longer(helm: Helm) -> None:
    def threshold(*sets: str) -> int:
        probe = container(helm.template("mode=hybrid", *sets))["livenessProbe"]
        seconds: int = probe["failureThreshold"] * probe["periodSeconds"]
        return seconds

    assert threshold() == threshold("ps.replicas=2") == HANG_SECONDS
    # The server with the second copy may be out, which a probe cannot know.
    assert threshold("ps.log=false") == threshold("ps.log=false", "ps.replicas=2") == LAST_COPY_SECONDS


def test_a_job_of_another_mode_has_no_servers(helm: Helm) -> None:
    for mode in ("train", "allreduce", "evaluate"):
        rendered = helm.template(f"mode={mode}")
        assert not [name for name in rendered.names() if name.endswith("-ps")]
        assert "EDL_SERVER_ADDRESS" not in json.dumps(rendered.master)


def test_a_job_that_does_not_train_has_as_many_servers_as_it_says(helm: Helm) -> None:
    def replicas(*sets: str) -> int:
        rendered = helm.template(*sets)
        job = config.parse(json.loads(rendered.one("ConfigMap", "edl-job")["data"]["values.json"]))
        count: int = rendered.one("StatefulSet")["spec"]["replicas"]
        assert job.servers == count and "EDL_SERVER_ADDRESS" in json.dumps(rendered.master)
        assert rendered.one("NetworkPolicy", "edl-ps") and rendered.one("Service", "edl-ps")
        return count

    assert replicas("mode=predict", "ps.servers=3", "initFrom.path=s3://a/b") == 3
    assert replicas("mode=hybrid") == replicas("mode=ps") == 2


def rights(of: Rendered) -> dict[str, list[str]]:
    """The master's, to the servers' StatefulSet."""
    rules = [r for r in of.one("Role")["rules"] if r["apiGroups"] == ["apps"]]
    assert all(rule["resourceNames"] == [Names("edl").servers] for rule in rules)
    return {resource: rule["verbs"] for rule in rules for resource in rule["resources"]}


def test_a_job_that_may_need_servers_begins_with_none_and_its_master_may_have_some_created(
    helm: Helm,
) -> None:
    open_, hybrid = helm.template("model.module=deepfm"), helm.template("model.module=deepfm", "mode=hybrid")
    assert open_.one("StatefulSet")["spec"]["replicas"] == 0
    assert open_.one("StatefulSet")["spec"]["template"] == hybrid.one("StatefulSet")["spec"]["template"]
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
        assert open_.one(kind, "edl-ps") == hybrid.one(kind, "edl-ps")
    assert open_.master == hybrid.master
    assert rights(open_) == rights(hybrid) != {}


def test_a_model_that_needs_no_servers_has_nothing_for_them_and_one_that_may_need_some_has(
    helm: Helm, tmp_path: Path
) -> None:
    def has_servers(*sets: str, source: str = "") -> bool:
        (tmp_path / "model.py").write_text(source)
        words = ("--set-file", f"model.source={tmp_path / 'model.py'}") if source else ()
        found = helm.template(*sets, words=words)
        has = "EDL_SERVER_ADDRESS" in json.dumps(found.master)
        assert has == bool(rights(found)) == any(name.endswith("-ps") for name in found.names())
        return has

    for path in (ROOT / "model_zoo").glob("[!_]*.py"):
        assert has_servers(f"model.module={path.stem}") == ("edl.layers" in path.read_text()), path
    assert has_servers("model.module=team.model") and not has_servers("model.script=/train.py")
    assert not has_servers(source="import keras\nkeras.layers.Embedding(9, 9)")
    assert has_servers(source="from edl.layers import Embedding") and has_servers(
        source="import edl, Embedding"
    )
    assert has_servers(source="from elasticdl.layers import Embedding")
    assert has_servers("ps.servers=1") and has_servers("ps.replaceEmbeddings=9")


def test_master_and_servers_agree_on_names_and_numbers(rendered: dict[str, Rendered]) -> None:
    found = rendered[FILE]
    servers, service = found.one("StatefulSet"), found.one("Service", "edl-ps")
    name = Names("edl").servers
    assert (
        servers["metadata"]["name"] == servers["spec"]["serviceName"] == service["metadata"]["name"] == name
    )
    assert servers["spec"]["replicas"] == 3
    assert found.values["ps"] == {
        "servers": 3,
        "replicas": 1,
        "timeoutSeconds": 3,
        "memoryMebibytes": 0,
        "log": True,
        "gradsToWait": 1,
        "maxStaleness": 0,
        "scaleRateByStaleness": False,
        "pullSteps": 1,
        "replaceEmbeddings": 0,
    }
    [port] = container(found)["ports"]
    assert arguments(found)["--listen"] == f"[::]:{port['containerPort']}"
    environment = {
        e["name"]: e.get("value") for e in found.master["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environment["EDL_SERVER_ADDRESS"] == f"{name}-{{}}.{name}.default.svc:{port['containerPort']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= servers["spec"]["template"]["metadata"]["labels"].items()


def test_a_server_knows_its_index_by_the_label_that_kubernetes_gives_it(
    rendered: dict[str, Rendered],
) -> None:
    found = rendered[FILE]
    [index] = [e for e in container(found)["env"] if e["name"] == "POD_INDEX"]
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{SERVER_INDEX}']"
    assert arguments(found)["--index"] == "$(POD_INDEX)"


def test_servers_run_in_the_masters_image_with_the_workers_account_and_the_jobs_token(
    rendered: dict[str, Rendered],
) -> None:
    found = rendered[FILE]
    pod = found.one("StatefulSet")["spec"]["template"]["spec"]
    master = found.master["spec"]["template"]["spec"]
    assert container(found)["image"] == master["containers"][0]["image"]
    assert pod["serviceAccountName"] == found.worker["spec"]["serviceAccountName"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["priorityClassName"] == "rows"
    [token] = [v for v in pod["volumes"] if v["name"] == "token"]
    [mount] = [m for m in container(found)["volumeMounts"] if m["name"] == "token"]
    assert token["secret"]["secretName"] == Names("edl").token
    assert arguments(found)["--token-file"] == f"{mount['mountPath']}/token"


def test_servers_write_checkpoints_where_the_workers_do(rendered: dict[str, Rendered], helm: Helm) -> None:
    found = rendered[FILE]
    assert arguments(found)["--checkpoint-dir"] == "/checkpoints"
    [mount] = [m for m in container(found)["volumeMounts"] if m["name"] == "checkpoints"]
    assert mount["mountPath"] == "/checkpoints"
    on_the_master = container(helm.template("mode=hybrid"))
    assert "master://checkpoints" in on_the_master["args"]
    assert {"name": "EDL_MASTER", "value": "edl-master.default.svc:8500"} in on_the_master["env"]


def test_logs_are_in_claims_that_go_with_the_release_or_in_the_pod(
    rendered: dict[str, Rendered], helm: Helm
) -> None:
    kept = rendered[FILE].one("StatefulSet")["spec"]
    [claim] = kept["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    assert kept["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    assert claim["metadata"]["name"] not in [v["name"] for v in kept["template"]["spec"]["volumes"]]
    spec = helm.template("mode=hybrid").one("StatefulSet")["spec"]
    assert "volumeClaimTemplates" not in spec
    assert {"name": "output", "emptyDir": {}} in spec["template"]["spec"]["volumes"]


@pytest.mark.parametrize(
    ("sets", "limit"),
    [
        ((), 1536 << 20),  # three quarters of the default
        (("ps.resources.limits.memory=8Gi",), 6 << 30),
        (("ps.memoryMebibytes=100",), 100 << 20),
        (("ps.memoryMebibytes=6Gi",), 6 << 30),
    ],
)
def test_the_limit_of_memory_is_below_that_of_the_container(
    helm: Helm, sets: tuple[str, ...], limit: int
) -> None:
    assert arguments(helm.template("mode=hybrid", *sets))["--memory-limit"] == str(limit)


def test_servers_write_logs_unless_the_values_say_otherwise(helm: Helm) -> None:
    assert "--no-log" not in container(helm.template("mode=hybrid"))["args"]
    assert "--no-log" in container(helm.template("mode=hybrid", "ps.log=false"))["args"]


def test_without_any_limit_of_memory_there_is_none(helm: Helm) -> None:
    assert "--memory-limit" not in arguments(helm.template("mode=hybrid", "ps.resources.limits=null"))


def test_only_workers_the_master_and_servers_reach_the_servers(rendered: dict[str, Rendered]) -> None:
    found = rendered[FILE]
    policy = found.one("NetworkPolicy", "edl-ps")["spec"]
    [rule] = policy["ingress"]
    peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]]
    assert sorted(peers) == ["master", "ps", "worker"]
    [port] = rule["ports"]
    assert port["port"] == container(found)["ports"][0]["containerPort"]
    labels = found.one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    ways = found.one("NetworkPolicy", "edl-worker")["spec"]["egress"]
    assert [way for way in ways if way.get("ports") == rule["ports"]], "restrictEgress cuts the workers off"


@pytest.mark.parametrize("mode", ["hybrid", "ps"])
def test_another_number_of_servers_is_no_other_pod_and_the_master_may_set_it(helm: Helm, mode: str) -> None:
    two, three = (helm.template(f"mode={mode}", f"ps.servers={n}") for n in (2, 3))
    pods = [found.one("StatefulSet")["spec"]["template"]["spec"] for found in (two, three)]
    assert pods[0] == pods[1]
    assert rights(two) == {"statefulsets/scale": ["patch"], "statefulsets": ["list", "watch"]}
    assert rights(helm.template("mode=train")) == {}


def test_each_row_is_on_no_more_servers_than_there_are(helm: Helm) -> None:
    with pytest.raises(Refused, match="each row is to be on more servers than there are"):
        helm.template("mode=hybrid", "ps.servers=1", "ps.replicas=2")


def test_who_reads_rows_is_let_in_by_name(helm: Helm) -> None:
    found = helm.template("mode=hybrid", "ps.clients[0].podSelector.matchLabels.app=shop")
    [rule] = found.one("NetworkPolicy", "edl-ps")["spec"]["ingress"]
    assert rule["from"][-1] == {"podSelector": {"matchLabels": {"app": "shop"}}}
    assert len(rule["from"]) == 4
    assert "shop" not in json.dumps(found.one("NetworkPolicy", "edl-master"))


def test_the_command_finds_the_token_where_the_workers_do(helm: Helm) -> None:
    def where(*sets: str) -> tuple[str, str]:
        job = helm.template("mode=hybrid", *sets).one("ConfigMap", "edl-job")
        return token_secret(FoundRelease("default", "edl", Names("edl"), job, {}))

    assert where() == (Names("edl").token, "token")
    assert where("token.existingSecret=given", "token.key=password") == ("given", "password")


def test_all_weights_may_be_on_servers_of_the_same_kind(helm: Helm) -> None:
    given = ("ps.servers=3", "ps.gradsToWait=4", "ps.maxStaleness=2", "ps.pullSteps=5")
    rendered = helm.template("mode=ps", "ps.scaleRateByStaleness=true", *given)
    assert rendered.one("StatefulSet", "edl-ps")["spec"]["replicas"] == 3
    job = config.parse(json.loads(rendered.one("ConfigMap", "edl-job")["data"]["values.json"]))
    assert job.asynchronous and job.servers == 3
    assert (job.ps.grads_to_wait, job.ps.max_staleness, job.ps.pull_steps) == (4, 2, 5)
    assert job.ps.scale_rate_by_staleness


def test_one_server_is_drained_at_a_time(helm: Helm) -> None:
    def budgets(*sets: str) -> list[str]:
        return [o["metadata"]["name"] for o in helm.template("mode=hybrid", *sets).all("PodDisruptionBudget")]

    assert budgets() == ["edl-ps"]
    assert budgets("ps.servers=1") == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("ps.servers=65",), "ps.servers"),
        (("mode=evaluate", "ps.servers=1"), "the servers would have no rows"),
        (("ps.resources.requests.memory=3Gi",), "ps.resources.requests.memory is"),
        (("ps.volumeMounts[0].name=a", "ps.volumeMounts[0].mountPath=/tmp"), "ps.volumeMounts.0.mountPath"),
    ],
)
def test_helm_and_edl_refuse_the_same(helm: Helm, sets: tuple[str, ...], words: str) -> None:
    with pytest.raises(Refused, match=words):
        helm.template("mode=hybrid", *sets)
    with pytest.raises(ConfigError, match=words):
        config.parse(values.load([], ["mode=hybrid", *sets], [], []))


def test_servers_speak_tls_with_the_masters_certificate_under_their_own_names(helm: Helm) -> None:
    release = helm.template("mode=hybrid", "tls.existingSecret=certificate")
    spec = release.one("StatefulSet")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert env["EDL_TLS_DIRECTORY"] in [m["mountPath"] for m in container["volumeMounts"]]
    [volume] = [v for v in spec["volumes"] if v["name"] == "edl-tls"]
    assert volume["secret"] == {"secretName": "certificate"}
    args = container["args"]
    host = args[args.index("--reached-at") + 1]
    assert host == "edl-ps-$(POD_INDEX).edl-ps.default.svc"
    [port] = release.one("Service", "edl-ps")["spec"]["ports"]
    assert port["appProtocol"] == "https"
    assert "--reached-at" not in str(helm.template("mode=hybrid").one("StatefulSet"))
