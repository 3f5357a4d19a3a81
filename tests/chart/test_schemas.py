# SPDX-License-Identifier: Apache-2.0
"""Every object is valid to the oldest and to the newest Kubernetes, with any name of the release."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart.conftest import CHART, FILES, POLICY, ROOT, Helm, Object, Rendered, script

OLDEST, NEWEST = "v1.29.0", "v1.36.3"
MPI_OPERATOR, ARGO = "mpi-operator@v0.8.0", "argo-workflows/v4@v4.0.5"


@pytest.mark.parametrize("file", [None, *FILES], ids=lambda f: f.name if f else "no file")
def test_lint_finds_nothing(helm: Helm, file: Path | None) -> None:
    helm("lint", "--strict", str(CHART), *(["-f", str(file)] if file else []))


def strict(definition: Object) -> Object:
    """Kubernetes' schema, for jsonschema: unknown keys are mistakes, numbers may be quantities."""
    if definition.get("format") == "int-or-string" or "Quantity" in definition.get("description", "")[:40]:
        return {"type": ["string", "integer", "number"]}
    if "properties" in definition:
        properties = {key: strict(child) for key, child in definition["properties"].items()}
        return {**definition, "properties": properties, "additionalProperties": False}
    return {key: strict(child) if isinstance(child, dict) else child for key, child in definition.items()}


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def kubernetes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """A validator for each (apiVersion, kind) of a version of Kubernetes."""
    swagger = json.loads(Path(script("kube-schema", request.param)).read_text())
    definitions = {name: strict(d) for name, d in swagger["definitions"].items()}
    found = {}
    for name, definition in swagger["definitions"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", []):
            version = "/".join(filter(None, [kind["group"], kind["version"]]))
            schema = {"$ref": f"#/definitions/{name}", "definitions": definitions}
            found[version, kind["kind"]] = jsonschema.Draft4Validator(schema)
    return found


def mistakes(kubernetes: dict[tuple[str, str], Any], o: Object) -> list[str]:
    validator = kubernetes[o["apiVersion"], o["kind"]]
    return [f"{o['kind']}: {'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(o)]


def test_every_object_is_valid_to_the_oldest_and_the_newest_kubernetes(
    kubernetes: dict[tuple[str, str], Any], rendered: dict[str, Rendered]
) -> None:
    checked = set()
    for name, release in rendered.items():
        pods = [yaml.safe_load(text) for key, text in release.job["data"].items() if key.startswith("worker")]
        for o in [*release.objects, *pods]:
            if o["apiVersion"].startswith("monitoring.coreos.com/"):
                continue  # not Kubernetes' own
            if (o["apiVersion"], o["kind"]) not in kubernetes and o["kind"].startswith(POLICY):
                continue  # Kubernetes 1.30's
            assert mistakes(kubernetes, o) == [], name
            checked.add(o["kind"])
    assert len(checked) >= 12


def test_the_schemas_find_a_misspelt_key(kubernetes: dict[tuple[str, str], Any], helm: Helm) -> None:
    pod = helm.template("worker.podTemplate.spec.hostNetwrok=true").worker
    assert len(mistakes(kubernetes, pod)) == 1
    assert "hostNetwrok" in mistakes(kubernetes, pod)[0]


def of_custom_resource(name: str) -> dict[tuple[str, str], Any]:
    definition = yaml.load(Path(script("kube-schema", name)).read_text(), yaml.CSafeLoader)["spec"]
    return {
        (f"{definition['group']}/{version['name']}", definition["names"]["kind"]): jsonschema.Draft4Validator(
            strict(version["schema"]["openAPIV3Schema"])
        )
        for version in definition["versions"]
        if version["served"]
    }


def test_the_workflow_of_the_example_is_valid_to_argo() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "pipelines" / "argo.yaml").read_text())
    schemas = of_custom_resource(ARGO)
    assert mistakes(schemas, workflow) == []
    workflow["spec"]["templates"][0]["container"]["comand"] = ["sh"]
    [mistake] = mistakes(schemas, workflow)
    assert "'comand' was unexpected" in mistake


def test_the_manifest_of_an_mpijob_is_valid_to_the_operator() -> None:
    job = yaml.safe_load((ROOT / "docker" / "mpi" / "mpijob.yaml").read_text())
    schemas = of_custom_resource(MPI_OPERATOR)
    assert mistakes(schemas, job) == []

    wrong = deepcopy(job)
    replicas = wrong["spec"]["mpiReplicaSpecs"]
    wrong["spec"]["slotsPerWorkers"] = wrong["spec"].pop("slotsPerWorker")
    replicas["Launcher"]["restartPolicy"] = 1
    replicas["Worker"]["template"]["spec"]["containers"][0]["comand"] = ["sshd"]
    found = sorted(mistakes(schemas, wrong))
    worker = "MPIJob: spec.mpiReplicaSpecs.Worker.template.spec.containers.0: Additional properties are not"
    assert len(found) == 3
    for mistake, expected in zip(
        found,
        (
            r"MPIJob: spec.mpiReplicaSpecs.Launcher.restartPolicy: 1 is not of type 'string'",
            rf"{worker} allowed \('comand' ",
            r"MPIJob: spec: .*'slotsPerWorkers' ",
        ),
        strict=True,
    ):
        assert re.match(expected, mistake), mistake
    del replicas["Worker"]["template"], replicas["Launcher"]["template"]["spec"]["containers"]
    assert any("'containers' is a required property" in mistake for mistake in mistakes(schemas, wrong))


@pytest.mark.parametrize("release", ["no", "y", "42", "null", "1e3"])
def test_a_name_that_yaml_takes_for_something_else_stays_a_name(
    kubernetes: dict[tuple[str, str], Any], helm: Helm, release: str
) -> None:
    sets = ("output.size=1Gi", "metrics.podMonitor.enabled=true", "metrics.grafanaDashboard.enabled=true")
    odd = [f"token.existingSecret={release}", f"token.key={release}", f"nameOverride={release}"]
    odd += [f"serviceAccount.{side}.name={release}" for side in ("master", "worker")]
    odd += [f"worker.{key}={release}" for key in ("runtimeClassName", "schedulerName", "priorityClassName")]
    full = f"a-{release}"
    words = tuple(word for value in [*odd, f"fullnameOverride={full}"] for word in ("--set-string", value))
    rendered = helm.template(*sets, release=release, namespace="2024", words=words)
    for o in [*rendered.objects, rendered.worker]:
        if not o["apiVersion"].startswith("monitoring.coreos.com/"):
            assert mistakes(kubernetes, o) == []
        meta = o["metadata"]
        assert all(isinstance(value, str) for value in meta["labels"].values()), o["kind"]
        assert meta.get("namespace", "2024") == "2024"
        assert meta["labels"]["app.kubernetes.io/instance"] == release
    assert rendered.service["spec"]["selector"]["app.kubernetes.io/name"] == release
    for _, spec in rendered.pods():
        assert spec["serviceAccountName"] == release
        [token] = [e for e in spec["containers"][0]["env"] if e["name"] == "EDL_TOKEN_FILE"]
        assert token["value"] == f"/etc/edl/token/{release}"
        assert {"name": "token", "secret": {"secretName": release}} in spec["volumes"]
