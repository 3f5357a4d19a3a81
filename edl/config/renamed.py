"""Values that were renamed: the old dotted key and the new one.

Promise: an old key is refused with its new name, by `edl` and by Helm alike (the chart's schema
carries the same words: see `scripts/schema`). An old key is never accepted.
"""

from __future__ import annotations

RENAMED = {
    "elastic.silenceSeconds": "elastic.heartbeatTimeoutSeconds",
    "elastic.startSeconds": "elastic.startupTimeoutSeconds",
    "elastic.joinSeconds": "elastic.joinDelaySeconds",
    "elastic.graceSeconds": "elastic.gracePeriodSeconds",
    "elastic.masterSeconds": "elastic.masterOutageTimeoutSeconds",
    "elastic.leaseBatches": "elastic.maxLeaseBatches",
    "local.start": "local.startMethod",
    "paused": "suspend",
    "model.claim": "model.existingClaim",
    "data.claim": "data.existingClaim",
    "output.claim": "output.existingClaim",
}


def advice(old: str) -> str:
    """What to use in place of a renamed key; empty if `old` was not renamed."""
    new = RENAMED.get(old)
    return f"renamed; use {new}" if new else ""
