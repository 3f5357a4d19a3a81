# SPDX-License-Identifier: Apache-2.0
"""`edl audit` and `edl replay` on the journal of a short month, in segments: all of it kept, then damaged."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.journal import audit
from edl.journal.format import JournalReader, Link
from edl.master.journal import replay
from tests.support.jobs.damage import (
    JOURNALS,
    Entries,
    damaged,
    distort,
    lines_of,
    of_type,
    refusals,
    say_in_summary,
    seal,
)
from tests.support.jobs.month import Month
from tests.support.jobs.month import keep as keep_month

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def whole_month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("month")
    keep_month(Month(workers=2, changes=20), output, full_at=4096)
    return output


@pytest.fixture
def month(whole_month: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(whole_month, tmp_path / "month")


def test_a_journal_in_segments_is_one_journal(whole_month: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(artifacts.journals(whole_month)) > 3
    told = audit.audit(whole_month)
    assert told.startswith(
        "exactly once: 10,000 records x 10 epochs in 1,000 steps, 21 rings; 2 workers ended"
    )
    assert "read here" not in told, "nothing is taken from a different job"
    assert replay.main(str(whole_month)) == 0
    assert capsys.readouterr().out == "the same end: Succeeded, 21 generations, step 1000\n"


def without_the_last_line(path: Path) -> None:
    path.write_bytes(b"".join(lines_of(path)[:-1]))


def with_the_half_of_the_last_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def with_another_line(path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:2], lines[1], *lines[2:]]))


def of_another_number(path: Path) -> None:
    shutil.copy(path.with_name("events.3.jsonl"), path)


def with_another_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step":', '"step":1', 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Path.unlink, r"events.2.jsonl: line 1: the file is missing: events.jsonl goes on from segments 1"),
        (without_the_last_line, r"events.3.jsonl: line 1: does not go on from the end of the segment"),
        (with_the_half_of_the_last_line, r"events.3.jsonl: line 1: does not go on from the end"),
        (with_another_line, r"events.2.jsonl: line 3: the chain is broken"),
        (with_another_step, r"events.2.jsonl: line \d+: the chain is broken"),
        (of_another_number, r"events.2.jsonl: line 1: it is segment 3"),
    ],
    ids=["deleted", "shortened", "torn", "added", "edited", "another"],
)
def test_what_was_done_to_a_segment_is_told(
    change: Callable[[Path], object], words: str, month: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(month / "events.2.jsonl")
    told = list(refusals(month, capsys))
    assert len(told) == 2
    for text in told:
        assert re.search(words, text), text


def test_a_last_segment_that_is_missing_is_told(month: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (month / artifacts.JOURNAL).unlink()
    told = list(refusals(month, capsys))
    assert len(told) == 2
    for text in told:
        assert "missing, or the journal is another job's: summary.json says that line" in text


def test_segments_that_were_swapped_are_told(month: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = month / "events.2.jsonl", month / "events.3.jsonl"
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert [
        re.search(r"events.2.jsonl: line 1: it is segment 3", text) is not None
        for text in refusals(month, capsys)
    ] == [True, True]


def test_no_damage_by_chance_to_any_segment_is_overlooked(
    month: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = artifacts.journals(month)
    for seed in range(JOURNALS // 15):
        chance = random.Random(seed)
        path = chance.choice(paths)
        before = path.read_bytes()
        path.write_bytes(damaged(before, chance))
        told = list(refusals(month, capsys))
        path.write_bytes(before)
        assert len(told) == 2, f"seed {seed}: {told}"
        for text in told:
            assert str(month) in text, f"seed {seed}: {text}"
            assert "\n" not in text, f"seed {seed}: {text}"


def forge_from(output: Path, number: int, change: Callable[[Entries], None]) -> None:
    """Change a segment, and write it and all that follow anew, with a chain that holds, and the summary."""
    paths = artifacts.journals(output)[number - 1 :]
    link = Link(0, json.loads(lines_of(paths[0])[0])["after"])
    for path in paths:
        entries = [json.loads(line) for line in lines_of(path)]
        for entry in entries:
            del entry["chain"]
        if path == paths[0]:
            change(entries)
        entries[0]["after"] = link.chain
        link = seal(path, entries, Link(0, link.chain))
    say_in_summary(output, link)


def less_was_safe(entries: Entries) -> None:
    entries[0]["proof"]["safe"] -= 1


def a_holder_more(entries: Entries) -> None:
    entries[0]["proof"]["synced"].append(1000)


def test_what_is_not_kept_counts_for_what_comes(month: Path) -> None:
    """A step that went missing is found, though what proves that it was there is only in the folded proof."""
    for path in artifacts.journals(month)[:-2]:
        path.unlink()
    number = JournalReader(artifacts.journals(month)[0]).number

    def steps_went_missing(entries: Entries) -> None:
        entries[0]["oldest"] = number
        for event in of_type(entries, "LeftRing"):
            event["step"] = 1

    def the_oldest_is_another(entries: Entries) -> None:
        entries[0]["oldest"] = number

    forge_from(month, 2, the_oldest_is_another)
    assert "read here: the last " in audit.audit(month)
    forge_from(month, 1, steps_went_missing)
    with pytest.raises(
        audit.AuditFailed, match=r"line \d+: step \d+ was in the model and is lost: .* from 1"
    ):
        audit.audit(month)


def another_target(entries: Entries) -> None:
    entries[0]["state"]["Job"]["target"] = 3


def another_member(entries: Entries) -> None:
    entries[0]["state"]["Job"]["ring"]["Ring"]["members"]["tuple"][0] = 99


@pytest.mark.parametrize("change", [less_was_safe, a_holder_more])
def test_a_proof_that_does_not_follow_from_the_lines_before_it_is_found_out(
    change: Callable[[Entries], None], month: Path
) -> None:
    forge_from(month, 3, change)
    with pytest.raises(audit.AuditFailed, match=r"events.3.jsonl: line 1: its proof is not what the lines"):
        audit.audit(month)


@pytest.mark.parametrize("change", [another_target, another_member])
def test_a_state_that_does_not_follow_from_the_lines_before_it_is_found_out(
    change: Callable[[Entries], None], month: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_from(month, 3, change)
    assert replay.main(str(month)) == 1
    assert "events.3.jsonl: line 1: its state is not that of the core" in capsys.readouterr().err


def test_a_forged_head_ends_in_words_too(month: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage the oldest segment that is left, so that it can be compared with no other."""
    first = artifacts.journals(month)[-1]
    whole = [json.loads(line) for line in lines_of(first)]
    whole[0]["oldest"] = whole[0]["number"]
    refused = 0
    for seed in range(JOURNALS // 15):
        chance = random.Random(seed)
        entries = json.loads(json.dumps(whole))
        for _ in range(chance.choice((1, 1, 3))):
            distort(entries[:1], chance, chance.choice(("proof", "state")))
        for entry in entries:
            entry.pop("chain", None)
        entries[0]["after"] = whole[0]["after"]
        say_in_summary(month, seal(first, entries, Link(0, whole[0]["after"])))
        told = list(refusals(month, capsys))
        refused += len(told)
        for text in told:
            assert "\n" not in text, f"seed {seed}: {text}"
            assert "Traceback" not in text, f"seed {seed}: {text}"
    assert refused > JOURNALS / 30
