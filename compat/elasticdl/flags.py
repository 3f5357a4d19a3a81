# SPDX-License-Identifier: Apache-2.0
"""The flags of ElasticDL's command line, in its three ages, as values of edl (docs/coming-from-elasticdl.md).

A flag that has no meaning in edl adds a line that says so. A flag that cannot be honoured is refused with the
reason, and an unknown one by its name: ElasticDL dropped these silently.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from edl.compat.elasticdl import cluster as elasticdl_cluster
from edl.compat.elasticdl.names import FUNCTIONS, KNOWN, NO_MEANING, OLDER, ONLY, PODS, REFUSED, VALUES
from edl.config import helm_set, values
from edl.errors import ConfigError

TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"
MODELS = "/model_zoo"  # folder of the models in an image of `edl elasticdl zoo build`
LARGE = 524_288  # values of an Embedding that ElasticDL moved to parameter servers: 2 MB


@dataclass
class Job:
    """What a command line of ElasticDL amounts to.

    Args:
        values: the values that differ from edl's defaults.
        notes: lines about flags, for people.
        name, namespace: of the Helm release.
        output: the path of the trained model; empty without one.
        render: a file for the rendered objects, which are not installed then; empty: install.
        local, dry_run, chart: flags of edl: run processes here; only print; the chart.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    name: str = ""
    namespace: str = "default"
    output: str = ""
    render: str = ""
    local: bool = False
    dry_run: bool = False
    chart: str = "chart"

    def set(self, key: str, value: Any) -> None:
        """Set the value of a dotted key."""
        *sections, last = key.split(".")
        into = self.values
        for section in sections:
            into = into.setdefault(section, {})
        into[last] = value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def parse(task: str, line: Sequence[str]) -> Job:
    """Translate a command line.

    Args:
        task: train, evaluate or predict.
        line: the arguments after it.

    Raises:
        ConfigError: a flag is unknown or cannot be honoured, or its value is malformed.
    """
    parser = _Parser(prog=f"edl elasticdl {task}", allow_abbrev=False, add_help=False)
    for flag in KNOWN:
        parser.add_argument(flag, dest=OLDER.get(flag, flag))
    parser.add_argument("--dry-run", action="store_true", dest="dry_run")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--chart", default="chart")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    found, unknown = parser.parse_known_args([*line])
    if unknown:
        raise ConfigError(f"edl elasticdl {task}: unknown flag {unknown[0].partition('=')[0]}")
    ours = ("dry_run", "local", "chart", "sets")
    given = {flag: text for flag, text in vars(found).items() if text is not None and flag not in ours}
    job = Job(dry_run=found.dry_run, local=found.local, chart=found.chart)
    _refuse(task, given)
    for rule in (_general, _data, _model, _training, _servers, _image, _pods, _volumes):
        rule(job, task, given)
    if task == TRAIN:
        job.set("data.validationFraction", 0)  # ElasticDL evaluates on validation data only
    else:
        job.set("mode", task)
    if "--cluster_spec" in given or "--cluster_spec_json" in given:
        overlay = elasticdl_cluster.overlays(
            given.get("--cluster_spec", ""), given.get("--cluster_spec_json", ""), job.name
        )
        job.values = values.merge(job.values, overlay)
    for text in found.sets:
        helm_set.parse_set(text, job.values)
    return job


def _refuse(task: str, given: Mapping[str, str]) -> None:
    """Refuse flags that cannot be honoured.

    Raises:
        ConfigError: there is one.
    """
    for flag in given:
        if flag in REFUSED:
            raise ConfigError(f"edl elasticdl {task} {flag}: {REFUSED[flag]}")
        if flag in ONLY and given[flag].lower() != ONLY[flag][0]:
            raise ConfigError(f"edl elasticdl {task} {flag}={given[flag]}: {ONLY[flag][1]}")


def _general(job: Job, task: str, given: Mapping[str, str]) -> None:
    job.notes += [f"{flag}: no meaning: {why}" for flag, why in NO_MEANING.items() if flag in given]
    job.notes += [f"{flag}: no meaning: {ONLY[flag][1]}" for flag in ONLY if flag in given]
    job.name, job.namespace = given.get("--job_name", ""), given.get("--namespace", "default")
    if not job.name:
        raise ConfigError(f"edl elasticdl {task}: --job_name is missing")
    job.render, job.output = given.get("--yaml", ""), given.get("--output", "")
    for flag, key in VALUES.items():
        if flag in given:
            job.set(key, _typed(given[flag]))
    if level := given.get("--log_level", "").lower():
        job.set("logLevel", "error" if level in ("critical", "fatal") else level)


