# SPDX-License-Identifier: Apache-2.0
"""What a master keeps and the next one finds: `edl.master.journal`. Forgers: test_damaged_journals.py."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import RunId, WorkerId
from edl.contract.reasons import Reason
from edl.errors import EdlError
from edl.journal import audit
from edl.journal.format import JournalReader, segments
from edl.journal.proof import JournalProof
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import snapshot
from edl.master.journal import journal, replay
from edl.master.loop import Master
from edl.master.spec import JobSpec
from tests.support.jobs import month
from tests.support.jobs.month import BusyMonth, Month

MEBIBYTE = 1 << 20


def written_by_an_earlier_edl(output: Path) -> Path:
    head = {"journal": "edl", "version": 1, "run_id": "a run", "values": values.defaults()}
    (output / artifacts.JOURNAL).write_text(json.dumps(head) + "\n")
    (output / artifacts.SUMMARY).write_text("{}")
    return output / artifacts.JOURNAL


@pytest.mark.parametrize("read", [JournalReader, lambda path: audit.audit(path.parent)])
def test_a_journal_of_an_earlier_version_is_refused_in_words(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = written_by_an_earlier_edl(tmp_path)
    with pytest.raises(EdlError, match=r"events.jsonl: the journal has version 1, this edl reads version 14"):
        read(path)


def test_a_new_master_of_the_run_keeps_it_all_the_same(tmp_path: Path) -> None:
    path = written_by_an_earlier_edl(tmp_path)
    before = path.read_text()
    journal.Journal(path, "a run", JobSpec.parse(values.defaults()), dict).close()
    assert (tmp_path / "events.1.jsonl").read_text() == before


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / artifacts.JOURNAL
    path.write_text('{"journal": "of a ship"}\n')
    with pytest.raises(EdlError, match="not a journal of edl"):
        JournalReader(path)


# --- segments


def sizes(output: Path) -> list[int]:
    return [path.stat().st_size for path in artifacts.journals(output)]


def test_a_long_job_keeps_within_its_bytes_and_is_proved_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lived = Month(workers=8, changes=400, most=MEBIBYTE)
    kept, most = month.journal(lived, tmp_path), 0
    written = 0

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        nonlocal most, written
        kept.write(now, event, effects)
        written += 1
        most = max(most, sum(sizes(tmp_path))) if written % 50 == 0 else most

    lived.hear = hear
    lived.run()
    kept.close()
    month.summarize(lived, kept, tmp_path)
    assert MEBIBYTE / 2 < most <= MEBIBYTE
    told = audit.audit(tmp_path)
    assert told.startswith(
        "exactly once: 10,000 records x 10 epochs in 1,000 steps, 401 rings; 8 workers ended"
    )
    found = re.search(r"read here: the last ([0-9,]+) of ([0-9,]+) events, from step ([0-9,]+) on", told)
    assert found is not None, told
    seen, of, step = (int(number.replace(",", "")) for number in found.groups())
    assert (of, step > 500) == (written, True)
    assert seen == sum(len(path.read_bytes().splitlines()) - 1 for path in artifacts.journals(tmp_path))
    assert replay.main(str(tmp_path)) == 0
    oldest = artifacts.journals(tmp_path)[0].name
    told = capsys.readouterr().out
    assert told.startswith("the same end: Succeeded, 401 generations, step 1000; replayed from the state at")
    assert f"the head of {oldest}" in told


@pytest.mark.parametrize("mode", ["hybrid", "ps"])
def test_checkpoints_evaluations_and_servers_of_a_long_job_are_folded_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    lived = BusyMonth(workers=8, changes=300, mode=mode, days=0.3, evaluations=30, rare=10)
    kept, most = month.journal(lived, tmp_path), 0
    happened, adopted = Counter[str](), []

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        nonlocal most
        kept.write(now, event, effects)
        happened.update((type(event).__name__, *(e.reason for e in effects if isinstance(e, ef.Notice))))
        if happened.total() % 50 == 0:
            most = max(most, sum(sizes(tmp_path)))
        if isinstance(event, ev.ServersReady):
            adopted.append(journal.unfinished(tmp_path, lived.spec))

    lived.hear = hear
    lived.run()
    kept.close()
    month.summarize(lived, kept, tmp_path)
    assert happened["Progress"] > 1000 and happened["Checkpointed"] > 100 and happened["Evaluated"] >= 30
    assert happened[Reason.Resharded] > 10 and happened[Reason.ServerRecovered] > 10
    assert happened[Reason.RolledBack] == 1
    assert all(found is not None and len(found[1].workers) == 8 for found in adopted) and len(adopted) > 10
    assert MEBIBYTE / 2 < most <= MEBIBYTE
    told = audit.audit(tmp_path)
    assert told.startswith(f"exactly once: 10,000 records x 10 epochs in 1,000 steps, {lived.rings} rings")
    assert "the newest state was lost once and" in told and "read here: the last " in told
    assert replay.main(str(tmp_path)) == 0
    assert "replayed from the state at the head of events." in capsys.readouterr().out


def test_a_new_master_reads_the_last_segment_and_learns_as_much_as_from_all(tmp_path: Path) -> None:
    lived = Month(workers=4, changes=60, most=10 * MEBIBYTE)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    one, many = month.journal(lived, whole), month.journal(lived, parts, full_at=4096)
    answers: list[list[object]] = []

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        one.write(now, event, effects)
        many.write(now, event, effects)
        if len(answers) < 40 and isinstance(event, ev.Closed | ev.Ready):
            answers.append([journal.unfinished(output, lived.spec) for output in (whole, parts)])

    lived.hear = hear
    lived.run()
    assert len(artifacts.journals(whole)) == 1 and len(artifacts.journals(parts)) > 4
    assert len(answers) == 40
    for from_all, from_the_last in answers:
        assert from_all is not None and from_all == from_the_last
    with pytest.raises(EdlError, match="its job has ended: Succeeded"):
        journal.unfinished(parts, lived.spec)
    for path in artifacts.journals(parts)[:-1]:
        path.write_text("it is not read\n")
    with pytest.raises(EdlError, match="its job has ended: Succeeded"):
        journal.unfinished(parts, lived.spec)


def test_masters_and_segments_make_one_chain_of_numbers(tmp_path: Path) -> None:
    lived = Month(workers=2, changes=20)
    kept = [month.journal(lived, tmp_path, full_at=4096)]
    count = 0

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        nonlocal count
        kept[-1].write(now, event, effects)
        count += 1
        if count in (60, 61, 150):
            kept[-1].close()
            kept.append(month.journal(lived, tmp_path, full_at=4096))

    lived.hear = hear
    lived.run()
    kept[-1].close()
    month.summarize(lived, kept[-1], tmp_path)
    names = [path.name for path in artifacts.journals(tmp_path)]
    assert names == [*(f"events.{n}.jsonl" for n in range(1, len(names))), "events.jsonl"]
    assert len(names) > 6
    assert audit.audit(tmp_path).startswith(
        "exactly once: 10,000 records x 10 epochs in 1,000 steps, 21 rings"
    )


def test_a_master_killed_while_it_begins_a_segment_leaves_a_journal_that_the_next_goes_on_with(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.support.jobs.killed_writers", str(tmp_path), "1500"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    many, most, begun = int(told.stdout), 0, 0
    spec = Month(workers=2, changes=20).spec
    for number in range(1, many):
        output = tmp_path / str(number)
        begun += journal.unfinished(output, spec) is not None
        journal.Journal(output / artifacts.JOURNAL, month.RUN, spec, dict).close()
        assert not list(output.glob(".events*")), "half a segment"
        proof, chain = JournalProof(), ""
        for reader in segments(output):
            assert (reader.after, JournalProof.load(reader.head["proof"])) == (chain, proof), reader.path
            if reader.begins:
                proof.begin(reader.head["values"])
            for line, entry in reader:
                proof.note(entry, str(line))
            assert not reader.torn
            chain = reader.link.chain
        most = max(most, reader.number)
    assert most > 4 and many > 3 * most
    assert begun >= many - 4, "only a job whose first head was not in place has not begun"


def test_without_links_a_killed_master_may_leave_no_last_segment_and_the_next_goes_on_all_the_same(
    tmp_path: Path,
) -> None:
    lived = Month(workers=2, changes=20)
    kept = month.journal(lived, tmp_path, full_at=4096)
    lived.hear = kept.write
    for act in (lived.begin, *[lived.change] * 8):
        act()
    while not list(JournalReader(tmp_path / artifacts.JOURNAL)):  # a segment that has just begun
        lived.change()
    kept.close()
    number = JournalReader(tmp_path / artifacts.JOURNAL).number
    (tmp_path / artifacts.JOURNAL).rename(artifacts.segment(tmp_path, number))  # and then it was killed
    assert journal.unfinished(tmp_path, lived.spec) is not None
    month.journal(lived, tmp_path).close()
    *_, before, last = segments(tmp_path)
    assert (before.number, last.number) == (number, number + 1)
    assert len(list(before)) > 0 and last.after == before.link.chain


def with_most_bytes_in_a_file(most: int, act: Callable[[], None]) -> None:
    """A disk that has no room for more: what is written beyond is refused (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_for_another_segment_a_master_goes_on_in_this_one(tmp_path: Path) -> None:
    lived = Month(workers=1, changes=0)
    too_long = [True]

    def state() -> object:
        return {"long": "x" * 200_000} if too_long else {}

    kept = journal.Journal(tmp_path / artifacts.JOURNAL, "a run", lived.spec, state, full_at=4096)

    def write(lines: int) -> None:
        for _ in range(lines):
            kept.write(1.0, ev.Tick(), [])

    with_most_bytes_in_a_file(100_000, lambda: write(200))
    assert [path.name for path in artifacts.journals(tmp_path)] == [artifacts.JOURNAL]
    assert kept.trouble == "", "there is room for lines"
    assert os.listdir(tmp_path) == [artifacts.JOURNAL], "no half of a segment"
    too_long.clear()
    with_most_bytes_in_a_file(100_000, lambda: write(200))
    assert len(artifacts.journals(tmp_path)) > 1
    kept.close()
    assert sum(len(list(JournalReader(path))) for path in artifacts.journals(tmp_path)) == 400


def test_lines_for_which_there_is_no_room_wait_and_then_a_segment_begins(tmp_path: Path) -> None:
    lived = Month(workers=1, changes=0)
    kept = journal.Journal(tmp_path / artifacts.JOURNAL, "a run", lived.spec, dict, full_at=8192)

    def write(lines: int) -> None:
        for _ in range(lines):
            kept.write(1.0, ev.Tick(), [])

    with_most_bytes_in_a_file(6000, lambda: write(100))
    assert "it is kept in memory until there is room" in kept.trouble
    assert len(artifacts.journals(tmp_path)) == 1
    write(1)
    assert kept.trouble == ""
    assert len(artifacts.journals(tmp_path)) == 2
    kept.close()
    assert sum(len(list(JournalReader(path))) for path in artifacts.journals(tmp_path)) == 101


async def test_streams_are_served_while_a_segment_is_begun_and_nothing_is_done_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is as slow as can be: it goes on when something else on the master's loop has let it."""
    disk, waits, fsync, loop = threading.Event(), asyncio.Event(), os.fsync, asyncio.get_running_loop()
    done: list[ef.Effect] = []

    def slow(file: int) -> None:
        loop.call_soon_threadsafe(waits.set)
        assert disk.wait(30)
        fsync(file)

    class Doing:
        def perform(self, effect: ef.Effect) -> None:
            done.append(effect)

        def changed(self) -> None: ...

    master = Master(Month(workers=1, changes=0).spec, RunId("a run"))
    state = partial(snapshot.dump, master.job)
    kept = journal.Journal(tmp_path / artifacts.JOURNAL, "a run", master.spec, state, full_at=1)
    while not kept.full:
        kept.note(0.0, ev.Tick(), [])
    monkeypatch.setattr(os, "fsync", slow)
    life = asyncio.create_task(master.live(Doing(), Doing(), kept))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await waits.wait()
    assert master.job.pool.next_id == 1 and done == [], "it has decided, and does nothing yet"
    disk.set()
    master.stop("enough")
    master.emit(ev.Gone(WorkerId(0), code=0))
    await life
    kept.close()
    assert any(isinstance(effect, ef.Create) for effect in done)
    assert len(segments(tmp_path)) > 1


def test_the_whole_journal_is_rescued(tmp_path: Path) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    job.mkdir()
    elsewhere.mkdir()
    lived = Month(workers=2, changes=20)
    kept = month.journal(lived, job, full_at=4096)
    lived.hear = kept.write
    lived.run()
    kept.rescue(elsewhere)
    kept.close()
    month.summarize(lived, kept, elsewhere)
    assert len(artifacts.journals(elsewhere)) > 3
    assert audit.audit(elsewhere).startswith("exactly once: 10,000 records x 10 epochs")


async def test_a_saved_model_is_confirmed_once_it_is_in_the_journal() -> None:
    """A worker that gets this answer may die: the model is not trained again."""
    order: list[str] = []

    class Noted:
        trouble, full = "", False

        def note(self, now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
            order.append(type(event).__name__)

    class Answers:
        def acknowledge(self, saved: ev.Saved) -> None:
            order.append(f"confirmed to {saved.worker}")

        def changed(self) -> None: ...

        def perform(self, effect: ef.Effect) -> None: ...

    master = Master(JobSpec.parse(values.defaults()), RunId("run-1"))
    master.emit(ev.Saved(WorkerId(3), "model.keras"))
    living = asyncio.create_task(master.live(cast(Any, Answers()), cast(Any, Answers()), cast(Any, Noted())))
    async with asyncio.timeout(10):
        while len(order) < 3:
            await asyncio.sleep(0.01)
    living.cancel()
    assert order == ["Begin", "Saved", "confirmed to 3"]
