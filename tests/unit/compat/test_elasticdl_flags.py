# SPDX-License-Identifier: Apache-2.0
"""ElasticDL's command lines as values of edl: those of its documents, and each flag of its three ages."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.compat.elasticdl import command as elasticdl
from edl.compat.elasticdl import flags as elasticdl_flags
from edl.compat.elasticdl import names as elasticdl_names
from edl.config import parse, values
from edl.errors import ConfigError, EdlError
from tests.support.elasticdl_documents import DEVELOPMENT, GKE, ON_PREM, PREBUILT, PUBLIC_CLOUD, SPEC

MINIMUM = "--job_name=j --model_def=m.custom_model --training_data=/data "
DEFAULTS = values.defaults()
GUARANTEED = {"cpu": "2", "memory": "2048Mi"}


def job(line: str, task: str = "train") -> elasticdl_flags.Job:
    """The job of a command line, whose values are valid."""
    found = elasticdl_flags.parse(task, shlex.split(line))
    parse(values.merge(DEFAULTS, found.values))
    return found


def value(found: elasticdl_flags.Job, key: str) -> Any:
    at: Any = found.values
    for part in key.split("."):
        at = at[part]
    return at


def test_the_command_line_of_the_public_cloud() -> None:
    found = job(PUBLIC_CLOUD)
    assert (found.name, found.namespace) == ("test-mnist", "default")
    assert found.values == {
        "data": {"validation": "/data/mnist/test", "train": "/data/mnist/train", "validationFraction": 0},
        "evaluation": {"steps": 200},
        "image": {"pullPolicy": "Always"},
        "master": {
            "priorityClassName": "high",
            "resources": {"requests": GUARANTEED, "limits": GUARANTEED},
        },
        "ps": {
            "priorityClassName": "high",
            "servers": 2,
            "replaceEmbeddings": 524_288,
            "resources": {"requests": GUARANTEED, "limits": GUARANTEED},
            "volumes": [{"name": "volume-0", "persistentVolumeClaim": {"claimName": "fileserver-claim"}}],
            "volumeMounts": [{"name": "volume-0", "mountPath": "/data"}],
        },
        "logLevel": "info",
        "model": {"module": "/model_zoo/mnist_functional_api/mnist_functional_api.py"},
        "workers": 4,
        "training": {"batchSize": 256, "epochs": 5},
        "mode": "auto",
        "worker": {
            "image": {"repository": "gcr.io/project/elasticdl", "tag": "mnist"},
            "resources": {"requests": GUARANTEED, "limits": GUARANTEED},
            "volumes": [{"name": "volume-0", "persistentVolumeClaim": {"claimName": "fileserver-claim"}}],
            "volumeMounts": [{"name": "volume-0", "mountPath": "/data"}],
        },
    }
    assert any("64 records for each worker there" in note for note in found.notes)
    assert any(note.startswith("--num_minibatches_per_task: no meaning") for note in found.notes)


def test_the_command_lines_on_premises() -> None:
    found = job(ON_PREM)
    assert found.namespace == "kubemaker"
    assert value(found, "worker.image") == {"repository": "reg.docker.com/user/test-mnist", "tag": "1"}
    [build] = [note for note in found.notes if "zoo build" in note]
    assert "zoo build --image=reg.docker.com/user/test-mnist:1 ./model_zoo" in build
    amounts = {"cpu": "1", "memory": "2048Mi", "ephemeral-storage": "5000Mi"}
    assert value(found, "worker.resources") == {"requests": amounts, "limits": amounts}
    assert value(found, "mode") == "train", "no parameter servers: an all-reduce"
    prebuilt = job(PREBUILT)
    assert value(prebuilt, "worker.image") == {"repository": "reg.docker.com/user/elasticdl", "tag": "mnist"}
    assert value(prebuilt, "model.module") == "/model_zoo/mnist_functional_api/mnist_functional_api.py"


def test_the_command_lines_of_2019() -> None:
    low, high = (job(GKE.format(priority=p, workers=n)) for p, n in (("low", 2), ("high", 1)))
    assert value(low, "priorityClass") == {"create": False, "name": "low-priority"}
    assert value(high, "priorityClass") == {"create": False, "name": "high-priority"}
    assert (value(low, "training.batchSize"), value(high, "training.batchSize")) == (20, 10)
    limits = {"cpu": "3000m", "memory": "4096Mi"}
    assert value(low, "worker.resources") == {"requests": limits, "limits": limits}
    assert value(low, "master.priorityClassName") == "high-priority"
    found = job(DEVELOPMENT)
    assert value(found, "model.module") == "/model_zoo/elasticdl/python/examples/mnist_functional_api.py"
    assert value(found, "data.validation") == "/data/mnist/test"
    with pytest.raises(ConfigError, match=r"--master_addr: a worker by itself: edl worker --master"):
        job(
            "--worker_id=1 --model_file=m.py --codec_type=tf_example --master_addr=localhost:50001 "
            "--log_level=INFO"
        )


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("--use_async=true --num_ps_pods=1 --grads_to_wait=3", "ps.gradsToWait", 3),
        ("--use_async=true --num_ps_pods=1", "mode", "ps"),
        ("--num_ps_pods=2 --distribution_strategy=AllreduceStrategy", "mode", "train"),
        ("--lr_staleness_modulation=True", "ps.scaleRateByStaleness", True),
        ("--get_model_steps=4", "ps.pullSteps", 4),
        ("--checkpoint_dir=/c --checkpoint_steps=5 --keep_checkpoint_max=2", "checkpoint.keep", 2),
        ("--checkpoint_dir_for_init=/c", "initFrom.path", "/c"),
        ("--output=/o", "export.formats", ["savedmodel"]),
        ("--worker_pod_priority=0.5", "onDemandWorkers", "50%"),
        ("--worker_pod_priority=high", "onDemandWorkers", "100%"),
        ("--envs=A=1,B=x=y", "ps.env", [{"name": "A", "value": "1"}, {"name": "B", "value": "x=y"}]),
        ("--relaunch_on_worker_failure=3", "elastic.maxFailures", 3),
        (
            "--data_reader_params='columns=[\"a\"]; n=2; p=text'",
            "data.options",
            {"columns": ["a"], "n": 2, "p": "text"},
        ),
        ("--data_reader_params=reader_type=CSV", "data.format", "csv"),
        ("--loss=my_loss --feed=feed", "model.functions", {"loss": "my_loss"}),
        ("--model_def=a.b.my_model", "model.functions", {"model": "my_model"}),
        ("--log_level=CRITICAL", "logLevel", "error"),
        ("--worker_resource_request=gpu=1", "worker.resources.limits", {"nvidia.com/gpu": "1"}),
        ("--worker_image=w:2 --image_name=m:1", "worker.image", {"repository": "w", "tag": "2"}),
        ("--set training.seed=7", "training.seed", 7),
    ],
)
def test_a_flag_sets_a_value(line: str, key: str, expected: Any) -> None:
    assert value(job(MINIMUM + line), key) == expected


def test_volumes_of_each_kind() -> None:
    found = job(
        MINIMUM + "--volume='claim_name=c,mount_path=/p,sub_path=s;host_path=/h,mount_path=/q,type=Directory'"
    )
    assert value(found, "worker.volumes") == [
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "volume-1", "hostPath": {"path": "/h", "type": "Directory"}},
    ]
    mounts = [
        {"name": "volume-0", "mountPath": "/p", "subPath": "s"},
        {"name": "volume-1", "mountPath": "/q"},
    ]
    assert value(found, "ps.volumeMounts") == mounts


def test_evaluation_and_prediction_begin_from_a_checkpoint() -> None:
    line = "--job_name=j --model_def=m.custom_model --checkpoint_dir_for_init=/c "
    assert job(line + "--validation_data=/d", "evaluate").values["mode"] == "evaluate"
    found = job(line + "--prediction_data=/d --prediction_outputs_processor=P", "predict")
    assert found.values["data"] == {"predict": "/d"}
    assert value(found, "model.functions") == {"prediction_outputs_processor": "P"}
    with pytest.raises(ConfigError, match="predict: --prediction_data is missing"):
        job(line, "predict")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--num_evaluator=1", "unknown flag --num_evaluator"),
        ("--num_ps 2", "unknown flag --num_ps"),
        ("--num_epochs=0", "say how many; the value can be raised"),
        ("--restart_policy=Always", "the master replaces workers itself"),
        ("--task_fault_tolerance=false", "trained by the others"),
        ("--need_tf_config=true", "TensorFlow's own parameter servers"),
        ("--job_command='python train.py'", "edl horovod"),
        ("--populate_env_names=.*", "worker.envFrom"),
        ("--max_step=10", "edl trains whole epochs"),
        ("--volume=mount_path=/d", "expected mount_path, one of claim_name and host_path"),
        ("--worker_resource_request=cores=1", "expected cpu, memory"),
        ("--minibatch_size=many", "expected an integer"),
        ("--distribution_strategy=Other", "unknown strategy"),
        ("--data_reader_params=reader_type=ODPS", "edl reads files only"),
        ("--cluster_spec=missing.py", "there is no file missing.py"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        job(MINIMUM + line)


def test_each_known_flag_has_a_rule() -> None:
    """Flags that a command line may have are translated, refused, or said to have no meaning."""
    for flag in elasticdl_names.KNOWN:
        try:
            found = elasticdl_flags.parse("train", [*shlex.split(MINIMUM), f"{flag}=7"])
        except ConfigError:
            continue
        plain = elasticdl_flags.parse("train", shlex.split(MINIMUM))
        without = {"--model_zoo", "--model_file"}  # an image has one zoo, and --model_def is given
        assert found != plain or flag in without, flag


def test_a_cluster_spec_becomes_pod_templates(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(SPEC)
    found = job(f"{ON_PREM} --cluster_spec={tmp_path}/spec.py")
    toleration = {
        "effect": "NoSchedule",
        "key": "mycluster.com/app-pool",
        "operator": "Equal",
        "value": "elasticdl",
    }
    template = {"metadata": {"labels": {"my_app": "elasticdl"}}, "spec": {"tolerations": [toleration]}}
    assert [found.values[pod]["podTemplate"] for pod in ("master", "worker", "ps")] == [template] * 3
    assert found.values["service"] == {"type": "ClusterIP", "clusterIP": "None"}
    only_workers = """
