"""The typed configuration of a job: its types and limits. Defaults are in chart/values.yaml.

`parse` turns a mapping of values into a frozen `Config`, or reports all mistakes at once: for each its dotted
key, the value found, and the expected value.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from edl.config import chart
from edl.config import model_check as source_module
from edl.config.chart import Chart, ServerPod
from edl.config.messages import in_words, shown
from edl.config.paths import known, open_maps
from edl.config.renamed import without_outdated
from edl.config.types import (
    AtLeastHalf,
    Count,
    Int,
    NotNegative,
    ObjectName,
    Positive,
    RunName,
    Section,
    Share,
    number,
)
from edl.contract import modes
from edl.contract.evaluation import ROUND_PARTS, EvaluationPlan
from edl.contract.modes import MOST_SERVERS
from edl.contract.steps import Steps
from edl.errors import ConfigError

LIVE: dict[str, JsonValue] = {"live": True}
IN_POD = frozenset({  # frozen values that the chart also writes into the worker's pod
    *(f"{place}.{key}" for place in ("model", "data") for key in ("existingClaim", "hostPath", "mountPath")),
    *(f"checkpoint.{key}" for key in ("dir", "existingClaim", "hostPath", "existingSecret")),
    "elastic.inMemorySnapshot", "elastic.prefork",
})  # fmt: skip
RESULT: dict[str, JsonValue] = {"result": True}  # determines the trained model: fixed once a run has ended
SHARE: dict[str, JsonValue] = {"allowed": "an integer, at least 0, or a share such as 50%"}
PATH: dict[str, JsonValue] = {"allowed": "an absolute path"}


class Model(Section):
    module: str = Field(min_length=1)
    source: str = Field(max_length=source_module.MOST_CHARACTERS)
    existing_claim: ObjectName
    host_path: str
    mount_path: str = Field(pattern="^/", json_schema_extra=PATH)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return "model.source" if self.source else self.module


class Training(Section):
    epochs: Count = Field(ge=1, json_schema_extra=LIVE | RESULT)
    batch_size: Int = Field(ge=1, lt=1 << 24)
    seed: Int = Field(ge=0, lt=1 << 31)
    on_non_finite: Literal["stop", "skip"]
    on_inexact_loss: Literal["warn", "refuse", "allow"]
    load_balancing: Literal["none", "speed"]
    accumulate_steps: Int = Field(ge=1, lt=1 << 24)
    compression: Literal["none", "float16", "bfloat16"]


class Data(Section):
    shuffle: bool
    buffer_mebibytes: Count = Field(ge=1)
    max_bad_records: Count = Field(ge=0)
    allow_empty: bool
    existing_claim: ObjectName
    host_path: str
    mount_path: str = Field(pattern="^/", json_schema_extra=PATH)


class Elastic(Section):
    heartbeat_timeout_seconds: AtLeastHalf
    startup_timeout_seconds: Positive
    step_timeout_seconds: Positive
    join_delay_seconds: NotNegative
    grace_period_seconds: NotNegative
    master_outage_timeout_seconds: NotNegative
    max_failures: Count = Field(ge=0)
    prefork: bool
    in_memory_snapshot: bool
    disk_full_timeout_seconds: NotNegative


class Evaluation(Section):
    split: Literal["test", "validation"]
    steps: Count = Field(ge=0)
    epochs: Count = Field(ge=0)
    batch_size: Int = Field(ge=1, lt=1 << 24)


class Prediction(Section):
    part_records: Int = Field(ge=1, lt=1 << 24)
    format: Literal["npz", "parquet"]
    dir: str


class Checkpoint(Section):
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
    path: str
    state: Literal["weights", "everything"]


def _with_keras(formats: list[str]) -> list[str]:
    """Put Keras' own format first: each model is saved in it anyhow."""
    return list(dict.fromkeys(["keras", *formats]))


class Export(Section):
    formats: Annotated[list[Literal["keras", "savedmodel", "onnx"]], AfterValidator(_with_keras)]
    verify: bool

    @property
    def further(self) -> tuple[str, ...]:
        """The formats other than Keras' own."""
        return tuple(self.formats[1:])


class Journal(Section):
    max_bytes: Count = Field(ge=1 << 20)


