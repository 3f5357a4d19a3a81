# SPDX-License-Identifier: Apache-2.0
"""The results of a job, which the report and the live page show first. Nothing here needs Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edl.formatting import measured
from edl.report.tables import text_of

MOST_RESULTS = 8


def results(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the newest loss and metrics with their names, each followed by its held-out values.

    Args:
        told: the summary of the job, or its status while it runs; {} if neither is known.
    """
    trained = dict(told.get("epoch_metrics") or {})
    if (loss := told.get("epoch_loss")) is not None:
        trained = {"loss": loss, **trained}
    held_out = {split: found["metrics"] for split, found in (told.get("evaluations") or {}).items()}
    if told.get("metrics"):  # of the final model
        held_out = {"": told["metrics"]}
    names = dict.fromkeys([*trained, *(name for found in held_out.values() for name in found)])
    named = []
    for name in names:
        if name in trained:
            named.append((name, measured(trained[name])))
        for split, found in held_out.items():
            if name in found:
                of = f" ({split})" if len(held_out) > 1 else ""
                named.append((f"{name}, held out{of}", measured(found[name])))
    return named[:MOST_RESULTS]


def boxes(named: Iterable[tuple[str, str]]) -> str:
    """Show numbers with their names, each in a box."""
    items = "".join(f"<div><dt>{text_of(name)}</dt><dd>{text_of(value)}</dd></div>" for name, value in named)
    return f"<dl>{items}</dl>" if items else ""


def audited(verdict: str) -> str:
    """Show the sentence of the audit; empty if the audit was not made."""
    return f'<p class="verdict"><strong>Audit.</strong> {text_of(verdict)}</p>' if verdict else ""
