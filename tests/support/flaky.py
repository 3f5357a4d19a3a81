# SPDX-License-Identifier: Apache-2.0
"""The ledger of flaky tests, which failed and then passed: with seed, load and date.

scripts/test names a folder in EDL_FLAKY. A failing test is then repeated at once, while the same other tests
run beside it. At most four tests of a run are repeated. If a repeated test passes, `settle` adds it to
tests/flaky.json and prints the entry, which must be committed with the next change. A second entry of a test
within 50 commits fails the run, because its race should have been found after the first entry.

    python -m tests.support.flaky FOLDER     settle the results that the plugin has left there
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "tests" / "flaky.json"
MAXIMUM = 4  # tests of a run that may be run again
LANDINGS = 50  # commits on main within which a test has at most one entry

Entry = dict[str, Any]
"""`test` (its pytest id), `seed` (as printed, or empty), `load` (average of a minute), `date`, `landing`."""


def read(ledger: Path = LEDGER) -> list[Entry]:
    return list(json.loads(ledger.read_text()))


def landing() -> int:
    """The number of commits up to this one; 0 where the tree is no clone."""
    count = ["git", "rev-list", "--count", "HEAD"]
    return int(subprocess.run(count, cwd=ROOT, capture_output=True, text=True).stdout or 0)


def repeated(entries: list[Entry]) -> list[str]:
    """List the errors of a ledger: each test with two entries within LANDINGS."""
    landings = defaultdict[str, list[int]](list)
    for entry in entries:
        landings[entry["test"]].append(entry["landing"])
    return [
        f"{test}: landings {first} and {second} are less than {LANDINGS} apart; fix the race"
        for test, numbers in landings.items()
        for first, second in pairwise(sorted(numbers))
        if second - first < LANDINGS
    ]


def settle(folder: Path, ledger: Path = LEDGER) -> list[str]:
    """Add the pardoned tests of a run to the ledger; returns the reasons why the run failed nevertheless."""
    pardoned = [json.loads(file.read_text()) for file in sorted(folder.glob("pardon-*"))]
    if not pardoned:
        return []
    entries = [*read(ledger), *pardoned]
    ledger.write_text(json.dumps(entries, indent=1) + "\n")
    return repeated(entries)


class Flaky:
    """The pytest plugin that repeats failing tests.

    Args:
        folder: the folder of this run, shared by its processes.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        # A failing setup or teardown may have left the fixtures of other tests in any state.
        if [report.when for report in failed] == ["call"] and (ticket := self._ticket()):
            entry = made(failed[0])
            ticket.write_text(failed[0].longreprtext)
            item._initrequest()  # type: ignore[attr-defined]
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if not any(report.failed for report in reports):
                ticket.with_name(f"pardon-{ticket.name}").write_text(json.dumps(entry))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _ticket(self) -> Path | None:
        """Acquire the right to repeat one more test; None if MAXIMUM tests were repeated already."""
        for number in range(MAXIMUM):
            try:
                (self._folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            return self._folder / str(number)
        return None


def made(report: pytest.TestReport) -> Entry:
    """Make the ledger entry of a failed test."""
    seed = re.search(r"\bseed[ =:]+(\d+)", f"{report.capstdout}\n{report.longreprtext}")
    return {
        "test": report.nodeid,
        "seed": seed[1] if seed else "",
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
        "landing": landing(),
    }


def main(folder: Path) -> int:
    wrong = settle(folder)
    for file in sorted(folder.glob("pardon-*")):
        print(file.with_name(file.name.removeprefix("pardon-")).read_text())
        print(f"failed, then passed under the same load; entered in tests/flaky.json: {file.read_text()}")
    for why in wrong:
        print(f"flaky: {why}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
