"""For all tests: signals as at a terminal, and what each file of tests took."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

SHOWN_SECONDS = 2.0  # what took less is told in one line

_seconds = Counter[str]()


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them ignore signals, and what they start
    # inherits that; but they interrupt jobs as a terminal does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of each file, fixtures included: where the time of a run of all tests goes."""
    if not _seconds:
        return
    terminalreporter.section("seconds by file")
    short = 0.0
    for file, seconds in _seconds.most_common():
        if seconds >= SHOWN_SECONDS:
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        else:
            short += seconds
    terminalreporter.write_line(f"{short:8.1f}  all others")
