# SPDX-License-Identifier: Apache-2.0
"""The notes that `helm install` prints: what was made, and what is special or dangerous about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from edl.config import model_check
from edl.master.spec import JobSpec, checked
from tests.chart.conftest import CHART, Helm, Rendered


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The chart with its notes in an object: `helm template` does not show them."""
    copy = shutil.copytree(CHART, tmp_path / "chart")
    shutil.copy(CHART / "templates" / "NOTES.txt", copy / "files")
    (copy / "templates" / "notes.yaml").write_text(
        "kind: Notes\nmetadata: {name: notes}\ntext: {{ tpl (.Files.Get `files/NOTES.txt`) . | toJson }}\n"
    )
    return copy


def test_the_notes_name_what_was_made(helm: Helm, notes: Path) -> None:
    flags: tuple[str, ...] = ("--namespace", "team", "--set", "workers=3")
    text = Rendered(helm("template", "vision", str(notes), *flags)).one("Notes")["text"]
    assert "trains digits with 3 workers in namespace team" in text
    assert "kubectl -n team wait --for=jsonpath='{.data.phase}'=Succeeded configmap/vision-edl-status" in text
    assert "helm uninstall vision -n team" in text
    assert "WARNING" not in text and "edl model get --release vision" in text
    assert "PersistentVolumeClaim vision-edl-storage with checkpoints and the trained model is kept" in text
    none = ("--set", "storage.size=")
    text = Rendered(helm("template", "vision", str(notes), *flags, *none)).one("Notes")["text"]
    assert "WARNING: the trained model will be lost with the worker's pod: set output.size" in text
    assert "WARNING: checkpoints are off" in text
    assert "The master has no volume to keep that on: storage.size is empty." in text
    assert text.count("WARNING") == 2
    flags += none
    kept = Rendered(
        helm("template", "vision", str(notes), *flags, "--set", "checkpoint.dir=s3://bucket/prefix")
    )
    assert "checkpoints" not in kept.one("Notes")["text"]
    assert "edl stop --discard --release vision -n team" in text, "as the command itself would ask for"
    assert "edl stop --release vision -n team" in kept.one("Notes")["text"]
    predicts = Rendered(helm("template", "vision", str(notes), *flags, "--set", "mode=predict")).one("Notes")
    assert "predicts the records of digits with 3 workers" in predicts["text"]
    assert "WARNING: the predictions will be lost with the worker's pod" in predicts["text"]
    assert predicts["text"].count("WARNING") == 1 and "edl model get" not in predicts["text"]


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_the_notes_warn_of_a_token_that_leaves_the_cluster_unencrypted(
    helm: Helm, notes: Path, kind: str
) -> None:
    flags: tuple[str, ...] = ("--set", f"service.type={kind}")
    words = f"WARNING: service.type is {kind}, and without TLS the token travels unencrypted"
    assert words in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]
    flags += ("--set", "tls.existingSecret=x")
    assert words not in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("suspend=true", "It is suspended"),
        ("workers=0", "It is suspended, because workers is 0"),
        ("output.size=1Gi", "The PersistentVolumeClaim edl-output with the trained model is kept."),
        ("networkPolicy.enabled=false", "WARNING: networkPolicy.enabled is false"),
        ("rbac.create=false", "the ServiceAccount edl-master needs the rights"),
        ("model.source=x", "trains the file of model.source with 4 workers"),
    ],
)
def test_the_notes_say_what_is_special(helm: Helm, notes: Path, said: str, words: str) -> None:
    assert words in Rendered(helm("template", "edl", str(notes), "--set", said)).one("Notes")["text"]


MODEL = "model=data=print"
STATUS = "{{- $run := dict `root` $ `status` .Values.global -}}\n"


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        ((), ""),
        (("training.seed=9", "workers=2", "suspend=true"), "training.seed"),
        (("mode=ps", "export.formats={savedmodel}"), "export.formats, mode"),
        (
            ("model.source=data=model=print", "elastic.joinDelaySeconds=0.5"),
            "elastic.joinDelaySeconds, model.source",
        ),
        (("training.seed=9", "runId=2"), ""),
        (("training.seed=9", "runId=0"), ""),
    ],
)
def test_the_notes_know_what_a_run_refuses(
    helm: Helm, tmp_path: Path, now: tuple[str, ...], refused: str
) -> None:
    """As the master does, which judges by the same keys; where nothing has run, nothing is refused."""
    copy = shutil.copytree(CHART, tmp_path / "chart")
    (copy / "templates" / "notes.yaml").write_text(
        STATUS + "kind: Notes\nmetadata: {name: notes}\ntext: {{ include `edl.refused` $run | toJson }}\n"
    )
    began = helm.template(f"model.source={MODEL}").values
    state = {"runId": "a", "nextId": 1, "source": model_check.digest(MODEL)}
    status = {
        "state": json.dumps(state),
        "values": json.dumps({**began, "mode": "hybrid", "model": {**began["model"], "source": ""}}),
    }
    (tmp_path / "status").write_text(yaml.safe_dump({"global": status, "model": {"source": MODEL}}))
    flags = [word for value in now for word in ("--set", value)]
    made = Rendered(helm("template", "edl", str(copy), "-f", str(tmp_path / "status"), *flags))
    assert made.one("Notes")["text"] == refused
    nothing = Rendered(helm("template", "edl", str(copy), "--set", f"model.source={MODEL}", *flags))
    assert nothing.one("Notes")["text"] == ""
    run = JobSpec.parse({**began, "mode": "hybrid"})
    wanted = checked(made.values)
    if isinstance(wanted, JobSpec) and wanted.config.run_id == "":
        assert ", ".join(run.frozen_changes(wanted)) == refused
