"""The notes that `helm install` prints: what was made, and what is special or dangerous about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
    flags = ("--namespace", "team", "--set", "workers=3")
    text = Rendered(helm("template", "vision", str(notes), *flags)).one("Notes")["text"]
    assert "trains digits with 3 workers in namespace team" in text
    assert "kubectl -n team wait --for=jsonpath='{.data.phase}'=Succeeded configmap/vision-edl-status" in text
    assert "helm uninstall vision -n team" in text
    assert "WARNING: the trained model will be lost with the worker's pod: set output.size" in text
    assert "WARNING: there are no checkpoints" in text
    assert text.count("WARNING") == 2
    kept = Rendered(helm("template", "vision", str(notes), *flags, "--set", "checkpoint.dir=/shared"))
    assert "checkpoints" not in kept.one("Notes")["text"]
    predicts = Rendered(helm("template", "vision", str(notes), *flags, "--set", "mode=predict")).one("Notes")
    assert "predicts the records of digits with 3 workers" in predicts["text"]
    assert "WARNING: the predictions will be lost with the worker's pod" in predicts["text"]
    assert predicts["text"].count("WARNING") == 1 and "edl model get" not in predicts["text"]


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_the_notes_warn_of_a_token_that_leaves_the_cluster_unencrypted(
    helm: Helm, notes: Path, kind: str
) -> None:
    flags = ("--set", f"service.type={kind}")
    words = f"WARNING: service.type is {kind}, and without TLS the token travels unencrypted"
    assert words in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]
    flags += ("--set", "tls.existingSecret=x")
    assert words not in Rendered(helm("template", "edl", str(notes), *flags)).one("Notes")["text"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("suspend=true", "It is suspended"),
        ("output.size=1Gi", "The PersistentVolumeClaim edl-output with the trained model is kept."),
        ("networkPolicy.enabled=false", "WARNING: networkPolicy.enabled is false"),
        ("rbac.create=false", "the ServiceAccount edl-master needs the rights"),
        ("model.source=x", "trains the file of model.source with 4 workers"),
    ],
)
def test_the_notes_say_what_is_special(helm: Helm, notes: Path, said: str, words: str) -> None:
    assert words in Rendered(helm("template", "edl", str(notes), "--set", said)).one("Notes")["text"]
