# SPDX-License-Identifier: Apache-2.0
"""The results of a job, which the report and the live page show first. Nothing here needs Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edl.contract.evaluation import FINAL, VALIDATION, final_split
from edl.formatting import measured
from edl.report.tables import text_of

MAX_RESULTS = 8
PREFIXES = {VALIDATION: "val_", FINAL: "test_"}  # of the metrics of a split, as in Keras


def results(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the newest loss and metrics with their names, each followed by its values for held-out records.

    Args:
        told: the summary of the job, or its status while it runs; {} if neither is known.
    """
    trained = dict(told.get("epoch_metrics") or {})
    if (loss := told.get("epoch_loss")) is not None:
        trained = {"loss": loss, **trained}
    held_out = held_out_results(told)
    names = dict.fromkeys([*trained, *(name for found in held_out.values() for name in found)])
    named = []
    for name in names:
        if name in trained:
            named.append((name, measured(trained[name])))
        for split, found in held_out.items():
            if name in found:
                named.append((f"{PREFIXES.get(split, '')}{name}", measured(found[name])))
    return named[:MAX_RESULTS]


def held_out_results(told: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the newest metrics for held-out records, by split.

    Args:
        told: see results().
    """
    found = {split: result["metrics"] for split, result in (told.get("evaluations") or {}).items()}
    if told.get("metrics"):  # of the trained model
        found[final_split(VALIDATION, found)] = told["metrics"]
    return found


def boxes(named: Iterable[tuple[str, str]]) -> str:
    """Show numbers with their names, each in a box."""
    items = "".join(f"<div><dt>{text_of(name)}</dt><dd>{text_of(value)}</dd></div>" for name, value in named)
    return f"<dl>{items}</dl>" if items else ""


def audited(verdict: str) -> str:
    """Show the sentence of the audit; empty if the audit was not made."""
    return f'<p class="verdict"><strong>Audit.</strong> {text_of(verdict)}</p>' if verdict else ""
