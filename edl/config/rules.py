# SPDX-License-Identifier: Apache-2.0
"""Invalid combinations of values that are valid by themselves, which no schema can express.

The chart checks the same rules in chart/templates/checks.yaml; a test compares the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edl.config import chart
from edl.config import model_check as source_module
from edl.config.messages import shown
from edl.config.types import number
from edl.contract import modes

ADDRESSES = tuple(f"data.{split}" for split in ("train", "validation", "test", "predict"))


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
    *(
        Rule((f"{place}.existingClaim", f"{place}.hostPath"), _both, "mutually exclusive")
        for place in ("model", "data", "output", "checkpoint")
    ),
    Rule(
        ("model.script", "model.source"), _both, "mutually exclusive (a script runs instead of a model file)"
    ),
    *(
        Rule(
            ("model.script", key),
            lambda script, value, usual=usual: bool(script) and value not in usual,
            words,
        )
        for key, usual, words in (
            ("mode", ("auto", "train", "allreduce", "horovod"), "a script trains in the ring: set mode=auto"),
            ("training.compression", ("none",), "a script's gradients keep their precision: set none"),
            ("training.accumulateSteps", (1,), "a script computes each part in one piece: set 1"),
            ("initFrom.path", ("",), "a script loads its first weights itself, before edl.join()"),
        )
    ),
    *(
        Rule(
            (f"data.{option}", *ADDRESSES),
            lambda option, *addresses: bool(option) and not any(addresses),
            "it tells how to read the files that these name",
        )
        for option in ("format", "features", "label", "weight", "options")
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
        ("mode", "model.script"),
        lambda mode, script: mode == modes.HOROVOD and not script,
        "the script is missing",
    ),
    Rule(
        ("mode", "checkpoint.dir"),
        lambda mode, where: bool(where) and mode == modes.HOROVOD,
        "the script writes its own checkpoints",
    ),
    Rule(
        ("mode", "checkpoint.dir"),
        lambda mode, where: bool(where) and modes.task_of(mode) not in (modes.TRAIN, modes.HOROVOD),
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
            ("data.maxBadRecords", 0, "no worker reports which records are left out: set 0, or mode=hybrid"),
            ("training.compression", "none", "only sums over the ring are compressed: set none"),
            ("training.loadBalancing", "none", "each worker takes steps at its own speed anyway: set none"),
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


def impossible(flat_values: Mapping[str, Any]) -> list[str]:
    """List mistakes that no schema can express: invalid combinations, and a model.source that is not a model.

    A rule is checked only if all its keys are present.
    """
    source = flat_values.get("model.source")
    named = any(flat_values.get(key) for key in ADDRESSES)
    functions = flat_values.get("model.functions") or {}
    told = []
    if source and isinstance(source, str):
        told = source_module.check(source, with_data=not named, named=functions)
    script = flat_values.get("model.script")
    if isinstance(script, str) and "\n" in script:
        told += source_module.check(script, "model.script", contract=False)
    return [*told, *chart.impossible(flat_values)] + [
        f"{' and '.join(f'{key} is {shown(flat_values[key])}' for key in rule.keys)}: {rule.words}"
        for rule in RULES
        if all(key in flat_values for key in rule.keys)
        and rule.broken(*(number(flat_values[key]) for key in rule.keys))
    ]
