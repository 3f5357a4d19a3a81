# SPDX-License-Identifier: Apache-2.0
"""Large and long jobs in the report and on the live page: readable, small, and read only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.journal.format import JournalDamaged, JournalReader
from edl.master.core import view
from edl.report import live, reading, write
from edl.report.strip import LANES, strip
from tests.support.jobs import month
from tests.support.jobs.month import BusyMonth, Month
from tests.unit.cli.test_report import Page

MAX_BYTES = 500_000  # of a page about 1,000 workers, a few of them lost


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Month, Path]:
    """A job with 1,000 workers: one is lost and replaced, then a second one is lost."""
    output = tmp_path_factory.mktemp("thousand")
    lived = Month(1000, 4, most=1 << 30)
    kept = month.journal(lived, output)
    lived.hear = kept.write
    lived.begin()
    lived.change()
    lived._lose(lived.job.ring.members[500])
    kept.close()
    return lived, output


def test_a_report_of_1000_workers_is_small_and_names_those_that_were_lost(
    thousand: tuple[Month, Path],
) -> None:
    lived, output = thousand
    found = reading.read(output)
    lost = {worker.id for worker in found.workers.values() if worker.lost}
    assert len(found.workers) == 1002 and len(lost) == 2
    text = write.html(output, view.status(lived.job, lived.now))
    assert len(text.encode()) < MAX_BYTES
    rows = {int(row[0]): row[-1] for row in Page(text).rows("worker")}
    assert len(rows) == 200 and lost <= rows.keys()
    assert {number for number, end in rows.items() if end.startswith("lost: ")} == lost
    assert "The picture has the 64 that were started or lost last." in text
    assert all(f">worker {number}" in text for number in lost), "the picture names them, too"


def test_the_live_page_counts_1000_workers_and_lists_the_missing_one_first(
    thousand: tuple[Month, Path],
) -> None:
    lived, output = thousand
    text = live.now(view.status(lived.job, lived.now))
    assert "workers: member 999, pending 1" in text
    rows = Page(text).rows("worker")
    assert (len(rows), rows[0][3]) == (live.MAX_WORKERS, "pending")
    ring = strip(reading.read(output))
    assert (ring.count("<b>worker "), "the 24 that were started or lost last" in ring) == (LANES, True)
    assert "ring of 999" in ring and ring.count(": lost") == 2 and len(ring) < 20_000


def test_a_growing_journal_is_read_once_over_many_segments(tmp_path: Path) -> None:
    lived = BusyMonth(3, 40, days=0.01, rare=4)
    kept = month.journal(lived, tmp_path, full_at=1 << 14)
    lived.hear = kept.write
    lived.begin()
    following = reading.Following(tmp_path)
    for _ in range(lived.times - 1):
        lived.change()
        assert following.read() == reading.read(tmp_path)
    first = artifacts.segment(tmp_path, 1)
    assert len(artifacts.journals(tmp_path)) > 3 and first.exists()
    first.write_text(first.read_text().replace('"Stepped"', '"Skipped"'))
    before = following.read()
    lived.change()
    after = following.read()
    assert len(after.changes) >= len(before.changes) + 2
    with pytest.raises(JournalDamaged):
        reading.read(tmp_path)
    kept.close()


def test_a_segment_is_read_to_its_end_under_its_new_name(tmp_path: Path) -> None:
    lived = Month(2, 20)
    kept = month.journal(lived, tmp_path, full_at=4096)
    lived.hear = kept.write
    lived.begin()
    reader = JournalReader(tmp_path / artifacts.JOURNAL)
    while not artifacts.segment(tmp_path, reader.number).exists():
        lived.change()
    kept.close()
    assert list(reader) == list(JournalReader(artifacts.segment(tmp_path, reader.number)))
    assert not list(reader), "each line is read once"
