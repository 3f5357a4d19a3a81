"""`edl audit` and `edl replay` on journals that were damaged: by chance, by an editor, by a forger."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edl import audit
from edl.contract import artifacts
from edl.contract.journals import JournalReader, Link
from edl.errors import EdlError
from master import replay
from master.core import effects as ef
from master.core import events as ev
from tests.journals import keep, whole_story
from tests.month import Month
from tests.month import keep as keep_month

Verdict = Callable[[], str]
Edit = Callable[[list[bytes]], list[bytes]]
JOURNALS = 1000
KEYS = (
    "worker", "generation", "layout", "epochs", "shares", "step", "type", "members", "root", "records",
    "effects",
)  # fmt: skip


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


def refusals(output: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """What audit and replay say against the directory; nothing of one that accepts it."""
    try:
        audit.audit(output)
    except EdlError as error:
        yield str(error)
    capsys.readouterr()
    if replay.main(str(output)):
        yield capsys.readouterr().err.removesuffix("\n")


def edit(output: Path, change: Edit) -> None:
    path = output / artifacts.JOURNAL
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def forge(output: Path, entries: list[Any]) -> None:
    """Write the journal anew, with a chain that holds, and the summary to match."""
    link, lines = Link(), []
    for entry in entries:
        link, line = link.seal(entry)
        lines.append(line)
    (output / artifacts.JOURNAL).write_text("".join(lines))
    summary = json.loads((output / artifacts.SUMMARY).read_text()) | {"journal": asdict(link)}
    (output / artifacts.SUMMARY).write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (lambda lines: [*lines[:9], lines[9].replace(b"1", b"2", 1), *lines[10:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], *lines[10:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], lines[8], *lines[9:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], lines[10], lines[9], *lines[11:]], 10, "chain is broken"),
        (lambda lines: [*lines[:9], b"{}\n", *lines[9:]], 10, "the line is damaged"),
        (lambda lines: [*lines[:9], b"\xff\x00\n", *lines[10:]], 10, "the line is damaged"),
        (lambda lines: [lines[0].replace(b'"seed": 1', b'"seed": 2'), *lines[1:]], 1, "chain is broken"),
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
    edit(output, lambda lines: [lines[0].replace(b'"version": 8', b'"version": 9'), *lines[1:]])
    for text in refusals(output, capsys):
        assert "has version 9, this edl reads version 8" in text


def test_the_masters_of_one_run_make_one_chain(tmp_path: Path) -> None:
    keep(whole_story(), tmp_path, 2, 4)
    assert [p.name for p in artifacts.journals(tmp_path)] == [
        "events.1.jsonl", "events.2.jsonl", "events.jsonl",
    ]  # fmt: skip
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


# --- forgers who know what they do: every line is as a master writes it, and the chain holds

Entries = list[dict[str, Any]]


def of_type(entries: Entries, kind: str) -> Entries:
    """All events and effects of this type."""
    told = [entry["event"] for entry in entries[1:]]
    told += [effect for entry in entries[1:] for effect in entry["effects"]]
    return [one for one in told if one["type"] == kind]


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


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """The journal with some of its bytes or lines changed, lost, repeated or moved; never as it was."""
    lines = whole.splitlines(keepends=True)
    while True:
        a, b = chance.randrange(len(whole)), chance.randrange(len(whole))
        i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
        changes: list[Callable[[], bytes]] = [
            lambda a=a: whole[:a] + bytes([chance.randrange(256)]) + whole[a + 1 :],
            lambda a=a: whole[:a] + whole[a + 1 + chance.randrange(40) :],
            lambda a=a: whole[:a] + chance.randbytes(chance.randrange(1, 20)) + whole[a:],
            lambda a=a, b=b: whole[: min(a, b)] + whole[max(a, b) :],
            lambda a=a, b=b: whole[:a] + whole[b : b + 200] + whole[a:],
            lambda a=a: whole[:a],
            lambda i=i: b"".join(lines[:i] + lines[i + 1 :]),
            lambda i=i, j=j: b"".join([*lines[:i], lines[j], *lines[i:]]),
            lambda i=i, j=j: b"".join([*lines[:i], lines[j], *lines[i + 1 :]]),
            lambda: whole.replace(*chance.choice([(b"0", b"1"), (b"true", b"false"), (b"\n", b"\r\n")]), 3),
            lambda a=a: whole[:a] + b"\0" * 64 + whole[a + 64 :],
            lambda: whole + lines[-1],
        ]
        if (found := chance.choice(changes)()) != whole:
            return found


def distort(entries: list[Any], chance: random.Random, part: str = "") -> None:
    """Change one value somewhere, or the order of the lines; or one value in a part of the head."""
    if not part and chance.random() < 0.2:
        i, j = chance.randrange(len(entries)), chance.randrange(len(entries))
        act = chance.choice(("swap", "delete", "double"))
        if act == "swap":
            entries[i], entries[j] = entries[j], entries[i]
        elif act == "double":
            entries.insert(i, json.loads(json.dumps(entries[j])))
        elif len(entries) > 2:
            del entries[i]
        return
    places: list[tuple[Any, Any]] = []
    find = partial(_places, places)
    if part:
        find(entries[0][part])
    else:
        find(entries[chance.randrange(1, len(entries))] if chance.random() < 0.9 else entries[0])
    holder, key = chance.choice(places)
    value = chance.choice((None, -1, 0, 1, 7, 1 << 62, 0.5, "", "x" * 300, "\ud800", [], {}, [[3, 1]], True))
    act = chance.random()
    if act < 0.15:
        del holder[key]
    elif act < 0.25 and isinstance(holder, dict):
        holder[chance.choice(KEYS)] = value
    else:
        holder[key] = value


def _places(found: list[tuple[Any, Any]], value: Any) -> None:
    """Every (map or list, key) below."""
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            _places(found, value[key])


def test_the_story_is_one_in_which_much_happens(whole: Path) -> None:
    text = (whole / artifacts.JOURNAL).read_text()
    for cls in (ef.Form, ev.Progress, ev.LeftRing, ev.Gone, ev.Finished, ef.Export, ev.Stepped):
        assert f'"{cls.__name__}"' in text


# --- a journal in segments: a short month of two workers, all of it kept


@pytest.fixture(scope="module")
def whole_month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("month")
    keep_month(Month(workers=2, changes=20), output, full_at=4096)
    return output


@pytest.fixture
def month(whole_month: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(whole_month, tmp_path / "month")


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_a_journal_in_segments_is_one_journal(whole_month: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(artifacts.journals(whole_month)) > 4
    told = audit.audit(whole_month)
    assert told.startswith(
        "exactly once: 10,000 records x 10 epochs in 1,000 steps, 21 rings; 2 workers ended"
    )
    assert "read here" not in told, "nothing is taken from anybody else"
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
    path.write_text(path.read_text().replace('"step": ', '"step": 1', 1))


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
)  # fmt: skip
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
        entries[0]["after"], link, lines = link.chain, Link(0, link.chain), []
        for entry in entries:
            link, line = link.seal(entry)
            lines.append(line)
        path.write_text("".join(lines))
    summary = json.loads((output / artifacts.SUMMARY).read_text()) | {"journal": asdict(link)}
    (output / artifacts.SUMMARY).write_text(json.dumps(summary))


def less_was_safe(entries: Entries) -> None:
    entries[0]["proof"]["safe"] -= 1


def a_holder_more(entries: Entries) -> None:
    entries[0]["proof"]["holders"].append(1000)


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
        audit.AuditFailed, match=r"line \d+: step \d+ was in the model and is no longer: .* from 1"
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
    """Of the oldest segment that is left, so that nothing can be compared with it."""
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
        link, lines = Link(0, whole[0]["after"]), []
        for entry in entries:
            link, line = link.seal(entry)
            lines.append(line)
        first.write_text("".join(lines))
        summary = json.loads((month / artifacts.SUMMARY).read_text()) | {"journal": asdict(link)}
        (month / artifacts.SUMMARY).write_text(json.dumps(summary))
        told = list(refusals(month, capsys))
        refused += len(told)
        for text in told:
            assert "\n" not in text, f"seed {seed}: {text}"
            assert "Traceback" not in text, f"seed {seed}: {text}"
    assert refused > JOURNALS / 30