def _data(job: Job, task: str, given: Mapping[str, str]) -> None:
    needed = {TRAIN: "--training_data", EVALUATE: "--validation_data", PREDICT: "--prediction_data"}[task]
    for flag in (needed, *(() if task == TRAIN else ("--checkpoint_dir_for_init",))):
        if not given.get(flag):
            raise ConfigError(f"edl elasticdl {task}: {flag} is missing")
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in given.get("--data_reader_params", "").split(";"))):
        name, equals, text = part.partition("=")
        if not (equals and name.strip()):
            raise ConfigError(
                f"edl elasticdl --data_reader_params: {part}: expected NAME=VALUE, separated by semicolons"
            )
        options[name.strip()] = _literal(text.strip())
    kind = str(options.pop("reader_type", "")).lower()
    if kind == "odps":
        raise ConfigError("edl elasticdl --data_reader_params: reader_type is ODPS, and edl reads files only")
    if kind:
        job.set("data.format", "csv" if kind == "csv" else "recordio")
    if options:
        job.set("data.options", options)


def _model(job: Job, task: str, given: Mapping[str, str]) -> None:
    zoo, function = given.get("--model_zoo", ""), ""
    if "--model_def" in given:
        *path, function = given["--model_def"].split(".")
        if not path:
            raise ConfigError(
                f"edl elasticdl --model_def={function}: expected FILE.FUNCTION, as in mnist.custom_model"
            )
        file = "/".join(path) + ".py"
    elif "--model_file" in given:
        file = given["--model_file"]
    else:
        raise ConfigError(f"edl elasticdl {task}: --model_def is missing")
    folder = zoo if job.local or zoo.startswith("/") else MODELS
    joined = file if file.startswith("/") or not folder else f"{folder.rstrip('/')}/{file.removeprefix('./')}"
    job.set("model.module", joined)
    named = {name: given[f"--{name}"] for name in FUNCTIONS if given.get(f"--{name}")}
    functions = {name: text for name, text in named.items() if text != FUNCTIONS[name]}
    if function not in ("", "custom_model", "CustomModel"):
        functions["model"] = function
    if functions:
        job.set("model.functions", functions)


def _training(job: Job, task: str, given: Mapping[str, str]) -> None:
    workers, size = _whole(given, "--num_workers", 2), _whole(given, "--minibatch_size", 64)
    job.set("workers", workers)
    key = {TRAIN: "training.batchSize", EVALUATE: "evaluation.batchSize"}.get(task)
    if key:
        job.set(key, size * workers)
        job.notes.append(
            f"--minibatch_size: {size} records for each worker there, and for all workers here: {key} "
            f"is {size} x "
            f"{workers} = {size * workers}"
        )
    if task == TRAIN:
        epochs = _whole(given, "--num_epochs", 1)
        if epochs < 1:
            raise ConfigError(
                f"edl elasticdl train --num_epochs={epochs}: say how many; the value can be raised "
                f"while the job runs"
            )
        job.set("training.epochs", epochs)


def _servers(job: Job, task: str, given: Mapping[str, str]) -> None:
    strategy = given.get("--distribution_strategy", "ParameterServerStrategy")
    if strategy not in ("", "Local", "AllreduceStrategy", "ParameterServerStrategy"):
        raise ConfigError(f"edl elasticdl {task} --distribution_strategy={strategy}: unknown strategy")
    servers = _whole(given, "--num_ps_pods", 0)
    wait, workers = _whole(given, "--grads_to_wait", 1), job.values["workers"]
    if strategy != "ParameterServerStrategy" or not servers:
        if task == TRAIN:
            job.set("mode", "train")
        job.notes += [
            f"{flag}: no meaning without parameter servers: a step has the gradients of all workers"
            for flag in ("--grads_to_wait", "--use_async", "--sync_version_tolerance")
            if flag in given
        ]
        return
    job.set("ps.servers", servers)
    if task != TRAIN:
        return
    if given.get("--use_async", "false").lower() == "true":
        job.set("mode", "ps")
        job.set("ps.gradsToWait", wait)
        return
    job.set("mode", "auto")
    job.set("ps.replaceEmbeddings", LARGE)
    job.notes.append(
        "--distribution_strategy: synchronous: embeddings of 2 MB and more are on parameter servers, "
        "all other weights "
        "in the ring; --use_async=true puts all weights on servers"
    )
    if "--grads_to_wait" in given and wait not in (1, workers):
        job.notes.append(f"--grads_to_wait={wait}: each step has the gradients of all {workers} workers")
    if "--sync_version_tolerance" in given:
        job.notes.append(
            "--sync_version_tolerance: no meaning: gradients of a step are never of a different version"
        )


