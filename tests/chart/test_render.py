# SPDX-License-Identifier: Apache-2.0
"""What `helm install` would make: the master is given the job, and each pod what the values say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from edl import config
from edl.config import values
from tests.chart.conftest import CHART, CLASS, Helm, Refused, Rendered, labels


def test_the_master_is_told_the_job_and_nothing_else(rendered: dict[str, Rendered]) -> None:
    for name, release in rendered.items():
        files = [CHART / "ci" / name] if name else []
        assert release.values.keys() == set(config.JOB)
        said = values.load(files)
        said["local"]["threads"] = 0  # which is about `edl run` only
        if release.all("PersistentVolumeClaim") and not said["checkpoint"]["dir"]:
            said["checkpoint"]["dir"] = "master://checkpoints"
        assert config.parse(release.values) == config.parse(said)


def test_the_masters_object_does_not_grow_with_what_it_need_not_know(helm: Helm) -> None:
    before, after = helm.template(), helm.template("master.nodeSelector.disk=fast", "commonAnnotations.a=b")
    assert before.job["data"]["values.json"] == after.job["data"]["values.json"]


def test_a_whole_number_stays_one_however_large(helm: Helm) -> None:
    text = helm.template("training.seed=2147483647").job["data"]["values.json"]
    assert '"seed": 2147483647' in text


@pytest.mark.parametrize(
    "change",
    [
        "workers=7",
        "suspend=true",
        "training.epochs=9",
        "worker.resources.limits.memory=9Gi",
        "logLevel=debug",
        "model.source=x",
        "worker.image.tag=v9",
        "onDemandWorkers=1",
        "elastic.joinDelaySeconds=0.5",
    ],
)
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


def test_the_masters_service_has_the_address_that_the_values_ask_for(helm: Helm) -> None:
    def address(*sets: str) -> object:
        return helm.template(*sets).service["spec"].get("clusterIP", "chosen by Kubernetes")

    assert address() == "chosen by Kubernetes"
    assert address("service.clusterIP=None") == "None"
    assert address("service.clusterIP=10.96.7.7", "service.type=NodePort") == "10.96.7.7"
    with pytest.raises(Refused, match=r'service\.type is "NodePort" and service\.clusterIP is "None"'):
        address("service.clusterIP=None", "service.type=NodePort")
    with pytest.raises(Refused, match="/service/clusterIP"):
        address("service.clusterIP=headless")


def test_the_workers_pod_needs_only_a_name(rendered: dict[str, Rendered]) -> None:
    pod = rendered[""].worker
    assert "name" not in pod["metadata"]
    assert pod["spec"]["restartPolicy"] == "Never"
    [container] = pod["spec"]["containers"]
    assert (container["name"], container["command"]) == (
        "worker",
        ["python", "-P", "-m", "edl.trainer.supervisor"],
    )
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert env["EDL_MASTER"] == "edl-master.default.svc:8500"
    assert env["EDL_RING_INTERFACE"] == "eth0"
    assert "TF_NUM_INTRAOP_THREADS" in env
    assert rendered[""].service["spec"]["ports"][0]["port"] == 8500


@pytest.mark.parametrize(
    ("said", "classes"),
    [
        ("0", {"worker.yaml": CLASS}),
        ("0%", {"worker.yaml": CLASS}),
        ("1", {"worker.yaml": CLASS, "worker-high.yaml": None}),
        ("50%", {"worker.yaml": CLASS, "worker-high.yaml": None}),
    ],
)
def test_some_workers_may_have_a_higher_priority(
    helm: Helm, said: str, classes: dict[str, str | None]
) -> None:
    data = helm.template(f"onDemandWorkers={said}").job["data"]
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
    assert mounts.keys() == {
        *("/tmp", "/var/lib/edl", "/etc/edl/token"),
        *("/data", "/models", "/checkpoints"),
    }
    assert mounts["/data"]["readOnly"] and mounts["/models"]["readOnly"]
    assert mounts["/checkpoints"] == {"name": "checkpoints", "mountPath": "/checkpoints"}
    account = {"secretRef": {"name": "store-account"}}
    assert release.worker["spec"]["containers"][0]["envFrom"] == [account]
    assert "envFrom" not in release.master["spec"]["template"]["spec"]["containers"][0]
    claim = release.one("PersistentVolumeClaim", "edl-output")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"] == {"requests": {"storage": "5Gi"}}


def test_the_masters_claim_stays_while_something_is_on_it_and_is_kept_afterwards(helm: Helm) -> None:
    def claims(*sets: str) -> list[Any]:
        release = helm.template(*sets)
        found = release.all("PersistentVolumeClaim")
        assert bool(found) == ("EDL_STORES" in str(release.master)), sets
        return found

    elsewhere, kept = "checkpoint.dir=s3://states/a", {"helm.sh/resource-policy": "keep"}
    [claim] = claims()
    assert claim["metadata"]["annotations"] == kept
    assert claims(elsewhere) == [claim], "the trained model is on it"
    assert claims("output.existingClaim=models") == [claim], "checkpoints are on it"
    assert claims(elsewhere, "output.existingClaim=models") == [], "Helm keeps what it had created"
    [claim] = claims("storage.keep=false")
    assert "annotations" not in claim["metadata"]


@pytest.mark.parametrize(
    "sets",
    [
        ("mode=evaluate", "initFrom.path=s3://models/model.keras"),
        ("mode=predict", "prediction.dir=s3://models/predictions"),
        ("mode=predict", "output.existingClaim=kept"),
        ("mode=horovod", "model.script=/train.py"),
    ],
)
def test_a_job_that_has_nothing_on_the_masters_volume_has_none(helm: Helm, sets: tuple[str, ...]) -> None:
    release = helm.template(*sets)
    assert not release.all("PersistentVolumeClaim") and "EDL_STORES" not in str(release.master)


def test_evaluation_and_prediction_use_the_masters_volume_for_what_has_no_other_place(helm: Helm) -> None:
    model = "initFrom.path=master://run-first/model.keras"
    for sets, predictions in (
        (("mode=evaluate", model), ""),
        (("mode=predict",), "master://predictions"),
        (("mode=predict", model, "prediction.dir=s3://a/b"), "s3://a/b"),
        (("mode=predict", model, "output.existingClaim=kept"), ""),
    ):
        release = helm.template(*sets)
        assert release.one("PersistentVolumeClaim", "edl-storage") and "EDL_STORES" in str(release.master)
        dirs = [release.values[section]["dir"] for section in ("prediction", "checkpoint")]
        assert dirs == [predictions, ""], sets
        assert "EDL_RESULTS" not in str(release.worker), "nothing is sent at the end"
    with pytest.raises(Refused, match=r"the master's volume, and it has none: storage\.size is empty"):
        helm.template("mode=evaluate", model, "storage.size=")


def test_workers_and_no_other_pods_are_in_the_queue(helm: Helm) -> None:
    label = "kueue.x-k8s.io/queue-name"
    release = helm.template("queueName=team-a", "mode=hybrid")
    assert release.worker["metadata"]["labels"][label] == "team-a"
    assert label not in str(release.master) + str(release.one("StatefulSet"))
    assert label not in str(helm.template().worker)


def test_what_a_pod_may_have_is_passed_on_for_master_and_worker(rendered: dict[str, Rendered]) -> None:
    release = rendered["everything-values.yaml"]
    said = yaml.safe_load((CHART / "ci" / "everything-values.yaml").read_text())["worker"]
    for pod in (release.master["spec"]["template"], release.worker):
        spec, [ours, beside] = pod["spec"], pod["spec"]["containers"]
        assert beside["name"] == "beside"
        for key in (
            "nodeSelector",
            "tolerations",
            "affinity",
            "initContainers",
            "priorityClassName",
            "runtimeClassName",
            "schedulerName",
            "terminationGracePeriodSeconds",
        ):
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
    one = helm.template("storage.size=").master["spec"]
    assert one["replicas"] == 1
    assert one["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    with_a_volume = rendered[""].master["spec"]
    assert with_a_volume["strategy"] == {"type": "Recreate"}, "the volume may be for one node at a time"
    assert "affinity" not in one["template"]["spec"]
    assert not rendered[""].all("PodDisruptionBudget")
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
        2,
        {"maxSurge": 0, "maxUnavailable": 1},
    )
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
        "nodeAffinity": {"x": "y"},
        "podAntiAffinity": affinity,
    }
    own = "master.affinity.podAntiAffinity.x=y"
    assert helm.template("master.replicas=2", own).master["spec"]["template"]["spec"]["affinity"] == {
        "podAntiAffinity": {"x": "y"}
    }


def test_the_overlay_is_merged_by_name(rendered: dict[str, Rendered], helm: Helm) -> None:
    release = rendered["everything-values.yaml"]
    for pod in (release.master["spec"]["template"], release.worker):
        assert pod["metadata"]["annotations"].items() >= {
            ("example.org/injected", "false"),
            ("example.org/more", "1"),
        }
        assert pod["spec"]["hostAliases"] == [{"ip": "10.1.2.3", "hostnames": ["store"]}]
        names = [v["name"] for v in pod["spec"]["volumes"]]
        assert [n for n in names if n != "token"] == ["tmp", "output", "certificates", "scratch"]
        assert pod["spec"]["volumes"][0]["emptyDir"] == {"sizeLimit": "1Gi"}
    pod = helm.template(
        "worker.podTemplate.spec.containers[0].name=worker",
        "elastic.prefork=false",
        "worker.podTemplate.spec.containers[0].stdin=true",
    ).worker
    [container] = pod["spec"]["containers"]
    assert container["stdin"] is True
    assert container["command"] == ["python", "-P", "-m", "edl.trainer"]


def test_a_variable_in_the_overlay_takes_no_other_away(helm: Helm) -> None:
    container = "worker.podTemplate.spec.containers[0]"
    pod = helm.template(
        f"{container}.name=worker",
        f"{container}.env[0].name=TZ",
        f"{container}.env[0].value=UTC",
        f"{container}.env[1].name=POD_NAME",
        f"{container}.env[1].value=mine",
        f"{container}.volumeMounts[0].name=tmp",
        f"{container}.volumeMounts[0].mountPath=/tmp",
        f"{container}.volumeMounts[0].subPath=x",
    ).worker
    [container] = pod["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    assert env["EDL_TOKEN_FILE"]["value"] == "/etc/edl/token/token"
    assert (env["TZ"]["value"], env["POD_NAME"]) == ("UTC", {"name": "POD_NAME", "value": "mine"})
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/tmp", "/var/lib/edl", "/etc/edl/token"]
    assert container["volumeMounts"][0]["subPath"] == "x"


@pytest.mark.parametrize(
    ("sets", "image"),
    [
        ([], "edl-worker:0.2.0"),
        (["image.tag=v7"], "edl-worker:v7"),
        (["image.tag=v7", "worker.image.tag=mine"], "edl-worker:mine"),
        (["image.registry=r.example.org:5000/team/"], "r.example.org:5000/team/edl-worker:0.2.0"),
        ([f"worker.image.digest=sha256:{'ab' * 32}"], f"edl-worker@sha256:{'ab' * 32}"),
    ],
)
def test_the_image_has_a_registry_a_tag_or_a_digest(helm: Helm, sets: list[str], image: str) -> None:
    assert helm.template(*sets).worker["spec"]["containers"][0]["image"] == image


def test_objects_of_ones_own_go_with_the_release(rendered: dict[str, Rendered]) -> None:
    names = rendered["everything-values.yaml"].names()
    assert {"ConfigMap/more", "ConfigMap/edl-trainer-also"} <= set(names)


def test_a_variable_of_ones_own_takes_the_place_of_ours(helm: Helm) -> None:
    pod = helm.template("worker.env[0].name=EDL_RING_INTERFACE", "worker.env[0].value=net1").worker
    env = [e for e in pod["spec"]["containers"][0]["env"] if e["name"] == "EDL_RING_INTERFACE"]
    assert env == [{"name": "EDL_RING_INTERFACE", "value": "net1"}]


def test_no_label_of_ones_own_changes_what_selects_a_pod(helm: Helm) -> None:
    flags = [f"{where}.app\\.kubernetes\\.io/component=x" for where in ("commonLabels", "worker.podLabels")]
    release = helm.template(*flags)
    assert release.worker["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    assert release.master["spec"]["template"]["metadata"]["labels"].items() >= labels("edl", "master").items()


def test_what_stands_above_the_components_is_for_all_pods_unless_one_overrides_it(helm: Helm) -> None:
    release = helm.template(
        "mode=hybrid",
        "global.imageRegistry=registry.example",
        "global.imagePullSecrets[0]=pull",
        "nodeSelector.pool=a",
        "ps.nodeSelector.disk=fast",
        "tolerations[0].key=spot",
        "podLabels.team=vision",
        "worker.podLabels.team=text",
        "podAnnotations.note=x",
    )
    selectors = [spec["nodeSelector"] for _, spec in release.pods()]
    assert sorted(map(str, selectors)) == sorted(map(str, [{"pool": "a"}] * 3 + [{"disk": "fast"}]))
    for _, spec in release.pods():
        assert spec["containers"][0]["image"].startswith("registry.example/edl-")
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert "spot" in [t["key"] for t in spec["tolerations"]]
    master, worker = release.master["spec"]["template"]["metadata"], release.worker["metadata"]
    assert (master["labels"]["team"], worker["labels"]["team"]) == ("vision", "text")
    assert master["annotations"]["note"] == worker["annotations"]["note"] == "x"
    own = helm.template("global.imageRegistry=a.example", "image.registry=b.example").worker
    assert own["spec"]["containers"][0]["image"].startswith("b.example/")


@pytest.mark.parametrize(
    ("cloud", "selector", "taint", "seconds"),
    [
        ("gke", {"cloud.google.com/gke-spot": "true"}, ["cloud.google.com/gke-spot"], 15),
        ("eks", {"eks.amazonaws.com/capacityType": "SPOT"}, [], 30),
        (
            "aks",
            {"kubernetes.azure.com/scalesetpriority": "spot"},
            ["kubernetes.azure.com/scalesetpriority"],
            30,
        ),
        ("karpenter", {"karpenter.sh/capacity-type": "spot"}, [], 30),
    ],
)
def test_workers_alone_run_on_the_spot_machines_of_a_cloud(
    helm: Helm, cloud: str, selector: dict[str, str], taint: list[str], seconds: int
) -> None:
    flags = ("nodeSelector.pool=a", "tolerations[0].key=mine", "worker.tolerations[0].key=own")
    release = helm.template(f"worker.spot={cloud}", *flags)
    worker, master = release.worker["spec"], release.master["spec"]["template"]["spec"]
    assert worker["nodeSelector"] == {"pool": "a", **selector}
    assert [t["key"] for t in worker["tolerations"]] == ["own", *taint]
    assert worker["terminationGracePeriodSeconds"] == seconds
    assert master["nodeSelector"] == {"pool": "a"} and master["terminationGracePeriodSeconds"] == 30
