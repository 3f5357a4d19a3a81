# SPDX-License-Identifier: Apache-2.0
"""What the chart makes for Prometheus and Grafana; the rules and queries as Prometheus itself reads them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import Helm, Rendered, script

MASTER = 'namespace="team",pod="vision-edl-master-7f-x"'
Series = dict[str, str]  # in promtool's notation, a value a minute


@pytest.fixture(scope="session")
def promtool() -> Path:
    return Path(script("prometheus")) / "promtool"


Fire = Callable[[dict[str, Any], Series, int], set[str]]


@pytest.fixture(scope="module")
def rules(helm: Helm) -> dict[str, Any]:
    sets = ("metrics.prometheusRule.enabled=true", "metrics.podMonitor.enabled=true")
    release = helm.template(*sets, release="vision", namespace="team")
    return dict(release.one("PrometheusRule")["spec"])


@pytest.fixture(scope="module")
def rules_alone(helm: Helm) -> dict[str, Any]:
    """Return the rules of a release without a monitor."""
    release = helm.template("metrics.prometheusRule.enabled=true", release="vision", namespace="team")
    return dict(release.one("PrometheusRule")["spec"])


def promtool_says(promtool: Path, *words: str) -> str:
    """What it prints, if it finds nothing wrong."""
    done = subprocess.run([promtool, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_objects_are_there_when_asked_for(rendered: dict[str, Rendered]) -> None:
    kinds = {o["kind"] for o in rendered[""].objects}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    release = rendered["gitops-values.yaml"]
    monitor, service = release.one("ServiceMonitor"), release.service
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [p["name"] for p in service["spec"]["ports"]]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    pod_monitor = rendered["everything-values.yaml"].one("PodMonitor")
    pod = rendered["everything-values.yaml"].master["spec"]["template"]
    assert pod_monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_prometheus_reads_the_queries_of_the_dashboard(
    rendered: dict[str, Rendered], promtool: Path, tmp_path: Path
) -> None:
    dashboard = rendered["gitops-values.yaml"].one("ConfigMap", "edl-dashboard")
    panels = json.loads(dashboard["data"]["edl.json"])["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) == 9
    file = tmp_path / "queries.yaml"
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"{len(queries)} rules found" in promtool_says(promtool, "check", "rules", str(file))


@pytest.fixture
def alerts(promtool: Path, tmp_path: Path) -> Fire:
    """Prometheus' own verdict: the alerts of such rules that fire after so many minutes of such series."""

    def fire(rules: dict[str, Any], series: Series, minutes: int) -> set[str]:
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
        firing = set()
        for rule in rules["groups"][0]["rules"]:
            test = {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": rule["alert"], "exp_alerts": []}
                ],
            }
            file = tmp_path / "test.yaml"
            file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
            done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
            assert (done.returncode == 0) == ("FAILED" not in done.stderr + done.stdout), done
            if done.returncode:
                assert f'alertname="{rule["alert"]}"' in done.stderr + done.stdout, done
                firing.add(rule["alert"])
        return firing

    return fire


SEEN = {f"edl_build_info{{{MASTER}}}": "1x60"}


def trains(size: int) -> Series:
    return {f"edl_ring_size{{{MASTER}}}": f"{size}x60"}


def workers(state: str, number: int) -> Series:
    return {f'edl_workers{{{MASTER},state="{state}"}}': f"{number}x60"}


def counts(name: str, a_minute: int) -> Series:
    return {f'{name}{{{MASTER},reason="broken"}}': f"0+{a_minute}x60"}


@pytest.mark.parametrize(
    ("series", "minutes", "firing"),
    [
        (SEEN | trains(2) | workers("member", 2), 30, set()),
        ({}, 4, set()),
        ({}, 6, {"EdlMasterIsGone"}),
        ({'edl_build_info{namespace="team",pod="other-master-1"}': "1x60"}, 6, {"EdlMasterIsGone"}),
        (SEEN | trains(0) | workers("starting", 4), 9, set()),
        (SEEN | trains(0) | workers("starting", 4), 11, {"EdlNotTraining"}),
        (SEEN | trains(0) | workers("pending", 4), 11, {"EdlNotTraining"}),
        (SEEN | trains(0) | workers("ready", 0) | workers("ended", 4), 30, set()),
        (SEEN | counts("edl_ring_reshapes_total", 2), 40, set()),
        (SEEN | counts("edl_ring_reshapes_total", 4), 40, {"EdlRingFlapping"}),
        (SEEN | counts("edl_watch_relists_total", 1), 40, set()),
        (SEEN | counts("edl_watch_relists_total", 3), 40, {"EdlWatchBreaks"}),
    ],
)
def test_an_alert_fires_when_there_is_trouble_and_only_then(
    alerts: Fire, rules: dict[str, Any], series: Series, minutes: int, firing: set[str]
) -> None:
    assert alerts(rules, series, minutes) == firing


@pytest.mark.parametrize(
    ("series", "minutes", "firing"),
    [
        ({}, 60, set()),
        (SEEN, 30, set()),
        ({f"edl_build_info{{{MASTER}}}": "1x10"}, 30, {"EdlMasterIsGone"}),
        ({f"edl_build_info{{{MASTER}}}": "1x10"}, 26 * 60, set()),
    ],
)
def test_alerts_without_a_monitor_miss_only_a_master_whose_metrics_were_there(
    alerts: Fire, rules_alone: dict[str, Any], series: Series, minutes: int, firing: set[str]
) -> None:
    assert alerts(rules_alone, series, minutes) == firing
