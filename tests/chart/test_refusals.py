# SPDX-License-Identifier: Apache-2.0
"""What a real Helm refuses, by name: the same as `edl run`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edl import config
from edl.config import model_check, values
from edl.config.paths import keys
from edl.config.renamed import RENAMED
from tests.chart.conftest import CHART, Helm, Refused
from tests.unit.config.refused_values import IMPOSSIBLE, POSSIBLE, TAKEN, WRONG


def path_of(key: str) -> str:
    """A part of Helm's line about a wrong key: it names the map and its unknown key, or the value."""
    *parents, last = key.split(".")
    return f"- at '(/{'/'.join([*parents, last])}'|/?{'/'.join(parents)}': .*'{last}')"


def in_files() -> list[list[tuple[str, str]]]:
    """The wrong values and their keys, so that a file has each section or value once."""
    files: list[dict[str, tuple[str, str]]] = []
    for text, key, _ in WRONG:
        section = text.partition(":")[0]
        if all(section in file for file in files):
            files.append({})
        next(file for file in files if section not in file)[section] = (text, key)
    return [list(file.values()) for file in files]


@pytest.mark.parametrize("file", in_files())
def test_the_wrong_values_of_a_file_are_refused_by_name(
    helm: Helm, tmp_path: Path, file: list[tuple[str, str]]
) -> None:
    (tmp_path / "mine.yaml").write_text("\n".join(text for text, _ in file))
    with pytest.raises(Refused) as refusal:
        helm("template", "edl", str(CHART), "-f", str(tmp_path / "mine.yaml"))
    assert [key for _, key in file if not re.search(path_of(key), str(refusal.value))] == []


def test_each_renamed_key_is_refused_with_the_new_one(helm: Helm) -> None:
    renamed = [old for old in RENAMED if old not in keys(config.File)]
    with pytest.raises(Refused) as refusal:
        helm.template(*(f"{old}=1" for old in renamed))
    for old in renamed:
        expected = f"'/{old.replace('.', '/')}': value must be .*'renamed; use {RENAMED[old]}'"
        assert re.search(expected, str(refusal.value)), old


@pytest.mark.parametrize(("text", "words"), [*IMPOSSIBLE, *TAKEN])
def test_what_cannot_be_together_is_refused_in_the_same_words(
    helm: Helm, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(Refused) as refusal:
        helm("template", "edl", str(CHART), "-f", str(tmp_path / "mine.yaml"))
    assert words in str(refusal.value)


@pytest.mark.parametrize("text", POSSIBLE)
def test_what_is_possible_is_rendered(helm: Helm, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert helm.template(words=("-f", str(tmp_path / "mine.yaml"))).objects


def test_all_contradictions_are_told_at_once(helm: Helm) -> None:
    with pytest.raises(Refused) as refusal:
        helm.template("workers=9,maxWorkers=8", "data.existingClaim=a,data.hostPath=/b")
    assert "workers is 9" in str(refusal.value)
    assert "data.existingClaim" in str(refusal.value)


def test_on_demand_workers_without_a_higher_priority_are_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match="all workers would have the same priority"):
        helm.template("onDemandWorkers=1", "priorityClass.create=false")


LASTING = (
    "checkpoint.existingClaim=c",
    "checkpoint.hostPath=/nfs",
    "worker.volumes[0].name=v,worker.volumes[0].nfs.server=n,worker.volumes[0].nfs.path=/p,"
    "worker.volumeMounts[0].name=v,worker.volumeMounts[0].mountPath=/ckpt/",
)


@pytest.mark.parametrize("more", LASTING)
def test_checkpoints_in_a_volume_are_accepted(helm: Helm, more: str) -> None:
    assert config.parse(helm.template("checkpoint.dir=/ckpt", more).values).checkpoint.dir == "/ckpt"


@pytest.mark.parametrize("directory", ["/ckpt", "/tmp/ckpt", "/var/lib/edl"])
def test_checkpoints_without_a_volume_that_lasts_are_refused(helm: Helm, directory: str) -> None:
    with pytest.raises(Refused, match=r"no lasting volume there: set checkpoint\.existingClaim"):
        helm.template(f"checkpoint.dir={directory}", LASTING[2].replace("/ckpt/", "/ckp"))


@pytest.mark.parametrize("said", ["0.5", "1.5", "30.0", "3"])
def test_a_decimal_given_by_flag_is_a_number(helm: Helm, said: str) -> None:
    given = helm.template(f"elastic.heartbeatTimeoutSeconds={said}").values
    assert config.parse(given).elastic.heartbeat_timeout_seconds == float(said)
    assert (
        config.parse(values.load(sets=[f"elastic.heartbeatTimeoutSeconds={said}"])).elastic
        == config.parse(given).elastic
    )


@pytest.mark.parametrize("said", ["0.4", "-1.5", "soon", "1.5s"])
def test_a_decimal_given_by_flag_has_the_same_limits(helm: Helm, said: str) -> None:
    with pytest.raises(Refused, match="/elastic/heartbeatTimeoutSeconds"):
        helm.template(f"elastic.heartbeatTimeoutSeconds={said}")


def test_a_model_comes_as_one_file(helm: Helm, tmp_path: Path) -> None:
    text = (
        "def model():\n    return '{{ no template }}'\n\n\ndef data(split):\n    return \"\\\\ \u00e4 <&>\"\n"
    )
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    release = helm.template(words=("--set-file", f"model.source={tmp_path / 'mine.py'}"))
    assert release.values["model"]["source"] == text
    assert config.parse(release.values).model.source == text


def test_a_models_bytes_are_counted_as_helm_writes_them(helm: Helm, tmp_path: Path) -> None:
    good = "def model(): return 1\ndef data(split): return 2\n# "
    for character, most in (("<", 130_000), ("\u00e9", 260_000), ("\U0001f600", 190_000)):
        for text in (good + character * most, good + character * (most + 10_000)):
            source = tmp_path / "mine.py"
            source.write_text(text, encoding="utf-8")
            flags = ("--set-file", f"model.source={source}")
            if len(text) > len(good) + most:
                assert "fit into a ConfigMap" in model_check.check(text)[0]
                with pytest.raises(Refused, match=r"model.source: .* bytes as JSON|/model/source"):
                    helm.template(words=flags)
            else:
                assert model_check.check(text) == []
                job = helm.template(words=flags).job
                assert sum(len(part.encode()) for part in job["data"].values()) < 1 << 20


def test_a_model_that_no_configmap_holds_is_refused(helm: Helm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("#" * (model_check.MAX_CHARACTERS + 1))
    with pytest.raises(Refused, match="/model/source"):
        helm.template(words=("--set-file", f"model.source={tmp_path / 'mine.py'}"))
