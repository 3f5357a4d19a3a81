# SPDX-License-Identifier: Apache-2.0
"""`edl audit` and `edl replay` on journals that were damaged: by chance, by an editor, by a forger."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from edl.errors import EdlError
from edl.journal import audit
from edl.journal.format import Link
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.journal import replay
from edl.trainer.export import formats
from tests.support.jobs.damage import (
    JOURNALS,
    Entries,
    damaged,
    distort,
    of_type,
    refusals,
    say_in_summary,
    seal,
)
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story

pytestmark = pytest.mark.thorough

Edit = Callable[[list[bytes]], list[bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a job that ended well."""
    output = tmp_path_factory.mktemp("whole")
    keep(whole_story(), output)
    return output


@pytest.fixture
def output(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(whole, tmp_path / "job")


def edit(output: Path, change: Edit) -> None:
    path = output / artifacts.JOURNAL
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def forge(output: Path, entries: list[Any]) -> None:
    """Write the journal anew, with a chain that holds, and the summary to match."""
    say_in_summary(output, seal(output / artifacts.JOURNAL, entries, Link()))


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (lambda lines: [*lines[:9], lines[9].replace(b"1", b"2", 1), *lines[10:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], *lines[10:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], lines[8], *lines[9:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], lines[10], lines[9], *lines[11:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], b"{}\n", *lines[9:]], 10, "the line is damaged"),
        (lambda lines: [*lines[:9], b"\xff\x00\n", *lines[10:]], 10, "the line is damaged"),
        (lambda lines: [lines[0].replace(b'"seed":1', b'"seed":2'), *lines[1:]], 1, "chain is broken"),
        (lambda lines: [b"", *lines[1:]], 1, "not a journal of edl"),
        (lambda lines: [b"nonsense\n", *lines[1:]], 1, "not JSON"),
        (lambda lines: [], 1, "the file is empty"),
        (lambda lines: lines[:-1], 0, "missing"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], 0, "torn"),
    ],
    ids=[
        "edited",
        "deleted",
        "doubled",
        "swapped",
        "added",
        "garbled",
        "values",
        "headless",
        "other",
        "empty",
        "shortened",
        "torn",
    ],
)
def test_what_was_done_to_a_journal_is_told_with_its_line(
    change: Edit, line: int, what: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (output / artifacts.JOURNAL).read_bytes()
    edit(output, change)
    assert (output / artifacts.JOURNAL).read_bytes() != before
    told = list(refusals(output, capsys))
    assert len(told) == 2
    number = line or before.count(b"\n")
    for text in told:
        assert what in text
        assert "not a journal" in text or f"events.jsonl: line {number}: " in text, text
        assert "\n" not in text


def test_a_version_that_is_not_ours_is_told(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(output, lambda lines: [lines[0].replace(b'"version":14', b'"version":15'), *lines[1:]])
    told = list(refusals(output, capsys))
    assert len(told) == 2
    for text in told:
        assert "has version 15, this edl reads version 14" in text


def test_the_masters_of_one_run_make_one_chain(tmp_path: Path) -> None:
    keep(whole_story(), tmp_path, 2, 4)
    assert [p.name for p in artifacts.journals(tmp_path)] == [
        "events.1.jsonl",
        "events.2.jsonl",
        "events.jsonl",
    ]
    assert audit.audit(tmp_path).startswith("exactly once: 100 records")
    (tmp_path / "events.1.jsonl").unlink()
    with pytest.raises(EdlError, match=r"events.1.jsonl: line 1: the file is missing: events.jsonl goes on"):
        audit.audit(tmp_path)


def test_a_master_killed_while_it_writes_leaves_no_damage(tmp_path: Path) -> None:
    story, part = whole_story(), 4
    keep(story, tmp_path)
    journal = tmp_path / artifacts.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:part]) + lines[part][:-30])  # the half of a line
    story.watchdog.history = story.watchdog.history[part - 1 :]
    keep(story, tmp_path)
    assert audit.audit(tmp_path).startswith("exactly once: 100 records")
    # Nor does one that was killed before it had written the head.
    journal.write_bytes(lines[0][:40])
    keep(story, tmp_path)
    assert audit.audit(tmp_path).startswith("exactly once: 100 records")


