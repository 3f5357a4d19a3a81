# SPDX-License-Identifier: Apache-2.0
"""The typed configuration of a job: its types and limits. Defaults are in chart/values.yaml.

`parse` turns a mapping of values into a frozen `Config`, or reports all mistakes at once: for each its dotted
key, the value found, and the expected value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from edl.config import model_check as source_module
from edl.config.chart import Chart, ServerPod, WorkerValues
from edl.config.messages import in_words
from edl.config.paths import known, open_maps
from edl.config.renamed import without_outdated
from edl.config.rules import impossible
from edl.config.types import (
    AtLeastHalf,
    Bytes,
    Count,
    GpuMemory,
    GpuShare,
    Int,
    LessThanOne,
    Mebibytes,
    MebibytesOrNone,
    NotNegative,
    ObjectName,
    Positive,
    Readers,
    RunName,
    Section,
    Share,
)
from edl.contract import modes
from edl.contract.evaluation import ROUND_PARTS, EvaluationPlan
from edl.contract.modes import MAX_SERVERS
from edl.contract.steps import Steps
from edl.errors import ConfigError

LIVE: dict[str, JsonValue] = {"live": True}
RESULT: dict[str, JsonValue] = {"result": True}  # determines the trained model: fixed once a run has ended
MAX_SCRIPT = 65_536  # characters; the job's status holds them, too
SHARE: dict[str, JsonValue] = {"allowed": "an integer, at least 0, or a share such as 50%"}
READERS: dict[str, JsonValue] = {"allowed": "auto, or an integer from 0 to 64"}
GPU_SHARE: dict[str, JsonValue] = {"allowed": "auto, or a number from 0 to 1"}
GPU_MEMORY: dict[str, JsonValue] = {"allowed": "growth, all, a quantity such as 4Gi, or an integer (MiB)"}
PATH: dict[str, JsonValue] = {"allowed": "an absolute path"}


class Model(Section):
    """`model`: the user's module, by name, by path or as text, and the volume that holds it."""

    module: str = Field(min_length=1)
    functions: dict[str, str]
    source: str = Field(max_length=source_module.MAX_CHARACTERS)
    script: str = Field(max_length=MAX_SCRIPT)
    arguments: list[str]
    existing_claim: ObjectName
    host_path: str
    mount_path: str = Field(pattern="^/", json_schema_extra=PATH)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        if self.script:
            return "model.script" if self.has_script_text else self.script
        return "model.source" if self.source else self.module

    @property
    def has_script_text(self) -> bool:
        """Whether `script` is the text of a script, and not the path of its file."""
        return "\n" in self.script


class Training(Section):
    """`training`: epochs, batches and the seed, and how gradients are combined."""

    epochs: Int = Field(ge=1, lt=1 << 24, json_schema_extra=LIVE | RESULT)  # exact as float32
    batch_size: Int = Field(ge=1, lt=1 << 24)
    seed: Int = Field(ge=0, lt=1 << 31)
    on_non_finite: Literal["stop", "skip"]
    on_inexact_loss: Literal["warn", "refuse", "allow"]
    load_balancing: Literal["none", "speed"]
    accumulate_steps: Int = Field(ge=1, lt=1 << 24)
    deterministic: bool
    compression: Literal["none", "float16", "bfloat16"]


class Data(Section):
    """`data`: the records, their order, the read-ahead buffer, and the volume of the data."""

    train: str
    validation: str
    test: str
    predict: str
    format: str
    features: list[Annotated[str, Field(min_length=1)]]
    label: str
    weight: str
    options: dict[str, JsonValue]
    validation_fraction: LessThanOne
    shuffle: bool
    workers: Readers = Field(json_schema_extra=READERS)
    buffer_mebibytes: Mebibytes
    max_bad_records: Count = Field(ge=0)
    allow_empty: bool
    existing_claim: ObjectName
    host_path: str
    mount_path: str = Field(pattern="^/", json_schema_extra=PATH)

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each split that a value names."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: address for split, address in {**named, "predict": self.predict}.items() if address}


class Elastic(Section):
    """`elastic`: timeouts in seconds, after which workers are replaced, and how replacements start."""

    heartbeat_timeout_seconds: AtLeastHalf
    startup_timeout_seconds: Positive
    step_timeout_seconds: Positive
    join_delay_seconds: NotNegative
    grace_period_seconds: NotNegative
    master_outage_timeout_seconds: NotNegative
    max_failures: Count = Field(ge=0)
    prefork: bool
    disk_full_timeout_seconds: NotNegative


