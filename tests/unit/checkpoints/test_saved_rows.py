# SPDX-License-Identifier: Apache-2.0
"""Rows that a job with parameter servers has left: how many there are, and which."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from edl.checkpoints import Checkpoint, Store
from edl.errors import CheckpointDamaged, CheckpointError, ModelError
from edl.trainer.embedding import saved_rows
from edl.trainer.embedding.interfaces import Table
from tests.support.checkpoints.checkpoints import write as write_plain
from tests.unit.checkpoints.test_rows_of_a_checkpoint import counted as expected
from tests.unit.checkpoints.test_rows_of_a_checkpoint import write


def newest(directory: Path) -> Checkpoint:
    return Store.open(str(directory)).checkpoints()[-1]


def test_the_parts_of_all_servers_are_counted_and_read(tmp_path: Path) -> None:
    ids, rows = expected()
    write(tmp_path, (ids[:3], rows[:3]), (ids[3:], rows[3:]), (ids[:0], rows[:0]))
    assert saved_rows.counted(newest(tmp_path)) == {"counts": len(ids)}
    found = saved_rows.tables(newest(tmp_path))["counts"]
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.rows, rows)


def test_a_checkpoint_without_servers_has_no_tables(tmp_path: Path) -> None:
    write_plain(Store.open(str(tmp_path)), 7)
    assert saved_rows.counted(newest(tmp_path)) == {} == saved_rows.tables(newest(tmp_path))


def test_an_id_on_two_servers_is_damage(tmp_path: Path) -> None:
    ids, rows = expected()
    write(tmp_path, (ids[:11], rows[:11]), (ids[10:], rows[10:]))
    with pytest.raises(CheckpointDamaged, match="table 'counts' has an id on several servers"):
        saved_rows.tables(newest(tmp_path))


@pytest.mark.parametrize("damage", [b"", b"\x10\0\0\0\0\0\0\0not JSON at all,", b"\xff" * 64])
def test_a_part_that_is_none_is_damage_and_named(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, expected())
    checkpoint = newest(tmp_path)
    (name,) = checkpoint.manifest.of_servers
    (tmp_path / checkpoint.directory / name).write_bytes(damage)
    for read in (saved_rows.counted, saved_rows.tables):
        with pytest.raises(CheckpointDamaged, match=f"{name}: not a parameter server's part"):
            read(checkpoint)


def test_a_part_that_is_cut_off_or_missing_is_damage(tmp_path: Path) -> None:
    write(tmp_path, expected())
    checkpoint = newest(tmp_path)
    (name,) = checkpoint.manifest.of_servers
    path = tmp_path / checkpoint.directory / name
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(CheckpointDamaged, match="it ends before its last tensor"):
        saved_rows.tables(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{name}: is missing"):
        saved_rows.counted(checkpoint)


def table(name: str, dim: int) -> Table:
    return Table(name, dim, "{}", "{}")


def test_a_model_of_other_tables_is_refused_table_by_table(tmp_path: Path) -> None:
    ids, rows = expected()
    write(tmp_path, (ids, rows))
    of = saved_rows.RowsOfCheckpoint(newest(tmp_path), [table("counts", 2)])
    np.testing.assert_array_equal(of.all_rows(0)[1], rows)
    with pytest.raises(ModelError) as refused:
        saved_rows.RowsOfCheckpoint(newest(tmp_path), [table("users", 4), table("counts", 3)])
    assert "'users' has rows of length 4 here, and none there" in str(refused.value)
    assert "'counts' has rows of length 3 here, and 2 there" in str(refused.value)


def test_of_a_file_the_layers_are_counted_that_were_saved_with_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        for layer, ids, rows in [
            ("users", np.arange(5), np.zeros((5, 2), "f4")),
            ("none", np.arange(0), np.zeros((0, 2), "f4")),
            ("dense", np.zeros(2, "f4"), np.zeros((2, 2), "f4")),
        ]:
            group = file.create_group(f"layers/of_{layer}/vars")
            group.attrs["name"] = layer
            group["0"], group["1"] = ids, rows
        file["layers/table/vars/0"] = np.zeros((9, 2), "f4")
    assert saved_rows.counted_in_file(path) == {"users": 5, "none": 0}
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"m.weights.h5 is not a file that Keras has saved"):
        saved_rows.counted_in_file(path)
