# SPDX-License-Identifier: Apache-2.0
"""What checks the counting model's rows: it finds every record that was lost, doubled or made up."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edl.checkpoints import Store, Tensor
from tests.support.checkpoints.checkpoints import TENSORS, manifest_of
from tests.support.ps import rows

RECORDS, EPOCHS = 20, 3


def tensors(server: int, ids: np.ndarray, values: np.ndarray) -> dict[str, Tensor]:
    """A server's part of a checkpoint."""
    about = json.dumps({"step": 7, "server": server, "servers": 2, "tables": [{"name": "counts", "dim": 2}]})
    return {
        f"ps.{server}.about": Tensor.of(np.frombuffer(about.encode(), np.uint8)),
        f"ps.{server}.0.ids": Tensor.of(np.ascontiguousarray(ids)),
        f"ps.{server}.0.rows": Tensor.of(np.ascontiguousarray(values)),
    }


def write(directory: Path, *servers: tuple[np.ndarray, np.ndarray]) -> None:
    """A whole checkpoint of step 7: a worker's part, and one of each server."""
    of = 1 + len(servers)
    writing = Store.open(str(directory)).begin(7, "1")
    mine = writing.write_part(0, of, TENSORS)
    theirs = [writing.write_part(n + 1, of, tensors(n, *server)) for n, server in enumerate(servers)]
    state = {"servers": {"count": len(theirs), "parts": [part.name for part in theirs]}}
    manifest = manifest_of(7, TENSORS, (mine,), state=state)
    writing.commit(replace(manifest, parts=(mine, *theirs)))


def counted() -> tuple[np.ndarray, np.ndarray]:
    return rows.ids_of(np.arange(RECORDS)), np.full((RECORDS, 2), EPOCHS, np.float32)


def test_the_rows_of_all_servers_are_put_together(tmp_path: Path) -> None:
    ids, values = counted()
    write(tmp_path, (ids[::2], values[::2]), (ids[1::2], values[1::2]))
    assert rows.check_rows(tmp_path, RECORDS, EPOCHS, step=7) == ""
    assert "of step 7, not of 8" in rows.check_rows(tmp_path, RECORDS, EPOCHS, step=8)


def test_an_id_on_two_servers_is_wrong(tmp_path: Path) -> None:
    ids, values = counted()
    write(tmp_path, (ids[:11], values[:11]), (ids[10:], values[10:]))
    assert "is on several servers" in rows.check_rows(tmp_path, RECORDS, EPOCHS)


def test_without_a_checkpoint_there_is_nothing_to_count(tmp_path: Path) -> None:
    assert "there is no whole checkpoint" in rows.check_rows(tmp_path, RECORDS, EPOCHS)


@pytest.mark.parametrize(
    ("record", "row", "words"),
    [
        (4, [2, 2], "record 4 (id 8709371129873690708) was counted 2 times, not 3 times"),
        (5, [4, 4], "was counted 4 times, not 3 times"),
        (6, [3, 4], "was counted [3.0, 4.0] times (half a row), not 3 times"),
    ],
)
def test_a_wrong_count_is_told_with_its_record(record: int, row: list[int], words: str) -> None:
    ids, values = counted()
    values[record] = row
    said = rows.difference(ids, values, RECORDS, EPOCHS)
    assert words in said
    assert said.endswith("1 of 20 records are wrong, 0 rows are of no record")


def test_a_missing_and_a_foreign_row_are_told() -> None:
    ids, values = counted()
    ids[3] = 12345
    said = rows.difference(ids, values, RECORDS, EPOCHS)
    assert "record 3 (id" in said and "was counted 0 times" in said
    assert "id 12345 is no record's, and has the row [3.0, 3.0]" in said


def test_the_ids_are_far_apart() -> None:
    ids = rows.ids_of(np.arange(100_000))
    assert len(np.unique(ids)) == 100_000
    assert 0.45 < (ids < 0).mean() < 0.55
