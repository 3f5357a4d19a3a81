# SPDX-License-Identifier: Apache-2.0
"""The owner of an output directory: `edl.trainer.runtime.output_lock`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.errors import EdlError
from edl.trainer.runtime import output_lock


def test_the_workers_of_one_run_hold_a_directory_together_and_keep_others_out(tmp_path: Path) -> None:
    held = [output_lock.hold(tmp_path, "run-1", seconds=0) for _ in range(3)]
    with pytest.raises(EdlError, match=r"another run \(run-1\) still use this output directory"):
        output_lock.hold(tmp_path, "run-2", seconds=0)
    for file in held[:2]:
        assert file is not None
        os.close(file)
    with pytest.raises(EdlError, match="run-1"):
        output_lock.hold(tmp_path, "run-2", seconds=0)
    assert held[2] is not None
    os.close(held[2])
    file = output_lock.hold(tmp_path, "run-2", seconds=0)
    assert file is not None
    with pytest.raises(EdlError, match="run-2"):
        output_lock.hold(tmp_path, "run-1", seconds=0)
    os.close(file)


def test_a_directory_without_locks_is_nobodys(tmp_path: Path) -> None:
    assert output_lock.hold(tmp_path / "missing", "run-1", seconds=0) is None


def test_a_run_writes_beside_the_results_of_another(tmp_path: Path) -> None:
    for _ in range(2):  # each of its workers, also after it has written
        assert output_lock.results_of(tmp_path, "one") == tmp_path
        (tmp_path / "history.json").write_text("{}")
    (tmp_path / "model.keras").write_text("trained")
    for _ in range(2):
        assert output_lock.results_of(tmp_path, "two") == tmp_path / "run-two"
    assert output_lock.results_of(tmp_path, "three") == tmp_path / "run-three"
    assert output_lock.results_of(tmp_path, "one") == tmp_path


def test_unknown_results_are_kept_and_a_run_without_results_leaves_the_directory(
    tmp_path: Path,
) -> None:
    unknown, failed = tmp_path / "unknown", tmp_path / "failed"
    for folder in (unknown, failed):
        folder.mkdir()
    (unknown / "model.weights.h5").write_text("of an older version")
    assert output_lock.results_of(unknown, "one") == unknown / "run-one"
    assert output_lock.results_of(failed, "one") == failed
    assert output_lock.results_of(failed, "two") == failed, (
        "the first one has failed before it wrote anything"
    )
