# SPDX-License-Identifier: Apache-2.0
"""Hooks of all tests: signal handlers as at a terminal, and the seconds of each test file.

With EDL_DURATIONS=FILE, lines `SECONDS  TEST` are appended there, fixtures included, and the reasons of
skipped tests to FILE.skipped; scripts/test shows the slowest tests, and what was skipped.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.flaky import Flaky

SHOWN_SECONDS = 2.0  # faster files share one line

_seconds = defaultdict[str, float](float)
_tests = defaultdict[str, float](float)


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("EDL_FLAKY"):
        config.pluginmanager.register(Flaky(Path(folder)))
    # A shell that starts the tests in the background makes them ignore signals, and their subprocesses
    # inherit that. But the tests interrupt jobs as a terminal does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
    gc.disable()  # until all tests are imported: collections take a sixth of TensorFlow's import
    os.environ.setdefault("EDL_REPORT", "0")  # a test of the report asks for it; it takes seconds of each job


def pytest_collection_finish() -> None:
    """Exclude the objects of imports from garbage collection: TensorFlow's take a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration
    _tests[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each file, fixtures included."""
    # pytest-xdist calls this in its workers too, but the controller has received the reports of all of them.
    if not _seconds or hasattr(config, "workerinput"):
        return
    if file := os.environ.get("EDL_DURATIONS"):
        with open(file, "a") as lines:
            lines.writelines(f"{seconds:8.1f}  {test}\n" for test, seconds in _tests.items())
        with open(f"{file}.skipped", "a") as lines:
            lines.writelines(f"{why}\n" for why in map(_reason, terminalreporter.stats.get("skipped", [])))
    terminalreporter.section("seconds by file")
    short = 0.0
    for file, seconds in sorted(_seconds.items(), key=lambda one: one[1], reverse=True):
        if seconds >= SHOWN_SECONDS:
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        else:
            short += seconds
    terminalreporter.write_line(f"{short:8.1f}  all others")


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped, in one line."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(why.removeprefix("Skipped: ").split())