def _image(job: Job, task: str, given: Mapping[str, str]) -> None:
    base = given.get("--image_base", "")
    image = given.get("--worker_image") or given.get("--image_name") or base
    prefix = given.get("--docker_image_prefix") or given.get("--repository") or ""
    if prefix:
        image = f"{prefix.rstrip('/')}/{job.name}:1"
        zoo = given.get("--model_zoo") or "."
        job.notes.append(
            f"train does not build an image. Before: edl elasticdl zoo init --model_zoo={zoo} && edl "
            f"elasticdl zoo build "
            f"--image={image} {zoo} && edl elasticdl zoo push {image}"
        )
    if image:
        repository, colon, tag = image.rpartition(":")
        if not colon or "/" in tag:
            repository, tag = image, "latest"
        job.set("worker.image", {"repository": repository, "tag": tag})
        job.notes.append(
            f"{image}: the image of the workers, built on edl's; the master keeps edl's own image"
        )
    elif not job.local and (module := str(job.values["model"]["module"])).startswith(f"{MODELS}/"):
        job.notes.append(
            f"no --image_name: edl's own image of workers has no {module}. Build one with it (edl elasticdl "
            "zoo init, build and push) and name it, or set worker.image, or mount the models (--volume)"
        )


def _pods(job: Job, task: str, given: Mapping[str, str]) -> None:
    for pod in PODS:
        request = _amounts(given.get(f"--{pod}_resource_request", ""), given, pod, "request")
        limit = _amounts(given.get(f"--{pod}_resource_limit", ""), given, pod, "limit")
        if request or limit:
            job.set(f"{pod}.resources", {"requests": request or limit, "limits": {**request, **limit}})
    priority = given.get("--worker_pod_priority", "")
    share = re.fullmatch(r"0?\.\d+|1\.0*", priority)
    if priority == "high" or share:
        job.set("onDemandWorkers", f"{round(float(priority) * 100)}%" if share else "100%")
        job.set("worker.onDemandPriorityClassName", "high")
    elif priority == "low":
        job.notes.append("--worker_pod_priority=low: the chart creates a priority class below ordinary pods")
    elif priority:
        job.set("priorityClass", {"create": False, "name": priority})
    if envs := given.get("--envs"):
        pairs = [part.partition("=") for part in envs.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise ConfigError(f"edl elasticdl --envs={envs}: expected NAME=VALUE,NAME=VALUE")
        for pod in PODS:
            job.set(f"{pod}.env", [{"name": name, "value": text} for name, _, text in pairs])


def _volumes(job: Job, task: str, given: Mapping[str, str]) -> None:
    volumes, mounts = [], []
    for number, text in enumerate(filter(None, given.get("--volume", "").split(";"))):
        how = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        unknown = set(how) - {"claim_name", "host_path", "type", "mount_path", "sub_path"}
        if unknown or "mount_path" not in how or ("claim_name" in how) == ("host_path" in how):
            raise ConfigError(
                f"edl elasticdl --volume={text}: expected mount_path, one of claim_name and host_path, "
                f"and perhaps "
                "sub_path and type"
            )
        name = f"volume-{number}"
        if "claim_name" in how:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": how["claim_name"]}})
        else:
            kind = {"type": how["type"]} if how.get("type") else {}
            volumes.append({"name": name, "hostPath": {"path": how["host_path"], **kind}})
        sub = {"subPath": how["sub_path"]} if how.get("sub_path") else {}
        mounts.append({"name": name, "mountPath": how["mount_path"], **sub})
    for pod in ("worker", "ps") if volumes else ():
        job.set(f"{pod}.volumes", volumes)
        job.set(f"{pod}.volumeMounts", mounts)
    if job.output:
        job.set("export.formats", ["savedmodel"])
        if not job.local:
            job.notes.append(
                f"--output={job.output}: the SavedModel is written to a volume of its own, which lasts: "
                f"set one of "
                "output.existingClaim, output.hostPath and output.size with --set"
            )


def _amounts(text: str, given: Mapping[str, str], pod: str, kind: str) -> dict[str, str]:
    """Amounts of resources of a pod, by Kubernetes' names.

    Raises:
        ConfigError: the text is no list of NAME=AMOUNT, or a name is unknown.
    """
    names = {"cpu": "cpu", "memory": "memory", "disk": "ephemeral-storage", "gpu": "nvidia.com/gpu"}
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, amount = (piece.strip() for piece in part.partition("="))
        if not equals or not (name in names or name == "ephemeral-storage" or "/" in name):
            raise ConfigError(
                f"edl elasticdl --{pod}_resource_{kind}: {part!r}: expected cpu, memory, disk, "
                f"ephemeral-storage or gpu, "
                "as in cpu=1,memory=4096Mi"
            )
        found[names.get(name, name)] = amount
    old = {what: given.get(f"--{pod}_{what}_{kind}") for what in ("cpu", "memory")}
    return found | {what: amount for what, amount in old.items() if amount}


def _typed(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _whole(given: Mapping[str, str], flag: str, default: int) -> int:
    try:
        return int(given.get(flag, default))
    except ValueError:
        raise ConfigError(f"edl elasticdl {flag}={given[flag]}: expected an integer") from None
