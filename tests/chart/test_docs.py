# SPDX-License-Identifier: Apache-2.0
"""The commands and the values that the pages show are installed as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl import config
from edl.config import values
from edl.config.paths import keys
from tests.chart.conftest import CHART, ROOT, Helm, Rendered

GENERATED = ("commands.md", "configuration.md")
PAGES = [
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED),
    ROOT / "README.md",
    CHART / "README.md",
]
REGISTRY = "registry.example.org/team"
IMAGE = re.compile(
    r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})"
)
MODEL = "def model():\n    return 1\n\ndef data(split):\n    return []\n"


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `helm install` and `helm upgrade` of our chart in a page."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\$ helm (install|upgrade) \S+ \./chart ", line):
                yield shlex.split(line.removeprefix("$ "), comments=True)


def rendered(helm: Helm, words: list[str], folder: Path) -> Rendered:
    """What such a command installs."""
    release = words[2]
    (folder / "my_model.py").write_text(MODEL)
    for name in re.findall(r"[\w-]+\.py", " ".join(words)):
        (folder / name).write_text(MODEL)
    flags = [word.replace("REGISTRY", REGISTRY) for word in words[4:]]
    flags = [flag for flag in flags if flag not in ("--reuse-values", "--reset-then-reuse-values", "--wait")]
    flags = [re.sub(r"(model\.(?:source|script)=)(?=[\w-])", rf"\1{folder}/", flag) for flag in flags]
    for n, flag in enumerate(flags):
        if flags[n - 1] == "-f":
            flags[n] = str(ROOT / flag) if (ROOT / flag).is_file() else str(folder / flag)
    return Rendered(helm("template", release, str(CHART), *flags))


@pytest.mark.parametrize("page", [p for p in PAGES if list(commands(p))], ids=lambda page: page.name)
def test_every_command_of_a_page_installs_what_a_cluster_accepts(
    helm: Helm, page: Path, tmp_path: Path
) -> None:
    image = [
        sys.executable,
        "-m",
        "edl.cli",
        "image",
        "init",
        "--image",
        f"{REGISTRY}/my-models:1",
        str(tmp_path),
    ]
    (tmp_path / "my_model.py").write_text(MODEL)
    subprocess.run(image, check=True, stdout=subprocess.DEVNULL)  # the values file of models-in-images.md
    for words in commands(page):
        made = rendered(helm, words, tmp_path)
        config.parse(made.values)
        for name, pod in made.pods():
            for container in pod["containers"]:
                assert IMAGE.fullmatch(container["image"]), (words, name, container["image"])
                if any("image.registry" in word for word in words):
                    assert container["image"].startswith(f"{REGISTRY}/"), (words, name)
                    assert container["image"].count(REGISTRY) == 1


KINDS = "master|worker|job|status|source|token|ps|storage|output|dashboard|egress"  # ends of names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_object_that_a_page_names_is_one_of_its_release(helm: Helm, page: Path) -> None:
    """`helm install houses` makes `houses-edl-status`, and not `houses-status`."""
    text = page.read_text()
    assert re.findall(rf"(?<![\w-])(?:RELEASE|NAME)-(?:{KINDS})\b", text) == [], (
        "the name of an object has the chart's in it"
    )
    for release in {"edl", *(words[2] for words in commands(page))}:
        named = set(re.findall(rf"(?<![\w./-]){release}-(?:edl-)?(?:{KINDS})\b(?![-/:.]\w)", text))
        own = {*re.findall(rf"name: ({release}-egress)\b", text), *NO_OBJECTS}  # by the page
        if named - own:
            assert named - own - objects(helm, release) == set()


def objects(helm: Helm, release: str, found: dict[str, set[str]] = {}) -> set[str]:  # noqa: B006 - a cache
    """The names of the objects of a release, and of those that its master creates."""
    if release not in found:
        made = [
            o for flags in EVERYTHING for o in Rendered(helm("template", release, str(CHART), *flags)).objects
        ]
        full = release if "edl" in release else f"{release}-edl"
        names = {re.sub(r"-[0-9a-f]{8,}$", "", o["metadata"]["name"]) for o in made}
        found[release] = names | {f"{full}-{kind}" for kind in ("status", "source", "worker")}
    return found[release]


NO_OBJECTS = {"edl-master", "edl-worker"}  # also the names of images
EVERYTHING = (
    ("--set", "mode=hybrid,ps.servers=2"),
    ("--set", "metrics.grafanaDashboard.enabled=true"),
)
NO_SECTIONS = {"model", "data", "local", "global", "horovod"}  # also modules, and files of the reader


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_value_that_a_page_names_is_valid(page: Path) -> None:
    known = {key for full in keys(config.File) for key in prefixes(full)}
    sections = {key.partition(".")[0] for key in known if "." in key} - NO_SECTIONS
    text = re.sub(r"^```(?!console).*?^```", "", page.read_text(), flags=re.M | re.S)
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-zA-Z][\w.]*?)(?:=[^`]*)?`", text))
    named = {name for name in named if not name.endswith((".py", ".yaml", ".json", ".html"))}
    unknown = [name for name in named - known if not config.job.OPEN & set(prefixes(name))]
    assert unknown == [], "values that do not exist"
    for said in set(re.findall(r"`(?:--set )?([a-zA-Z][\w.]*=[^`\s]*)`", text)):
        if said.partition("=")[0] in known:
            config.parse(values.load([], [said]))


def prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def test_a_name_that_begins_with_a_registry_is_complete(helm: Helm) -> None:
    def images(*sets: str) -> set[str]:
        made = helm.template(*sets, "image.tag=v1")
        return {container["image"] for _, pod in made.pods() for container in pod["containers"]}

    own = f"worker.image.repository={REGISTRY}/my-models"
    assert images(own, "image.registry=other.example.org") == {
        f"{REGISTRY}/my-models:v1",
        "other.example.org/edl-master:v1",
    }
    for name in ("localhost/a", "host:5000/a"):
        assert f"{name}:v1" in images(f"worker.image.repository={name}", "image.registry=r")
    assert "r/team/a:v1" in images("worker.image.repository=team/a", "image.registry=r")
    assert images() == {"edl-master:v1", "edl-worker:v1"}


def test_the_page_on_data_mounts_a_claim_and_a_directory_and_gives_the_account_of_a_store(
    helm: Helm, tmp_path: Path
) -> None:
    section = (ROOT / "docs" / "data.md").read_text().split("\n## On a cluster\n")[1].split("\n## ")[0]
    (page := tmp_path / "data.md").write_text(section)
    pods = [rendered(helm, words, tmp_path).worker["spec"] for words in commands(page)]
    claim, directory, variables, file = pods
    for pod, source in (
        (claim, {"persistentVolumeClaim": {"claimName": "houses"}}),
        (directory, {"hostPath": {"path": "/srv/houses"}}),
    ):
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == "data"]
        assert volume == {"name": "data"} | source
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "data"]
        assert mount == {"name": "data", "mountPath": "/data", "readOnly": True}
    assert variables["containers"][0]["envFrom"] == [{"secretRef": {"name": "store-account"}}]
    container = file["containers"][0]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == "store"]
    [variable] = [v for v in container["env"] if v["name"] == "AWS_SHARED_CREDENTIALS_FILE"]
    assert variable["value"] == f"{mount['mountPath']}/credentials"
    assert {"name": "store", "secret": {"secretName": "store-credentials"}} in file["volumes"]


def test_what_the_page_applies_has_no_pod_of_helms_tests(helm: Helm) -> None:
    [shown] = re.findall(
        r"^\$ helm template edl \./chart (.*) \| kubectl apply", (CHART / "README.md").read_text(), re.M
    )
    flags = shlex.split(shown.replace("-f my-values.yaml", ""))

    def hooks(*flags: str) -> list[str]:
        made = Rendered(helm("template", "edl", str(CHART), *flags)).objects
        return [o["kind"] for o in made if "helm.sh/hook" in o["metadata"].get("annotations", {})]

    assert "Pod" in hooks() and "Pod" not in hooks(*flags)
