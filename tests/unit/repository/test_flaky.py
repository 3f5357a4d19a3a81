# SPDX-License-Identifier: Apache-2.0
"""The ledger of flaky tests: which tests are run again, what is written down, and what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import flaky

# Fails until it has been run so often.
TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["a", "b", "c", "d", "e", "never"])
def test_it(name):
    with open(Path(__file__).with_name(name), "a") as runs:
        runs.write("x")
    print("seed 17")
    assert Path(__file__).with_name(name).stat().st_size > 1 and name != "never"
"""


def entry(test: str, landing: int) -> dict[str, Any]:
    return {"test": test, "seed": "", "load": 1.0, "date": "2026-01-01", "landing": landing}


def ran(folder: Path, *names: str) -> tuple[str, Path]:
    """What pytest prints about tests of these names that fail at first; the folder of pardons."""
    (folder / "test_first_failing.py").write_text(TEST)
    (folder / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.support import flaky\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(flaky.Flaky(Path('pardons')))\n"
    )
    (folder / "pardons").mkdir()
    tests = [f"test_first_failing.py::test_it[{name}]" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(flaky.ROOT)},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr, folder / "pardons"


def test_a_failed_test_is_run_again_and_written_down(tmp_path: Path) -> None:
    said, pardons = ran(tmp_path, "a")
    assert "1 passed" in said, said
    ledger = tmp_path / "flaky.json"
    ledger.write_text(json.dumps([entry("test_first_failing.py::test_it[a]", 0)]))
    assert flaky.settle(pardons, ledger) == [], "the last time is long ago"
    assert "assert (1 > 1" in (pardons / "0").read_text(), "why it failed is printed with the entry"
    before, now = flaky.read(ledger)
    assert before["landing"] == 0
    assert (now["test"], now["seed"], now["landing"]) == (
        "test_first_failing.py::test_it[a]",
        "17",
        flaky.landing(),
    )


def test_a_second_entry_within_fifty_landings_fails(tmp_path: Path) -> None:
    said, pardons = ran(tmp_path, "a")
    assert "1 passed" in said, said
    ledger = tmp_path / "flaky.json"
    ledger.write_text(json.dumps([entry("test_first_failing.py::test_it[a]", flaky.landing() - 49)]))
    (why,) = flaky.settle(pardons, ledger)
    assert "less than 50 apart" in why
    assert flaky.repeated([entry("a", 100), entry("b", 120), entry("a", 150)]) == []
    assert len(flaky.repeated([entry("a", 149), entry("b", 120), entry("a", 100)])) == 1


def test_a_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    said, pardons = ran(tmp_path, "never")
    assert "1 failed" in said, said
    assert (tmp_path / "never").read_text() == "xx"
    assert list(pardons.glob("pardon-*")) == []


def test_a_fifth_test_of_a_run_is_not_run_again(tmp_path: Path) -> None:
    said, pardons = ran(tmp_path, "a", "b", "c", "d", "e")
    assert "1 failed, 4 passed" in said, said
    assert len(list(pardons.glob("pardon-*"))) == 4
    assert (tmp_path / "e").read_text() == "x"


@pytest.mark.parametrize("key", ["test", "seed", "load", "date", "landing"])
def test_the_committed_ledger_is_complete(key: str) -> None:
    assert all(key in entry for entry in flaky.read())


def test_the_committed_ledger_has_no_test_twice_within_fifty_landings() -> None:
    assert flaky.repeated(flaky.read()) == []
