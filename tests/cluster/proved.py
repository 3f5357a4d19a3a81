# SPDX-License-Identifier: Apache-2.0
"""Tests of the cluster itself, not of what runs in it: proved once for the files that make it.

They start and end clusters for ten minutes, and have the same result until one of these files changes. When
all of them have passed, a stamp with the digest of the files is left in the cache; while it is there, they
are not part of a run of all tests. They run if their file is named.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {"test_cluster.py", "test_script.py"}
MADE_FROM = (
    "tools/test_cluster/machine",
    "tools/test_cluster/go",
    "tests/cluster/cluster.py",
    "tests/cluster/conftest.py",
    "tests/cluster/proved.py",
    *(f"tests/cluster/{name}" for name in sorted(TESTS)),
    "scripts/cluster",
    "scripts/dev/lib.sh",
    "scripts/dev/cached.py",
)


class Proved:
    """Leaves out tests that are proved, and leaves a stamp when others are.

    Args:
        cache: the folder of the stamps.
        named: what the command line of pytest names.
    """

    def __init__(self, cache: Path, named: list[str]):
        self._stamp = cache / f"cluster-proved-{digest()}"
        self._named = any(Path(word.partition("::")[0]).name in TESTS for word in named)
        self._these: frozenset[str] = frozenset()
        # Tests that have not passed; None: one has failed, or not all of them are part of this run.
        self._open: set[str] | None = None
        self.left_out = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        here = Path(__file__).parent
        these = [item for item in items if item.path.parent == here and item.path.name in TESTS]
        if {item.path.name for item in these} != TESTS:
            return
        if self._stamp.exists() and not self._named:
            self.left_out = len(these)
            config.hook.pytest_deselected(items=these)
            items[:] = [item for item in items if item not in these]
        elif not config.getoption("keyword") and not config.getoption("markexpr"):
            self._these = frozenset(item.nodeid for item in these)
            self._open = set(self._these)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._these:
            return
        if report.failed:  # also while it is set up or torn down
            self._open = None
        elif self._open and report.when == "call" and report.passed:  # neither skipped nor expected to fail
            self._open.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._open == set():
            self._stamp.parent.mkdir(parents=True, exist_ok=True)
            self._stamp.touch()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} tests of the cluster itself were left out: "
                f"they have passed for these files ({self._stamp})"
            )


def cache() -> Path:
    """Where scripts/dev/lib.sh has it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EDL_CACHE") or Path(home) / "edl")


def digest(root: Path = ROOT) -> str:
    found = hashlib.sha256()
    for name in MADE_FROM:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(root)}\0{file.stat().st_mode & 0o111}\0".encode())
                found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]
