#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print docs/metrics.md for scripts/dev/docs: the metrics that a master exports, the alerts and the Events.

scripts/dev/events.toml says what each alert and each Event means, and what to do.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.errors import EdlError
from edl.master.core.goodput import KINDS
from edl.master.http.metrics import STATES, Metrics

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).with_name("events.toml")

UNITS = {
    "edl_build_info": "1",
    "edl_ring_reshapes": "changes",
    "edl_ring_size": "workers",
    "edl_workers_desired": "workers",
    "edl_workers": "workers",
    "edl_records": "records",
    "edl_records_desired": "records",
    "edl_failures": "failures",
    "edl_job_phase": "1",
    "edl_loss": "as the loss function",
    "edl_training_metric": "as the metric",
    "edl_evaluation": "as the loss function or the metric",
    "edl_worker_records_per_second": "records per second",
    "edl_server_up": "0 or 1",
    "edl_server_rows": "rows",
    "edl_server_rows_pulled": "rows",
    "edl_server_rows_staged": "rows",
    "edl_server_restarts": "restarts",
    "edl_staleness_median": "updates",
    "edl_staleness_max": "updates",
    "edl_steps_repeated": "steps",
    "edl_watch_relists": "lists",
    "edl_kubernetes_api_up": "0 or 1",
    "edl_kubernetes_requests": "requests",
}
HEAD = """# Metrics, alerts and Events

`scripts/dev/docs` generates this page.

## Metrics

The master of a release serves these metrics for Prometheus at `/metrics`, on the port `metrics` of
`service/edl-master` (of the release `edl`). In the [values](configuration.md),
`metrics.serviceMonitor.enabled` or `metrics.podMonitor.enabled` has the Prometheus operator collect them,
`metrics.prometheusRule.enabled` creates [alerts](#alerts), and `metrics.grafanaDashboard.enabled` a
dashboard. Names and labels stay. No label has more values when a job has more workers.

A job has the metrics of parameter servers and of staleness only if it has parameter servers. Loss, metrics
and speeds have values once they are known.

| Metric | Type | Labels | Unit | Meaning |
| --- | --- | --- | --- | --- |"""

LABELS = {
    "`state` of `edl_workers`": STATES,
    "`phase` of `edl_job_phase`": tuple(Phase),
    "`reason` of `edl_ring_reshapes_total`": ("planned", "broken"),
    "`result` of `edl_records_total`": ("applied",),
    "`kind` of `edl_seconds_total`": KINDS,
    "`of` of `edl_loss`": ("epoch", "step"),
    "`of` of `edl_worker_records_per_second`": ("slowest", "median", "fastest"),
}
ALERTS = """
## Alerts

Each has the label `severity` (`warning` or `info`).

| Alert | Meaning | What to do |
| --- | --- | --- |"""
EVENTS = """
## Events

The master writes Events to the ConfigMap `edl-job` of the release `edl`; `kubectl describe configmap edl-job`
shows them. Its log and `edl status` have the same reasons. A reason stays; the message beside it may change.

| Event | Type | Meaning | What to do |
| --- | --- | --- | --- |"""
SERVER = {
    "index": 0,
    "state": "running",
    "rows": 0,
    "memory": 0,
    "log_bytes": 0,
    "rows_pulled": 0,
    "rows_staged": 0,
    "busy_seconds": 0.0,
    "restarts": 0,
}
STATUS: dict[str, Any] = {
    "workers": [{"state": "member", "rank": 0, "rate": 1.0}],
    "records": {"applied": 0, "total": 0},
    "target": 1,
    "failures": 0,
    "phase": "Training",
    "loss": 1.0,
    "epoch_loss": 1.0,
    "epoch_metrics": {"accuracy": 1.0},
    "evaluations": {"validation": {"metrics": {"loss": 1.0}}},
    "servers": [SERVER],
    "staleness": {"median": 0, "most": 0, "repeated": 0},
    "goodput": {"useful": 1.0},
}
BACKEND = {
    "relists": {"start": 1},
    "watch_age_seconds": 0.0,
    "api_up": 1,
    "requests": {("get", "pods", 200): 1},
}


def main() -> None:
    """Print the page."""
    print(HEAD)
    for metric in sorted(Metrics(lambda: STATUS, lambda: BACKEND).families(), key=lambda metric: metric.name):
        counter = metric.type == "counter"
        name = f"{metric.name}_total" if counter else metric.name
        suffix = metric.name.rpartition("_")[2]
        unit = suffix if suffix in ("seconds", "bytes") else UNITS[metric.name]
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        shown = ", ".join(f"`{label}`" for label in labels)
        print(f"| `{name}` | {metric.type} | {shown} | {unit} | {metric.documentation} |")
    print("\n| Label | Values |\n| --- | --- |")
    for label, values in LABELS.items():
        print(f"| {label} | {', '.join(f'`{value}`' for value in values)} |")
    texts = tomllib.loads(TEXTS.read_text())
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "chart" / "templates" / "monitoring.yaml").read_text())
    complete("alerts", {*texts["alerts"]}, {*alerts})
    print(ALERTS)
    for name in alerts:
        print(f"| `{name}` | {texts['alerts'][name]['means']} | {texts['alerts'][name]['do']} |")
    complete("events", {*texts["events"]}, {*Reason})
    print(EVENTS)
    for reason in Reason:
        means, do = texts["events"][reason]
        print(f"| `{reason}` | {reason.severity} | {means} | {do} |")


def complete(table: str, texts: set[str], names: set[str]) -> None:
    """Check that a table of events.toml has a text for each name, and no other.

    Raises:
        EdlError: it has not.
    """
    if texts != names:
        raise EdlError(
            f"{TEXTS.name}: [{table}] lacks {sorted(names - texts)}, and has unknown {sorted(texts - names)}"
        )


if __name__ == "__main__":
    main()
