# SPDX-License-Identifier: Apache-2.0
"""Renamed and removed values, and what other charts call ours: dotted keys and words, with those to use.

Promise: `edl` and Helm alike refuse an old name, and the message has the new name or what to write instead
(`scripts/dev/schema` writes the same text into the chart's schema). `helm upgrade --reuse-values` brings all
values of the chart that was installed, so a removed key that does nothing is accepted, and so is an old key
that has the default of that chart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PODS = ("master", "worker", "ps")
RENAMED = {
    "elastic.silenceSeconds": "elastic.heartbeatTimeoutSeconds",
    "elastic.startSeconds": "elastic.startupTimeoutSeconds",
    "elastic.joinSeconds": "elastic.joinDelaySeconds",
    "elastic.graceSeconds": "elastic.gracePeriodSeconds",
    "elastic.masterSeconds": "elastic.masterOutageTimeoutSeconds",
    "elastic.warmProcess": "elastic.prefork",
    "training.nonFinite": "training.onNonFinite",
    "training.inexactLoss": "training.onInexactLoss",
    "training.balance": "training.loadBalancing",
    "checkpoint.from": "initFrom.path",
    "checkpoint.fromState": "initFrom.state",
    "highPriorityWorkers": "onDemandWorkers",
    "worker.highPriorityClassName": "worker.onDemandPriorityClassName",
    "local.start": "local.startMethod",
    "paused": "suspend",
    "model.claim": "model.existingClaim",
    "data.claim": "data.existingClaim",
    "data.testFraction": "data.validationFraction",
    "output.claim": "output.existingClaim",
    **{
        f"{pod}.{usual}": f"{pod}.{ours}"
        for pod in PODS
        for usual, ours in {
            "extraEnv": "env",
            "extraEnvFrom": "envFrom",
            "extraVolumes": "volumes",
            "extraVolumeMounts": "volumeMounts",
        }.items()
    },
}

# Old words of a value, by the new key: the word and the value that replaces it.
RENAMED_WORDS: dict[str, dict[str, str]] = {
    "training.loadBalancing": {"even": "none"},
    "elastic.prefork": {"imported": "true", "none": "false"},
}

# Removed keys that had an effect, with what replaces it.
REPLACED = {
    "elastic.inMemorySnapshot": "removed; with checkpoint.dir, the state outlives all workers",
    "networkPolicy.extraIngress": "not a value; networkPolicy.clients lists further clients of the master",
    **{
        f"{pod}.{key}": f"not a value of its own; write {pod}.podTemplate: {{spec: {{{key}: ...}}}}"
        for pod in PODS
        for key in ("hostNetwork", "dnsConfig", "dnsPolicy", "hostAliases")
    },
    **{
        f"{pod}.lifecycle": "not a value of its own; write "
        f"{pod}.podTemplate: {{spec: {{containers: [{{name: {pod}, lifecycle: ...}}]}}}}"
        for pod in PODS
    },
}

# Old keys with the defaults that they had in the chart that brings them. A new key has the same default.
UNCHANGED: dict[str, Any] = {
    "training.nonFinite": "stop",
    "highPriorityWorkers": 0,
    "worker.highPriorityClassName": "",
    "elastic.inMemorySnapshot": False,
}

REMOVED = {
    "data.blockRecords": "does nothing any more; data.bufferMebibytes bounds the memory of blocks",
    "elastic.maxLeaseBatches": "does nothing any more; training has no leases",
}


def without_outdated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `values` without the removed keys that do nothing, and without old keys as in UNCHANGED."""
    kept = dict(values)
    for key in (*REMOVED, *UNCHANGED):
        *sections, last = key.split(".")
        inner = kept.get(sections[0]) if sections else kept
        if not isinstance(inner, Mapping) or last not in inner:
            continue
        if key in UNCHANGED and inner[last] != UNCHANGED[key]:
            continue
        rest = {name: value for name, value in inner.items() if name != last}
        kept = {**kept, sections[0]: rest} if sections else rest
    return kept


def advice(old: str) -> str:
    """Name the replacement of an old key; empty if `old` is not one."""
    new = RENAMED.get(old)
    return f"renamed; use {new}" if new else REPLACED.get(old, "")


def word_advice(key: str, found: Any) -> str:
    """Name the replacement of an old word of the value `key`; empty if `found` is not an old word."""
    new = RENAMED_WORDS.get(key, {}).get(found) if isinstance(found, str) else None
    return f"renamed; use {new}" if new else ""