from kubernetes import client
class cluster:
    def with_pod(pod):
        if pod.metadata.labels["elasticdl-replica-type"] == "worker":
            pod.spec.containers[0].env.append(client.V1EnvVar(name="A", value="1"))
            pod.spec.host_ipc = True
        return pod
"""
    (tmp_path / "spec.py").write_text(only_workers)
    found = job(f"{MINIMUM} --cluster_spec={tmp_path}/spec.py")
    container = {"name": "worker", "env": [{"name": "A", "value": "1"}]}
    assert found.values["worker"]["podTemplate"] == {"spec": {"containers": [container], "hostIPC": True}}
    assert "master" not in found.values
    (tmp_path / "spec.py").write_text("cluster = 1\n")
    with pytest.raises(ConfigError, match=r"with_pod\(\) of a master pod: AttributeError"):
        job(f"{MINIMUM} --cluster_spec={tmp_path}/spec.py")


def test_a_cluster_spec_as_json() -> None:
    spec = {
        "pod_spec": {"labels": {"a": "1"}, "env": [{"name": "LOG", "value": "true"}]},
        "worker_pod_spec": {"labels": {"b": "2"}},
        "service_spec": {"type": "ClusterIP", "clusterIP": "None"},
    }
    found = job(MINIMUM + f"--cluster_spec_json={shlex.quote(json.dumps(spec))}")
    assert found.values["worker"]["podTemplate"] == {"metadata": {"labels": {"a": "1", "b": "2"}}}
    assert found.values["master"]["env"] == [{"name": "LOG", "value": "true"}]
    assert found.values["service"] == {"type": "ClusterIP", "clusterIP": "None"}
    with pytest.raises(ConfigError, match="expected an object with keys of"):
        job(MINIMUM + "--cluster_spec_json='{\"pods\": 1}'")


class Context:
    """The arguments of a command, as typer gives them."""

    def __init__(self, line: str):
        self.args = shlex.split(line)


def test_helm_is_given_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    helm = tmp_path / "helm"
    helm.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\ncat > {tmp_path}/values\n')
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    elasticdl.elasticdl(Context(f"train {PREBUILT} --chart CHART"))  # type: ignore[arg-type]
    called = (tmp_path / "called").read_text().split()
    assert called == ["install", "test-mnist", "CHART", "--namespace", "kubemaker", "-f", "-"]
    assert yaml.safe_load((tmp_path / "values").read_text()) == job(PREBUILT).values
    out = capfd.readouterr().out
    assert "helm install test-mnist CHART --namespace kubemaker -f - <<'EOF'\n" in out
    printed = out.partition("<<'EOF'\n")[2].partition("EOF\n")[0]
    assert yaml.safe_load(printed) == job(PREBUILT).values
    (tmp_path / "called").unlink()
    elasticdl.elasticdl(Context(f"train {PREBUILT} --dry-run"))  # type: ignore[arg-type]
    assert not (tmp_path / "called").exists()
    helm.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(EdlError, match="helm failed with exit code 3"):
        elasticdl.elasticdl(Context(f"train {PREBUILT}"))  # type: ignore[arg-type]


def test_a_part_of_the_reader_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--data_reader_params: val: expected NAME=VALUE"):
        job(f"{ON_PREM} --data_reader_params=val")


def test_an_image_without_the_model_is_named() -> None:
    line = "--job_name=a --model_zoo=zoo --model_def=mnist.custom_model --training_data=/data"
    (note,) = [note for note in job(line).notes if "no --image_name" in note]
    assert "edl's own image of workers has no /model_zoo/mnist.py. Build one with it" in note
    assert not [n for n in job(f"{line} --image_name=mine:1").notes if "no --image_name" in n]


def test_the_zoo_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    elasticdl.elasticdl(Context("zoo init --help"))  # type: ignore[arg-type]
    assert "edl elasticdl zoo init|build|push" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mnist_functional_api.py").write_text("def custom_model():\n    return 1\n")
    elasticdl.elasticdl(Context("zoo init"))  # type: ignore[arg-type]
    assert "COPY . /model_zoo" in (tmp_path / "Dockerfile").read_text()
    assert "module: /model_zoo/mnist/mnist_functional_api.py\n" in (tmp_path / "values.yaml").read_text()
    told = capsys.readouterr().out
    assert "no model found" not in told and "next: edl elasticdl zoo build --image" in told
    called: list[list[str]] = []

    def call(command: list[str]) -> int:
        called.append(command)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr("edl.cli.tools.image._tool", lambda: "docker")
    elasticdl.elasticdl(Context("zoo build --image=gcr.io/project/elasticdl:mnist ."))  # type: ignore[arg-type]
    elasticdl.elasticdl(Context("zoo push gcr.io/project/elasticdl:mnist"))  # type: ignore[arg-type]
    assert called[0][-3:] == ["-t", "gcr.io/project/elasticdl:mnist", "."]
    assert called[1] == ["docker", "push", "gcr.io/project/elasticdl:mnist"]
    with pytest.raises(ConfigError, match="expected an image of edl's workers"):
        elasticdl.elasticdl(Context("zoo init --base_image=python:3.6"))  # type: ignore[arg-type]