class Evaluation(Section):
    """`evaluation`: when the model is evaluated, and on which records."""

    split: Literal["validation", "test"]
    steps: Count = Field(ge=0)
    epochs: Count = Field(ge=0)
    batch_size: Int = Field(ge=1, lt=1 << 24)


class Prediction(Section):
    """`prediction`: where and in which files predictions are written."""

    part_records: Int = Field(ge=1, lt=1 << 24)
    format: Literal["npz", "parquet"]
    dir: str


class Checkpoint(Section):
    """`checkpoint`: where and how often the state is written, and how much of it is kept."""

    dir: str
    seconds: NotNegative
    steps: Count = Field(ge=0)
    keep: Count = Field(ge=0)
    best: str
    best_mode: Literal["min", "max"]
    resume: bool
    force: bool
    existing_claim: ObjectName
    existing_secret: ObjectName
    host_path: str


class InitFrom(Section):
    """`initFrom`: the checkpoint of a different job from which training starts."""

    path: str
    state: Literal["weights", "everything"]


def _with_keras(formats: list[str]) -> list[str]:
    """Put Keras' own format first: each model is saved in it anyhow."""
    return list(dict.fromkeys(["keras", *formats]))


class Export(Section):
    """`export`: the formats of the trained model. The Keras format comes first, and is always among them."""

    formats: Annotated[list[Literal["keras", "savedmodel", "onnx"]], AfterValidator(_with_keras)]
    verify: bool

    @property
    def further(self) -> tuple[str, ...]:
        """The formats other than Keras' own."""
        return tuple(self.formats[1:])


class Journal(Section):
    """`journal`: the size at which old segments are deleted."""

    max_bytes: Bytes


class Report(Section):
    """`report`: what the report of a job needs to know beside its journal."""

    price_per_worker_hour: NotNegative


class Servers(Section):
    """`ps`: the number of parameter servers, and how they apply steps."""

    servers: Int = Field(ge=0, le=MAX_SERVERS, json_schema_extra=LIVE)
    replicas: Int = Field(ge=1, le=2)
    timeout_seconds: Positive
    log: bool
    memory_mebibytes: MebibytesOrNone
    grads_to_wait: Int = Field(ge=1, lt=1 << 24)
    max_staleness: Count = Field(ge=0)
    scale_rate_by_staleness: bool
    pull_steps: Int = Field(ge=1, lt=1 << 24)
    replace_embeddings: Count = Field(ge=0)


class WorkerProcess(Section):
    """`worker`, the key of a worker's process; `WorkerValues` in edl/config/chart.py has those of its pod."""

    gpu_memory: GpuMemory = Field(json_schema_extra=GPU_MEMORY)


class Local(Section):
    """`local`: how `edl run` starts processes on this machine."""

    start_method: Literal["fork", "spawn"]
    threads: Count = Field(ge=0)
    gpus_per_worker: GpuShare = Field(json_schema_extra=GPU_SHARE)


class Horovod(Section):
    """`horovod`: how a script that was written for Horovod is run."""

    elastic: bool