def test_a_summary_that_is_damaged_is_told(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "[]", "{", '{"phase": "Succeeded"}', '{"journal": 3}', "\xff"):
        (output / artifacts.SUMMARY).write_text(text, encoding="latin-1")
        told = list(refusals(output, capsys))
        assert len(told) == 2
        assert all("summary.json" in words and "\n" not in words for words in told), told


def test_no_damage_by_chance_is_overlooked(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = output / artifacts.JOURNAL
    whole = path.read_bytes()
    for seed in range(JOURNALS // 2):
        path.write_bytes(damaged(whole, random.Random(seed)))
        told = list(refusals(output, capsys))
        assert len(told) == 2, f"seed {seed}: {told}"
        for text in told:
            assert str(path) in text, f"seed {seed}: {text}"
            assert "\n" not in text, f"seed {seed}: {text}"


def test_a_forged_journal_ends_in_words_too(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = output / artifacts.JOURNAL
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    refused = 0
    for seed in range(JOURNALS // 2):
        chance = random.Random(seed)
        entries = json.loads(json.dumps(whole))
        for entry in entries:
            del entry["chain"]
        for _ in range(chance.choice((1, 1, 3))):
            distort(entries, chance)
        forge(output, entries)
        told = list(refusals(output, capsys))
        refused += len(told)
        for text in told:
            assert "\n" not in text, f"seed {seed}: {text}"
            assert "Traceback" not in text
    assert refused > JOURNALS / 2


# --- competent forgers: every line is as a master writes it, and the chain holds


def the_last_step_is_missing(entries: Entries) -> None:
    for kind in ("LeftRing", "Progress"):
        for event in of_type(entries, kind):
            event["step"] = min(event["step"], 9)


def all_but_three_steps_are_missing(entries: Entries) -> None:
    for kind in ("LeftRing", "Progress", "JoinedRing"):
        for event in of_type(entries, kind):
            event["step"] = min(event["step"], 3)


def the_root_has_less_than_a_ring_had(entries: Entries) -> None:
    of_type(entries, "Progress")[0]["step"] = 6  # so all members had 5, and the survivor says 4


def the_root_has_less_than_its_ring_began_with(entries: Entries) -> None:
    of_type(entries, "LeftRing")[1]["step"] = 3


def the_exporter_has_less_than_its_ring_had(entries: Entries) -> None:
    of_type(entries, "LeftRing")[-2]["step"] = 4


def a_ring_of_another_layout(entries: Entries) -> None:
    of_type(entries, "Form")[1]["layout"]["block"] = 2


def a_ring_of_fewer_records(entries: Entries) -> None:
    of_type(entries, "Form")[0]["layout"]["records"] = 99


def a_ring_of_other_epochs(entries: Entries) -> None:
    of_type(entries, "Form")[2]["epochs"] = 2


def more_epochs_than_were_trained(entries: Entries) -> None:
    live = {"type": "Live", "workers": 2, "min_workers": 1, "suspended": False, "epochs": 2}
    entries.insert(-4, {"now": entries[-5]["now"], "event": live, "effects": []})


def too_few_shares(entries: Entries) -> None:
    of_type(entries, "Form")[2]["shares"] = [1]


def no_share_at_all(entries: Entries) -> None:
    of_type(entries, "Form")[2]["shares"] = [0, 0]


def a_negative_share(entries: Entries) -> None:
    of_type(entries, "Form")[2]["shares"] = [2, -1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            the_last_step_is_missing,
            r"record \d+ of epoch 1 \(position 90\) was not applied; 10 records are missing: 9 of 10 steps",
        ),
        (
            all_but_three_steps_are_missing,
            r"record \d+ of epoch 1 \(position 30\) was not applied; 70 records are missing: 3 of 10 steps",
        ),
        (
            more_epochs_than_were_trained,
            r"record \d+ of epoch 2 \(position 100\) was not applied; 100 records are missing: 10 of 20",
        ),
        (the_root_has_less_than_a_ring_had, r"line 14: step 5 was in the model .* it goes on from 4"),
        (the_root_has_less_than_its_ring_began_with, r"line \d+: step 4 was in the model .* on from 3"),
        (the_exporter_has_less_than_its_ring_had, r"line \d+: step 9 was in the model .* on from 4"),
        (
            a_ring_of_another_layout,
            r"line 14: the ring trains on .*'block': 2.*, the job on Layout\(records=100",
        ),
        (a_ring_of_fewer_records, r"line 6: the ring trains on .*'records': 99.*, the job on .*records=100"),
        (a_ring_of_other_epochs, r"line \d+: the ring trains 2 epochs, the job 1"),
        (too_few_shares, r"line \d+: \[1\] does not divide a step over \[0, 2\]"),
        (no_share_at_all, r"line \d+: \[0, 0\] does not divide a step over \[0, 2\]"),
        (a_negative_share, r"line \d+: \[2, -1\] does not divide a step over \[0, 2\]"),
    ],
)
def test_a_forger_is_found_out_by_the_arithmetic(
    change: Callable[[Entries], None], words: str, output: Path
) -> None:
    entries = [json.loads(line) for line in (output / artifacts.JOURNAL).read_text().splitlines()]
    change(entries)
    for entry in entries:
        entry.pop("chain", None)
    forge(output, entries)
    with pytest.raises(audit.AuditFailed, match=words):
        audit.audit(output)


@pytest.mark.parametrize(
    ("key", "value"), [("batchSize", 0), ("batchSize", -1), ("epochs", float("inf")), ("seed", [])]
)
def test_values_that_are_no_jobs_are_told(key: str, value: object, output: Path) -> None:
    entries = [json.loads(line) for line in (output / artifacts.JOURNAL).read_text().splitlines()]
    entries[0]["values"]["training"][key] = value
    for entry in entries:
        entry.pop("chain", None)
    forge(output, entries)
    with pytest.raises(EdlError, match=r"events.jsonl: line 1: not the values of a job"):
        audit.audit(output)


def test_a_summary_that_counts_other_steps_is_found_out(output: Path) -> None:
    path = output / artifacts.SUMMARY
    summary = json.loads(path.read_text())
    summary["task"]["steps_done"] = 11
    path.write_text(json.dumps(summary))
    words = r"summary.json says 11 steps are in the model, the journal says 10"
    with pytest.raises(audit.AuditFailed, match=words):
        audit.audit(output)


def test_the_story_is_one_in_which_much_happens(whole: Path) -> None:
    text = (whole / artifacts.JOURNAL).read_text()
    for cls in (ef.Form, ev.Progress, ev.LeftRing, ev.Gone, ev.Finished, ef.Export, ev.Stepped):
        assert f'"{cls.__name__}"' in text


def test_an_exported_model_that_was_changed_or_removed_is_found_out(tmp_path: Path) -> None:
    output, exports = tmp_path, {"keras": tmp_path / artifacts.MODEL}
    (output / artifacts.MODEL).write_bytes(b"the model")
    keep(
        whole_story(
            exports={"keras": artifacts.MODEL}, list_sha256=formats.write_list(output, exports, ["keras"])
        ),
        output,
    )
    assert "; 1 exported file as written (SHA-256)" in audit.audit(output)
    listed = (output / artifacts.EXPORTS).read_bytes()
    (output / artifacts.MODEL).write_bytes(b"the Model")
    formats.write_list(output, exports, ["keras"])
    with pytest.raises(audit.AuditFailed, match=r"exports.json: its SHA-256 is not the one in the journal"):
        audit.audit(output)
    (output / artifacts.EXPORTS).write_bytes(listed)
    with pytest.raises(audit.AuditFailed, match=r"model.keras: its SHA-256 is not the one in exports.json"):
        audit.audit(output)
    (output / artifacts.MODEL).unlink()
    with pytest.raises(audit.AuditFailed, match=r"model.keras: cannot read: No such file"):
        audit.audit(output)
    (output / artifacts.EXPORTS).unlink()
    with pytest.raises(audit.AuditFailed, match=r"exports.json: cannot read"):
        audit.audit(output)


def test_the_model_of_a_job_whose_summary_is_elsewhere_is_checked(tmp_path: Path) -> None:
    """The master's disk was full when the job ended."""
    (output := tmp_path / "job").mkdir()
    (kept := tmp_path / "kept").mkdir()
    (output / artifacts.MODEL).write_bytes(b"the model")
    digest = formats.write_list(output, {"keras": output / artifacts.MODEL}, ["keras"])
    keep(whole_story(exports={"keras": artifacts.MODEL}, list_sha256=digest), kept)
    summary = json.loads((kept / artifacts.SUMMARY).read_text())
    summary["model"] = str(output / artifacts.MODEL)
    (kept / artifacts.SUMMARY).write_text(json.dumps(summary))
    assert "; 1 exported file as written (SHA-256)" in audit.audit(kept)
    (output / artifacts.MODEL).write_bytes(b"the Model")
    with pytest.raises(audit.AuditFailed, match=r"model.keras: its SHA-256 is not the one in exports.json"):
        audit.audit(kept)


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all numbers in a summary."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, each in inner for place in numbers(each, (*path, key))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_each_changed_number_of_the_summary_is_found_out(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = output / artifacts.SUMMARY
    text = path.read_text()
    places = [place for place in numbers(json.loads(text)) if place[0] not in replay.OUTSIDE]
    assert len(places) > 30
    for place in places:
        summary = inner = json.loads(text)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] += 1
        path.write_text(json.dumps(summary))
        assert replay.main(str(output)) == 1, place
        assert f"the end differs from summary.json in {place[0]}\n" in capsys.readouterr().err
    path.write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != "seconds"}))
    assert replay.main(str(output)) == 1
    path.write_text(text)
    assert replay.main(str(output)) == 0


