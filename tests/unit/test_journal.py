"""The journal of an earlier version of edl: `master.journal`, `edl.audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl import audit
from edl.config import values
from edl.contract import artifacts
from edl.errors import EdlError
from master import journal


def written_by_an_earlier_edl(output: Path) -> Path:
    head = {"journal": "edl", "version": 1, "run_id": "a run", "values": values.defaults()}
    (output / artifacts.JOURNAL).write_text(json.dumps(head) + "\n")
    (output / artifacts.SUMMARY).write_text("{}")
    return output / artifacts.JOURNAL


@pytest.mark.parametrize("read", [lambda path: journal.read(path), lambda path: audit.audit(path.parent)])
def test_a_journal_of_an_earlier_version_is_refused_in_words(read, tmp_path: Path) -> None:
    path = written_by_an_earlier_edl(tmp_path)
    with pytest.raises(EdlError, match=r"events.jsonl: the journal has version 1, this edl reads version 5"):
        read(path)


def test_a_new_master_of_the_run_keeps_it_all_the_same(tmp_path: Path) -> None:
    path = written_by_an_earlier_edl(tmp_path)
    before = path.read_text()
    journal.Journal(path, "a run", values.defaults()).close()
    assert (tmp_path / "events.1.jsonl").read_text() == before


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / artifacts.JOURNAL
    path.write_text('{"journal": "of a ship"}\n')
    with pytest.raises(EdlError, match="not a journal of edl"):
        journal.read(path)