class Config(Section):
    """A job's values: what a process needs to know."""

    workers: Count = Field(ge=0, json_schema_extra=LIVE)
    min_workers: Count = Field(ge=1, json_schema_extra=LIVE)
    max_workers: Count = Field(ge=1, json_schema_extra=LIVE)
    suspend: bool = Field(json_schema_extra=LIVE)
    run_id: RunName
    on_demand_workers: Share = Field(json_schema_extra=LIVE | SHARE)
    ttl_seconds_after_finished: Count = Field(ge=-1, json_schema_extra=LIVE)
    active_deadline_seconds: Count = Field(ge=0, json_schema_extra=LIVE)
    mode: Literal["auto", "train", "allreduce", "hybrid", "ps", "evaluate", "predict", "horovod"]
    model: Model
    horovod: Horovod
    training: Training
    data: Data
    evaluation: Evaluation
    prediction: Prediction
    checkpoint: Checkpoint
    init_from: InitFrom
    elastic: Elastic
    export: Export
    log_level: Literal["debug", "info", "warning", "error"] = Field(json_schema_extra=LIVE)
    journal: Journal
    report: Report
    ps: Servers
    worker: WorkerProcess
    local: Local

    @property
    def task(self) -> str:
        """The job's task: train, evaluate, predict or horovod."""
        return modes.task_of(self.mode)

    @property
    def trains(self) -> bool:
        """Whether the job trains its model."""
        return self.task == modes.TRAIN

    @property
    def own_loop(self) -> str:
        """The path or the text of a script with its own training loop; empty if the job has none."""
        return "" if self.task == modes.HOROVOD else self.model.script

    @property
    def is_decided(self) -> bool:
        """Whether it is known if the job has parameter servers. If not, its first worker decides it."""
        return self.mode != modes.AUTO

    def decided(self, mode: str) -> Config:
        """This configuration with the decided mode."""
        return self if self.is_decided else self.model_copy(update={"mode": mode})

    @property
    def servers(self) -> int:
        """The number of the job's parameter servers, as far as it is decided."""
        return modes.servers_of(self.mode, self.ps.servers)

    @property
    def asynchronous(self) -> bool:
        """Whether all weights are on parameter servers, which apply steps in any order."""
        return modes.is_asynchronous(self.mode)

    @property
    def replaces_embeddings(self) -> int:
        """The least size (in values) at which an Embedding of Keras is replaced by edl's; 0: never."""
        may = self.servers or not self.is_decided or not self.trains
        return self.ps.replace_embeddings if may else 0

    def evaluation_plan(self, steps: Steps, sizes: Mapping[str, int]) -> EvaluationPlan:
        """The plan by which the ring evaluates the model, or predicts.

        Args:
            sizes: number of records of each existing split.
        """
        how, predicts = self.evaluation, self.mode == "predict"
        batch = self.prediction.part_records * ROUND_PARTS if predicts else how.batch_size
        return EvaluationPlan(steps, batch, how.steps, how.epochs, how.split, dict(sizes), not self.trains)

    def on_demand(self, workers: int) -> int:
        """Number of on-demand workers among `workers`. A percentage is rounded up."""
        wanted = self.on_demand_workers
        count = wanted if isinstance(wanted, int) else -(-workers * int(wanted[:-1]) // 100)
        return min(count, workers)

    @model_validator(mode="after")
    def _possible(self) -> Config:
        # An impossible Config cannot be constructed, not even without `parse`.
        if broken := impossible(flat(self)):
            raise PydanticCustomError("impossible", "{text}", {"text": "\n".join(broken)})
        return self


class ServersFile(Servers, ServerPod):
    """What a values file says of parameter servers."""


class WorkerFile(WorkerProcess, WorkerValues):
    """What a values file says of workers."""


class File(Config, Chart):
    """A whole values file: the job's values, and what shapes the chart's objects."""

    ps: ServersFile
    worker: WorkerFile


def parse(values: Mapping[str, Any]) -> Config:
    """Parse `values` into a typed configuration.

    The values are a whole values file, or its job part, which the chart passes to the master. A chart part is
    checked and then dropped.

    Raises:
        ConfigError: the values are invalid; the message has one line for each mistake.
    """
    values = without_outdated(values) if isinstance(values, Mapping) else values
    whole = isinstance(values, Mapping) and any(key in values for key in CHART)
    try:
        if whole:
            File.model_validate(values)
            values = of_job(values)
        return Config.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    # pydantic validates combinations only if every field is valid. To report all mistakes at once, the
    # combinations are checked here as well, for the keys without other mistakes.
    wrong = {key for detail in details for key in _prefixes(detail["loc"])}
    sound = {k: v for k, v in flat(values).items() if k not in wrong} if isinstance(values, Mapping) else {}
    lines = {in_words(detail, File) for detail in details if detail["type"] != "impossible"}
    raise ConfigError("\n".join(sorted(lines | set(impossible(sound)))))


def of_job(values: Mapping[str, Any]) -> dict[str, Any]:
    """The job's part of a whole values file."""
    job = {key: values[key] for key in JOB if key in values}
    for name, section in (("ps", Servers), ("worker", WorkerProcess)):
        if isinstance(found := job.get(name), Mapping):
            job[name] = {key: found[key] for key in known(section) if key in found}
    return job


def flat(values: BaseModel | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values by dotted key. A map whose keys Kubernetes defines is one value."""
    if isinstance(values, BaseModel):
        items = [(str(f.alias), getattr(values, name)) for name, f in type(values).model_fields.items()]
    else:
        items = list(values.items())
    found: dict[str, Any] = {}
    for key, value in items:
        nested = isinstance(value, (BaseModel, Mapping)) and f"{prefix}{key}" not in OPEN
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


OPEN = open_maps(File)
JOB = tuple(known(Config))  # the keys of the job's part of a values file
CHART = tuple(key for key in known(Chart) if key not in JOB)  # keys that only the chart has


def _prefixes(loc: tuple[int | str, ...]) -> list[str]:
    """All prefixes of the path to a mistake, as dotted keys.

    A path has the branch of a union, or the index of a list, after the key.
    """
    return [".".join(map(str, loc[: n + 1])) for n in range(len(loc))]
