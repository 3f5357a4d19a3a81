# SPDX-License-Identifier: Apache-2.0
"""The files of an output directory: `edl.contract.artifacts`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.errors import EdlError


def test_a_directory_is_one_jobs_until_its_last_process_has_ended(tmp_path: Path) -> None:
    held = artifacts.lock(tmp_path)
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held])
    os.close(held)
    with pytest.raises(EdlError, match="another job runs in this directory"):
        artifacts.lock(tmp_path)
    heir.kill()
    heir.communicate()
    os.close(artifacts.lock(tmp_path))


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    artifacts.write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        artifacts.write_whole(path, "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
