# SPDX-License-Identifier: Apache-2.0
"""`-o json` and `-o yaml`: documents whose fields are those of docs/output.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from edl.checkpoints import Store
from edl.cli.app import app
from edl.cli.jobs import listing
from edl.cli.local import latest
from edl.cli.shared import display, output
from edl.cli.shared.jobs import JobSnapshot
from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import RunId
from edl.master.core import view
from edl.master.loop import Master
from tests.support.checkpoints.checkpoints import write
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.month import Month
from tests.support.jobs.stories import Story

PAGE = Path(__file__).parents[3] / "docs" / "output.md"


def documented(heading: str, table: int = 0) -> set[str]:
    """The fields in the first column of a table of the page.

    Args:
        table: its place below the heading.
    """
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.split(r"^\| Field .*\n\| ---.*\n", section, flags=re.M)[1 + table]
    cells = [line.split("|")[1] for line in rows.split("\n\n")[0].splitlines()]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def fields(document: Iterable[str]) -> set[str]:
    return set(document) - {"apiVersion", "kind"}


async def running() -> dict[str, Any]:
    master = Master(Month(workers=1, changes=0).spec, RunId("a run"))
    status = master.status(asyncio.get_running_loop().time())
    return {**status, "workers": view.status(*at(Story(workers=2).running()))["workers"]}


def at(story: Story) -> tuple[Any, float]:
    return story.job, story.now


async def test_a_running_job_has_the_fields_of_the_page() -> None:
    told = await running()
    body = output.job(told, "", ended=False)
    assert fields(body) == documented("Job")
    assert body["model"] == told["model"] and told["model"], "the name of the model"
    expected = {"id", "pid", "rank", "state", "delay", "step", "rate", "memory", "gpu"}
    assert [row.keys() for row in body["workers"]] == [expected] * 2
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in expected)


async def test_what_runs_a_worker_is_a_process_or_a_pod() -> None:
    told = await running()
    told["workers"][0]["handle"], told["workers"][1]["handle"] = "4711", ""
    assert [w["pid"] for w in output.job(told, "", ended=False)["workers"]] == [4711, None]
    told |= {"release": "edl", "servers": [{"index": 0, "handle": "edl-ps-0"}]}
    told["workers"][0]["handle"] = "edl-worker-0"
    body = output.job(told, "", ended=False)
    assert [w["pod"] for w in body["workers"]] == ["edl-worker-0", None]
    assert body["servers"] == [{"index": 0, "pod": "edl-ps-0"}]


def test_a_job_that_has_ended_names_its_model_and_the_file_of_the_trained_one(tmp_path: Path) -> None:
    keep(whole_story(), tmp_path)
    (tmp_path / "values.json").write_text(json.dumps(values.load([], ["model.module=digits"])))
    printed = [
        CliRunner().invoke(app, ["status", "-o", form, str(tmp_path)]).stdout for form in ("json", "yaml")
    ]
    found = json.loads(printed[0])
    assert yaml.safe_load(printed[1]) == found
    assert (found["apiVersion"], found["kind"]) == ("edl.dev/v1", "Job")
    kept = artifacts.read_summary(tmp_path)
    assert fields(found) == documented("Job", table=1)
    assert (found["model"], found["model_file"]) == ("digits", kept["model"])
    assert found["phase"] == kept["phase"] and found["generations"] == kept["generations"]


def test_items_of_lists_have_the_fields_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latest, "known", lambda: [tmp_path])
    (tmp_path / "values.json").write_text("{}")
    keep(whole_story(), tmp_path)
    listing.list_jobs(form=output.Form.yaml)
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["apiVersion"], found["kind"]) == ("edl.dev/v1", "JobSummaryList")
    (row,) = found["items"]
    assert row.keys() | {"namespace", "release"} == documented("JobSummaryList")
    listing.list_jobs(form=output.Form.wide)
    assert row["reason"] in (told := capsys.readouterr().out) and str(tmp_path) in told

    write(Store.open(str(tmp_path / "checkpoints")), 100, metrics={}, config={})
    done = CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path / "checkpoints"), "100", "-o", "json"])
    found = json.loads(done.stdout)
    assert found["kind"] == "CheckpointList"
    assert found["items"][0].keys() == documented("CheckpointList")
    done = CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path / "checkpoints"), "-o", "wide"])
    assert done.stdout.splitlines()[0].split()[-3:] == ["parts", "edl", "directory"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [("zoo list", "ModelList"), ("example list", "ExampleList"), ("explain training", "ValueList")],
)
def test_items_of_installed_things_have_the_fields_of_the_page(command: str, kind: str) -> None:
    found = json.loads(CliRunner().invoke(app, [*command.split(), "-o", "json"]).stdout)
    assert found["kind"] == kind and found["items"]
    section = "ModelList, ExampleList" if kind != "ValueList" else kind
    assert all(item.keys() == documented(section) for item in found["items"])
    assert all(str(value) for item in found["items"] for value in item.values() if value is not None)


def test_an_ended_job_is_awaited_and_audited_with_the_fields_of_the_page(tmp_path: Path) -> None:
    keep(whole_story(), tmp_path)

    def document(command: str, *words: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(app, [command, *words, str(tmp_path), "-o", "json"])
        found = json.loads(done.stdout)
        assert fields(found) == documented(found["kind"]) and found["kind"] == command.title()
        return done.exit_code, found

    reached = artifacts.read_summary(tmp_path)["reason"]
    code, found = document("wait")
    assert (code, found["phase"], found["reason"], found["reached"]) == (0, "Succeeded", reached, True)
    code, found = document("wait", "--for", "failed")
    assert (code, found["phase"], found["reached"]) == (1, "Succeeded", False)
    code, found = document("audit")
    assert (code, found["exact"]) == (0, True) and found["audit"].startswith("exactly once: ")
    journal = tmp_path / artifacts.JOURNAL
    journal.write_text(journal.read_text().replace('"step":10', '"step":9'))
    code, found = document("audit")
    assert (code, found["exact"]) == (1, False) and "the chain is broken" in found["audit"]


def test_the_old_option_says_where_it_went(tmp_path: Path) -> None:
    for command in (["list"], ["status", str(tmp_path)], ["checkpoint", "list", str(tmp_path)]):
        refused = CliRunner().invoke(app, [*command, "--json"])
        assert "-o json" in str(refused.exception), command


async def test_a_wide_table_says_why_a_worker_is_pending(capsys: pytest.CaptureFixture[str]) -> None:
    told = await running()
    told["workers"][0]["delay"] = "exceeded quota: small"
    for wide in (False, True):
        display.snapshot(JobSnapshot(told, "", ""), wide=wide)
        shown = capsys.readouterr().out
        assert ("exceeded quota: small" in shown) is ("run: a run" in shown) is wide


async def test_a_reason_that_is_the_phase_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = await running()
    for reason, first in (("starting", "Starting"), ("no worker is ready", "Starting, no worker is ready")):
        display.snapshot(JobSnapshot(told | {"phase": "Starting", "reason": reason}, "", ""))
        assert capsys.readouterr().out.splitlines()[0].removeprefix("digits: ") == first
