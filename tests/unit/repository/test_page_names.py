# SPDX-License-Identifier: Apache-2.0
"""What a page has a user type or look for exists: commands, options, metrics, Events, alerts, labels."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from edl import config
from edl.compat.elasticdl import flags as elasticdl_flags
from edl.compat.elasticdl.flags import EVALUATE, PREDICT, TRAIN
from edl.compat.horovod import flags as horovod_flags
from edl.config import values
from edl.contract.reasons import Reason
from tests.unit.repository.test_pages import PAGES, ROOT, parsed

NOT_OURS = {"CHANGELOG.md"}  # which also names what was
EACH = pytest.mark.parametrize(
    "page",
    sorted(page for page in PAGES if page.name not in NOT_OURS),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
PLACEHOLDERS = {"N": "3", "STEP": "100", "PID": "1", "KEY=VALUE": "training.seed=1", "KIND": "tabular"}
ONLY_A_NAME = re.compile(r"^Missing parameter|requires an argument|^Usage: ")  # the call is not complete
SOURCES = {".py", ".yaml", ".tpl", ".sh", ".txt", ".json", ""}
PRODUCT = ("edl", "master", "trainer", "ps", "chart", "model_zoo", "scripts", "docker", "tests", "tools")


def blocks(page: Path, *kinds: str) -> str:
    """The lines of a page's blocks of these kinds, with continued lines in one."""
    found = re.findall(rf"^```(?:{'|'.join(kinds)})\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(found).replace("\\\n", " ")


def mentioned(page: Path) -> Iterator[str]:
    """Calls of edl in the running text of a page: `edl scale 3`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for call in re.findall(r"`edl ((?!-- |\.)[a-z][^`\n]*)`", text):
        if not re.search(r"\.\.\.|\|", call):
            yield call


@cache
def mistake(call: str) -> str:
    """What is wrong with the options or the values of a call of edl; empty if nothing is."""
    try:
        context = parsed([PLACEHOLDERS.get(word, word) for word in shlex.split(call)])
        if sets := context.params.get("sets"):
            config.parse(values.load([], sets))
    except Exception as error:
        return "" if ONLY_A_NAME.search(str(error)) else f"edl {call}: {error}"
    return ""


@EACH
def test_each_call_of_edl_in_the_text_of_a_page_has_options_that_exist(page: Path) -> None:
    if page.name != "commands.md":  # which is made from the command line
        assert [wrong for call in mentioned(page) if (wrong := mistake(call))] == []


@EACH
def test_commands_of_horovod_and_elasticdl_have_flags_that_exist(page: Path) -> None:
    if page.name == "commands.md":  # which shows their usage
        return
    for name, rest in re.findall(
        r"^(?:\$ )?edl (horovod|elasticdl) (.*)$", blocks(page, "console", "sh"), re.M
    ):
        words = shlex.split(rest, comments=True)
        if name == "horovod":
            horovod_flags.parse(words)
        elif words[0] in (TRAIN, EVALUATE, PREDICT):
            elasticdl_flags.parse(words[0], words[1:])


@EACH
def test_each_values_file_of_a_page_is_valid(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for given in yaml.safe_load_all(block):
            if isinstance(given, dict) and given.keys() <= values.defaults().keys():
                config.parse(values.merge(values.defaults(), given))


@EACH
def test_each_option_of_a_script_is_in_the_script(page: Path) -> None:
    calls = re.findall(
        r"(?:^|[`$ ])(scripts/[\w/-]+)((?: [^\s`|#>][^\s`|]*)*)", blocks(page, "console", "sh"), re.M
    )
    calls += re.findall(r"`(scripts/[\w/-]+)((?: [^`\s]+)*)`", page.read_text())
    for script, rest in calls:
        file = ROOT / script
        if not file.is_file() or script in ("scripts/run", "scripts/bench", "scripts/gpu/run"):
            continue  # which hand their arguments on
        for option in re.findall(r" (--[a-z][\w-]*)", rest):
            assert option in text_of(file) or script == "scripts/test", f"{script} {option}"


def text_of(script: Path) -> str:
    """The text of a script, and of a program of Python that it starts."""
    text = script.read_text()
    for module in re.findall(r"-m ([a-z_]+\.[\w.]+)", text):
        folder = ROOT / module.replace(".", "/")
        files = [folder.with_suffix(".py"), *folder.rglob("*.py")]
        text += "".join(file.read_text() for file in files if file.is_file())
    return text


@EACH
def test_each_metric_alert_and_event_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    alerts = set(re.findall(r"- alert: (\w+)", (ROOT / "chart/templates/monitoring.yaml").read_text()))
    named = set(re.findall(r"`(Edl[A-Z]\w+)`", text)) - {"EdlError"}
    assert named <= alerts, "alerts that do not exist"
    exported = (ROOT / "docs/metrics.md").read_text()
    metrics = set(re.findall(r"`(edl_[a-z_]+[a-z])(?:\{[^`]*)?`", text))
    assert [name for name in metrics if f"`{name}`" not in exported] == [], "metrics that do not exist"
    shown = set(re.findall(r"^ +(Normal|Warning) +([A-Z]\w+)", text, re.MULTILINE))
    types = {(kind, name) for name, kind in re.findall(r"^\| `(\w+)` \| (Normal|Warning) ", exported, re.M)}
    assert shown <= types, "Events that do not exist, or are of the other type"
    assert set(re.findall(r"(?:Events?|notices?) \(?`([A-Z]\w+)`", text)) <= {*Reason}, (
        "Events that do not exist"
    )


@EACH
def test_each_label_and_variable_of_a_page_is_in_the_code(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"\bedl\.dev/[a-z][\w-]*(?!\w*/)", text)) - {"edl.dev/v1"}
    named |= set(re.findall(r"\bEDL_[A-Z_]+[A-Z]", text))
    assert sorted(named - code()) == []


@cache
def code() -> set[str]:
    """The labels and the environment variables in the product, its scripts and its tests."""
    files = [file for folder in (*PRODUCT, "benchmarks", ".ci") for file in (ROOT / folder).rglob("*")]
    texts = [f.read_text(errors="replace") for f in files if f.suffix in SOURCES and f.is_file()]
    return {name for text in texts for name in re.findall(r"edl\.dev/[a-z][\w-]*|\bEDL_[A-Z_]+[A-Z]", text)}


def test_the_page_of_examples_has_each_model_of_the_zoo() -> None:
    text = (
        (ROOT / "examples/README.md").read_text().partition("## Models of the zoo")[2].partition("\n## ")[0]
    )
    zoo = {file.stem for file in (ROOT / "model_zoo").glob("*.py") if file.stem != "__init__"}
    cells = "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    assert {*re.findall(r"`(\w+)`", cells)} == zoo