class Servers(Section):
    servers: Int = Field(ge=0, le=MOST_SERVERS, json_schema_extra=LIVE)
    replicas: Int = Field(ge=1, le=2)
    timeout_seconds: Positive
    log: bool
    memory_mebibytes: Count = Field(ge=0)
    grads_to_wait: Int = Field(ge=1, lt=1 << 24)
    max_staleness: Count = Field(ge=0)
    scale_rate_by_staleness: bool
    pull_steps: Int = Field(ge=1, lt=1 << 24)
    replace_embeddings: Count = Field(ge=0)


class Local(Section):
    start_method: Literal["spawn", "fork"]
    threads: Count = Field(ge=0)


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
    mode: Literal["auto", "train", "allreduce", "hybrid", "ps", "evaluate", "predict"]
    model: Model
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
    ps: Servers
    local: Local

    @property
    def task(self) -> str:
        """The job's task: train, evaluate or predict."""
        return modes.task_of(self.mode)

    @property
    def trains(self) -> bool:
        """Whether the job trains its model."""
        return self.task == modes.TRAIN

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


class File(Config, Chart):
    """A whole values file: the job's values, and what shapes the chart's objects."""

    ps: ServersFile


class Rule(NamedTuple):
    """An invalid combination of values that are valid by themselves."""

    keys: tuple[str, ...]
    broken: Callable[..., bool]
    words: str


def _both(one: Any, other: Any) -> bool:
    return bool(one and other)


RULES = [
    Rule(("minWorkers", "maxWorkers"), operator.gt, "minWorkers must not be larger"),
    Rule(("workers", "maxWorkers"), operator.gt, "workers must not be larger"),
    Rule(
        ("workers", "minWorkers"),
        lambda workers, least: 0 < workers < least,
        "the job could never train (workers must be 0 or at least minWorkers)",
    ),
    Rule(
        ("elastic.joinDelaySeconds", "elastic.startupTimeoutSeconds"),
        operator.ge,
        "joinDelaySeconds must be smaller",
    ),
    Rule(
        ("elastic.inMemorySnapshot", "elastic.prefork"),
        lambda snapshot, prefork: bool(snapshot) and prefork is False,
        "the snapshot is held by the preforked process (prefork must be true)",
    ),
    *(
        Rule((f"{place}.existingClaim", f"{place}.hostPath"), _both, "mutually exclusive")
        for place in ("model", "data", "output", "checkpoint")
    ),
    *(
        Rule(
            (place, "checkpoint.dir"),
            lambda place, where: bool(place) and not where.startswith("/"),
            "dir must be the absolute path at which it is mounted",
        )
        for place in ("checkpoint.existingClaim", "checkpoint.hostPath")
    ),
    Rule(
        ("checkpoint.force", "checkpoint.resume"),
        lambda force, resume: force and not resume,
        "force says how to go on with another run's checkpoints",
    ),
    Rule(
        ("initFrom.path", "checkpoint.dir"),
        lambda source, where: bool(source) and source.rstrip("/") == where.rstrip("/"),
        "a new training must not write where it begins from (to go on with that one: checkpoint.resume=true)",
    ),
    Rule(
        ("initFrom.path", "initFrom.state"),
        lambda source, state: state == "everything" and source.endswith((".keras", ".weights.h5")),
        "a file holds the weights only; everything is in a checkpoint",
    ),
    Rule(
        ("output.size", "output.existingClaim"), _both, "mutually exclusive (a new claim, or one that exists)"
    ),
    Rule(
        ("output.size", "output.hostPath"),
        _both,
        "mutually exclusive (a new claim, or a folder of the nodes)",
    ),
    Rule(
        ("mode", "checkpoint.dir"),
        lambda mode, where: bool(where) and modes.task_of(mode) != modes.TRAIN,
        "nothing is trained, so there is nothing to keep (initFrom.path says with which weights)",
    ),
    Rule(
        ("mode", "ps.servers", "initFrom.path"),
        lambda mode, servers, where: (
            modes.task_of(mode) != modes.TRAIN and modes.servers_of(mode, servers) > 0 and not where
        ),
        "the servers would have no rows: initFrom.path says where they are (or set ps.servers=0)",
    ),
    *(
        Rule(
            ("mode", key),
            lambda mode, value, usual=usual: modes.is_asynchronous(mode) and value != usual,
            words,
        )
        for key, usual, words in (
            ("data.maxBadRecords", 0, "nobody could say which records are left out: set 0, or mode=hybrid"),
            ("training.compression", "none", "only sums over the ring are compressed: set none"),
            ("training.loadBalancing", "none", "each worker takes steps at its own speed anyway: set none"),
            ("elastic.inMemorySnapshot", False, "workers hold no state that is worth a snapshot: set false"),
            (
                "initFrom.state",
                "weights",
                "the servers' optimizers count updates of their own: set weights, or mode=hybrid",
            ),
        )
    ),
    Rule(
        ("ps.servers", "ps.replicas"),
        lambda servers, replicas: 0 < servers < replicas,
        "each row is to be on more servers than there are",
    ),
    Rule(("token.existingSecret", "token.value"), _both, "mutually exclusive"),
    Rule(
        ("service.type", "service.clusterIP"),
        lambda kind, address: kind != "ClusterIP" and address == "None",
        "a headless Service is of type ClusterIP",
    ),
    Rule(
        ("metrics.serviceMonitor.enabled", "metrics.podMonitor.enabled"),
        _both,
        "mutually exclusive (every metric would be collected twice)",
    ),
]


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
    if isinstance(servers := job.get("ps"), Mapping):
        job["ps"] = {key: servers[key] for key in known(Servers) if key in servers}
    return job