def test_a_shortened_journal_of_a_stopped_job_is_found_out(tmp_path: Path) -> None:
    story = Story(workers=2, records=100).running()
    story.tell(ev.Progress(story.job.ring.generation, 4))
    story.tell(ev.StopAsked("stopped by edl stop"))
    story.out(*story.job.ring.members, step=4)
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, tmp_path)
    assert audit.audit(tmp_path).startswith("Stopped (stopped by edl stop); 3 of 10 steps are trained: ")
    path = tmp_path / artifacts.JOURNAL
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(EdlError, match=r"missing, or the journal is another job's"):
        audit.audit(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (artifacts.JOURNAL, r"events\.jsonl: line \d+: the line is longer than 64 MiB"),
        (artifacts.SUMMARY, r"summary\.json: cannot read: larger than 64 MiB"),
        (artifacts.EXPORTS, r"exports\.json: cannot read: larger than 64 MiB"),
    ],
)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_file_of_a_gibibyte_is_refused_at_once(
    tmp_path: Path, name: str, words: str, emptied: bool
) -> None:
    keep(whole_story(exports={"keras": "model.keras"}), output := tmp_path)
    if emptied:  # then its first line is too long
        (output / name).write_bytes(b"")
    with open(output / name, "ab") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    began = time.process_time()
    with pytest.raises(EdlError, match=words):
        audit.audit(output)
    assert time.process_time() - began < 10, "the whole file was read"
