# SPDX-License-Identifier: Apache-2.0
"""The seconds of each test, and the skipped ones, that scripts/test shows at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_test_is_written_once_though_workers_of_xdist_print_a_summary_too(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_two.py").write_text(
        "def test_one(): ...\ndef test_other(): ...\n"
        "import pytest\n@pytest.mark.skip('no root')\ndef test_third(): ...\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "EDL_DURATIONS": str(tmp_path / "durations")},
        check=True,
        capture_output=True,
    )
    written = [line.split()[1] for line in (tmp_path / "durations").read_text().splitlines()]
    assert sorted(written) == [f"test_two.py::test_{name}" for name in ("one", "other", "third")]
    assert (tmp_path / "durations.skipped").read_text() == "no root\n"