def impossible(flat_values: Mapping[str, Any]) -> list[str]:
    """List mistakes that no schema can express: invalid combinations, and a model.source that is not a model.

    A rule is checked only if all its keys are present.
    """
    source = flat_values.get("model.source")
    told = source_module.check(source) if source and isinstance(source, str) else []
    return [*told, *chart.impossible(flat_values)] + [
        f"{' and '.join(f'{key} is {shown(flat_values[key])}' for key in rule.keys)}: {rule.words}"
        for rule in RULES
        if all(key in flat_values for key in rule.keys)
        and rule.broken(*(number(flat_values[key]) for key in rule.keys))
    ]


def unscalable(values: Mapping[str, Any], workers: int) -> list[str]:
    """Why a running job with these values cannot be scaled to `workers` workers; empty if it can."""
    if workers < 0:
        return [f"workers is {workers}: expected at least 0, which suspends the job"]
    limits = {key: values[key] for key in ("minWorkers", "maxWorkers") if key in values}
    return impossible({**limits, "workers": workers})


def unscalable_servers(config: Config, servers: int) -> list[str]:
    """Why a running job cannot be scaled to `servers` parameter servers; empty if it can."""
    if not (config.servers and config.trains):
        why = "it has no parameter servers"
        if not config.is_decided:
            why = "no worker has built its model yet, so it is not known whether it needs any"
        return [f"ps.servers: cannot scale the servers of this job: {why}"]
    if not 1 <= servers <= MOST_SERVERS:
        return [f"ps.servers is {servers}: expected 1 to {MOST_SERVERS}"]
    return impossible({**flat(config), "ps.servers": servers})


def frozen_changes(old: Config, new: Config, ended: bool = False) -> list[str]:
    """The dotted keys that differ and that a run with the values `old` keeps.

    Args:
        ended: the run has ended, so it also keeps live values that determine the trained model.
    """
    if modes.became(new.mode, old.mode):
        new = new.decided(old.mode)
    before, after = flat(old), flat(new)
    free = live_keys(old, ended)
    return sorted(key for key in before if before[key] != after[key] and key not in free)


def live_keys(config: Config, ended: bool = False) -> set[str]:
    """The dotted keys that can change while a job with this configuration runs.

    Args:
        ended: the run has ended; leave out the keys that determine the trained model.
    """
    live = {key for key, extra in _extras(Config) if "live" in extra and not (ended and "result" in extra)}
    if config.is_decided and not (config.servers and config.trains):  # no rows that servers could exchange
        live.discard("ps.servers")
    return live


def with_keys_of(
    values: Mapping[str, Any], other: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    """A copy of `values` in which these dotted keys have the values of `other`, as far as it has them.

    `other` need not be valid.
    """
    found = copy.deepcopy(dict(values))
    for key in keys:
        *sections, last = key.split(".")
        into: Any = found
        source: Any = other
        for section in sections:
            into = into.setdefault(section, {})
            source = source.get(section) if isinstance(source, Mapping) else None
        if isinstance(source, Mapping) and last in source:
            into[last] = copy.deepcopy(source[last])
    return found


def _extras(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each dotted key with the extra schema properties of its field."""
    for field in section.model_fields.values():
        yield f"{prefix}{field.alias}", _extra(field)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _extras(field.annotation, f"{prefix}{field.alias}.")


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


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
