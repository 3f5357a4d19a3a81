# SPDX-License-Identifier: Apache-2.0
"""Renamed and removed values: old dotted keys with the new ones, and old value words with the new ones.

Promise: `edl` and Helm alike refuse an old name, and the message has the new name (`scripts/dev/schema`
writes the same text into the chart's schema). There are two exceptions, because `helm upgrade --reuse-values`
brings all values of the chart that was installed: a removed key is accepted, and so is a renamed key of the
oldest chart if it has the default of that chart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "elastic.silenceSeconds": "elastic.heartbeatTimeoutSeconds",
    "elastic.startSeconds": "elastic.startupTimeoutSeconds",
    "elastic.joinSeconds": "elastic.joinDelaySeconds",
    "elastic.graceSeconds": "elastic.gracePeriodSeconds",
    "elastic.masterSeconds": "elastic.masterOutageTimeoutSeconds",
    "elastic.warmProcess": "elastic.prefork",
    "elastic.memoryCopy": "elastic.inMemorySnapshot",
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
    "output.claim": "output.existingClaim",
}

# Old words of a value, by the new key: the word and the value that replaces it.
RENAMED_WORDS: dict[str, dict[str, str]] = {
    "training.loadBalancing": {"even": "none"},
    "elastic.prefork": {"imported": "true", "none": "false"},
}

# Renamed keys of the oldest chart with the defaults that they had there. The new key has the same default.
UNCHANGED: dict[str, Any] = {
    "training.nonFinite": "stop",
    "highPriorityWorkers": 0,
    "worker.highPriorityClassName": "",
}

REMOVED = {
    "data.blockRecords": "does nothing any more; data.bufferMebibytes bounds the memory of blocks",
    "elastic.maxLeaseBatches": "does nothing any more; training has no leases",
}


def without_outdated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `values` without removed keys and without the renamed keys that are in UNCHANGED."""
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
    """Name the replacement of a renamed key; empty if `old` was not renamed."""
    new = RENAMED.get(old)
    return f"renamed; use {new}" if new else ""


def word_advice(key: str, found: Any) -> str:
    """Name the replacement of an old word of the value `key`; empty if `found` is not an old word."""
    new = RENAMED_WORDS.get(key, {}).get(found) if isinstance(found, str) else None
    return f"renamed; use {new}" if new else ""
