# SPDX-License-Identifier: Apache-2.0
"""What an upgrade, a parent chart and the values of an older chart meet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from edl import config
from edl.config.paths import keys
from tests.chart.conftest import CHART, ROOT, Helm, Object, Rendered, labels


def optional() -> list[str]:
    """The keys that may be empty, and so may be null."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = []
    for key in keys(config.File):
        node = schema
        for part in key.split("."):
            node = node["properties"][part]
        found += [key] if "null" in node.get("type", "") else []
    return found


@pytest.mark.parametrize("file", ["", "everything-values.yaml"])
def test_what_may_be_empty_may_be_null(helm: Helm, tmp_path: Path, file: str) -> None:
    nulls: Object = {}
    for key in optional():
        inside = nulls
        *parents, last = key.split(".")
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = None
    (tmp_path / "nulls").write_text(yaml.safe_dump(nulls))
    files = [*([CHART / "ci" / file] if file else []), tmp_path / "nulls"]
    release = helm.template(words=tuple(word for path in files for word in ("-f", str(path))))
    assert config.parse(release.values).model.name == "digits"
    assert "topologySpreadConstraints" not in release.worker["spec"]
    # A parent chart's nulls reach this one as they are.
    assert Rendered(helm("template", "edl", str(umbrella(tmp_path / "umbrella", edl=nulls)))).master


def umbrella(folder: Path, **charts: Object) -> Path:
    """A chart with ours as a dependency, under each of these names, with these values."""
    (folder / "charts").mkdir(parents=True)
    shutil.copytree(CHART, folder / "charts" / "edl")
    dependencies = [
        {"name": "edl", "version": "0.2.0", "alias": name, "condition": f"{name}.enabled"} for name in charts
    ]
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": dependencies}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (folder / "values.yaml").write_text(yaml.safe_dump(charts))
    return folder


def test_a_parent_chart_has_several_jobs_and_can_leave_one_out(helm: Helm, tmp_path: Path) -> None:
    parent = umbrella(tmp_path / "umbrella", one={}, two={"enabled": True}, three={"enabled": False})
    both = Rendered(helm("template", "both", str(parent), "--namespace", "team"))
    jobs = [o["metadata"]["name"] for o in both.all("ConfigMap") if o["metadata"]["name"].endswith("-job")]
    assert sorted(jobs) == ["both-one-job", "both-two-job"]
    names = [(o["kind"], o["metadata"]["name"]) for o in both.objects]
    assert len(names) == len(set(names))
    masters = both.all("Deployment")
    services = [s["spec"]["selector"] for s in both.all("Service")]
    for master in masters:
        its = master["spec"]["template"]["metadata"]["labels"] | ACTS
        assert len([s for s in services if s.items() <= its.items()]) == 1


@pytest.mark.parametrize("named", ["by their aliases", "by one nameOverride"])
def test_two_jobs_of_one_release_keep_apart(helm: Helm, tmp_path: Path, named: str) -> None:
    alike = named == "by one nameOverride"
    jobs: dict[str, Object] = {
        name: {
            **({"nameOverride": "job", "fullnameOverride": f"both-{name}"} if alike else {}),
            "mode": "hybrid",
            "master": {"replicas": 2},
            "networkPolicy": {"restrictEgress": True},
            "metrics": {"serviceMonitor": {"enabled": True}},
        }
        for name in ("one", "two")
    }
    both = Rendered(helm("template", "both", str(umbrella(tmp_path / "umbrella", **jobs))))
    pods: dict[str, Object] = {}
    for owner in [*both.all("Deployment"), *both.all("StatefulSet")]:
        acting = ACTS if owner["kind"] == "Deployment" else {}
        pods[owner["metadata"]["name"]] = owner["spec"]["template"]["metadata"]["labels"] | acting
    for job in both.all("ConfigMap"):
        if worker := (job.get("data") or {}).get("worker.yaml"):
            name = job["metadata"]["name"].replace("-job", "-worker")
            pods[name] = yaml.safe_load(worker)["metadata"]["labels"]
    of = {job: [f"both-{job}-{part}" for part in ("master", "ps", "worker")] for job in jobs}
    assert sorted(pods) == [*of["one"], *of["two"]]
    services = {s["metadata"]["name"]: s["metadata"]["labels"] for s in both.all("Service")}
    for service in both.all("Service"):
        assert selected(service["spec"]["selector"], pods) == [service["metadata"]["name"]]
    for monitor in both.all("ServiceMonitor"):
        assert selected(monitor["spec"]["selector"]["matchLabels"], services) == [monitor["metadata"]["name"]]
    for budget in both.all("PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"], pods) == [budget["metadata"]["name"]]
    policies = both.all("NetworkPolicy")
    assert sorted(p["metadata"]["name"] for p in policies) == sorted(pods)
    for policy in policies:
        name, spec = policy["metadata"]["name"], policy["spec"]
        assert selected(spec["podSelector"]["matchLabels"], pods) == [name]
        rules = [*spec["ingress"], *spec.get("egress", ())]
        peers = [peer for rule in rules for way in ("from", "to") for peer in rule.get(way, ())]
        reached = {pod for peer in peers for pod in selected(peer["podSelector"]["matchLabels"], pods)}
        assert reached and reached <= {*of[name.split("-")[1]]}, name


ACTS = {"edl.dev/acting": "true"}  # which a master gives itself


def selected(selector: Object, labels: dict[str, Object]) -> list[str]:
    return [name for name, its in labels.items() if selector.items() <= its.items()]


def test_a_deployment_selects_as_it_always_has(rendered: dict[str, Rendered]) -> None:
    # Kubernetes would refuse an upgrade that changes it.
    assert rendered[""].master["spec"]["selector"] == {"matchLabels": labels("edl", "master")}


def test_the_values_of_an_older_chart_are_enough(helm: Helm, tmp_path: Path) -> None:
    # `helm upgrade --reuse-values` brings the old defaults, and none of the new ones.
    reused = shutil.copytree(CHART, tmp_path / "chart")
    shutil.copy(ROOT / "tests" / "chart" / "data" / "values-0.1.0.yaml", reused / "values.yaml")
    old = Rendered(helm("template", "edl", str(reused), "--set", "token.value=x"))
    changed = "elastic.heartbeatTimeoutSeconds=3"  # the default of then, which an upgrade keeps
    assert config.parse(old.values) == config.parse(helm.template(changed, "storage.size=").values)
    container = old.master["spec"]["template"]["spec"]["containers"][0]
    now = helm.template("token.value=x", "storage.size=").master["spec"]["template"]["spec"]
    assert container == now["containers"][0]


def test_every_template_begins_with_the_defaults_that_an_older_chart_lacks() -> None:
    for path in [*CHART.glob("templates/**/*.yaml"), CHART / "templates" / "NOTES.txt"]:
        text = path.read_text().removeprefix("{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}\n")
        assert text.startswith('{{- include "edl.complete" . }}'), path.name
