"""Who has an output directory: `trainer.output_lock`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.errors import EdlError
from trainer import output_lock


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
