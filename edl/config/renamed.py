"""Values that were renamed: the old dotted key and the new one; and values that have no meaning any more.

Promise: a renamed key is refused with its new name, by `edl` and by Helm alike (the chart's schema
carries the same words: see `scripts/schema`). A removed key is accepted and does nothing: `helm upgrade
--reuse-values` brings the values of the older chart.
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
    "local.start": "local.startMethod",
    "paused": "suspend",
    "model.claim": "model.existingClaim",
    "data.claim": "data.existingClaim",
    "output.claim": "output.existingClaim",
}

REMOVED = {
    "data.blockRecords": "does nothing any more; data.bufferMebibytes bounds the memory of blocks",
    "elastic.maxLeaseBatches": "does nothing any more; training has no leases",
}


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A values mapping without the keys that do nothing any more."""
    kept = dict(values)
    for key in REMOVED:
        section, last = key.split(".")
        if isinstance(inner := kept.get(section), Mapping) and last in inner:
            kept[section] = {name: value for name, value in inner.items() if name != last}
    return kept


def advice(old: str) -> str:
    """What to use in place of a renamed key; empty if `old` was not renamed."""
    new = RENAMED.get(old)
    return f"renamed; use {new}" if new else ""
