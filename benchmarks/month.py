# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench month`: the journal of a job that runs for a month: how large it gets, how fast it is read.

The real core and the real journal; workers and parameter servers are played, in virtual time
(tests/support/jobs/month.py): with a checkpoint every two minutes, a thousand evaluations, servers that are
lost, and more of them and fewer. `--quick` lives one day of that month.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from edl.config import values
from edl.contract import artifacts
from edl.errors import EdlError
from edl.journal import audit
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.journal import journal, replay
from tests.support.jobs.month import BusyMonth, Month, keep, summarize
from tests.support.jobs.month import journal as opened

WORKERS, CHANGES = 64, 10_000
RECORDS, EPOCHS, BATCH = 10_000_000, 10, 2048
EVALUATIONS = 1000
MAXIMUM = values.defaults()["journal"]["maxBytes"]
SLOW = 0.002  # seconds: a line that began a segment


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench month", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a thirtieth of the changes and of the records")
    few = 30 if parser.parse_args(argv).quick else 1
    with tempfile.TemporaryDirectory() as directory:
        _month(Path(directory), few)
    with tempfile.TemporaryDirectory() as directory:
        _thousand(Path(directory))
    return 0


def _month(output: Path, few: int) -> None:
    month = BusyMonth(
        WORKERS,
        CHANGES // few,
        days=30 / few,
        evaluations=EVALUATIONS // few,
        records=RECORDS // few,
        epochs=EPOCHS,
        batch=BATCH,
        most=MAXIMUM,
    )
    kept, taken, largest, kinds = opened(month, output), [], 0, Counter[str]()

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        nonlocal largest
        began = time.perf_counter()
        kept.write(now, event, effects)
        taken.append(time.perf_counter() - began)
        kinds[type(event).__name__] += 1
        if taken[-1] > SLOW:
            largest = max(largest, _size(output))

    month.hear = hear
    month.begin()
    lived = _timed(lambda: f"{sum(1 for _ in _changes(month)):,} times two changes")
    take_over = _timed(lambda: f"{len(_workers(output, month))} workers may live")
    month.finish()
    kept.close()
    summarize(month, kept, output)
    files = artifacts.journals(output)
    taken.sort()
    _say("events", f"{len(taken):,}, of {month.job.ring.generation:,} rings of {WORKERS} workers")
    _say("of these", ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()))
    _say("lived and written", lived)
    _say(
        "a line",
        f"{1e6 * taken[len(taken) // 2]:.0f} us (median), a segment {1000 * taken[-1]:.0f} ms (longest)",
    )
    _say("journal", f"{len(files)} segments, {_size(output) / 1e6:.1f} MB; at most {largest / 1e6:.1f} MB")
    _say("a head", f"{max(len(path.open().readline()) for path in files) / 1e3:.0f} KB (the largest)")
    _say("a new master reads", take_over)
    _say("audit", _timed(lambda: audit.audit(output)))
    _say("replay", _timed(lambda: f"exit status {replay.main(str(output))}"))


def _changes(month: Month) -> Iterator[None]:
    while month.nth < month.times:
        month.change()
        yield


def _workers(output: Path, month: Month) -> tuple[object, ...]:
    found = journal.unfinished(output, month.spec)
    assert found is not None
    return found[1].workers


def _thousand(output: Path) -> None:
    month = Month(1000, 2, most=1 << 30)
    keep(month, output)
    sizes: dict[str, list[int]] = {}
    for path in artifacts.journals(output):
        for line in path.read_text().splitlines()[1:]:
            kind = "Form" if '{"type":"Form"' in line else line.partition('"type":"')[2].partition('"')[0]
            sizes.setdefault(kind, []).append(len(line) + 1)
    form = max(sizes["Form"])
    each = sum(sum(sizes[kind]) / len(sizes[kind]) for kind in ("LeftRing", "JoinedRing", "Stepped"))
    _say("a ring of 1,000", f"the line that forms it {form / 1e3:.1f} KB; what its members say {each:.0f} KB")


def _size(output: Path) -> int:
    return sum(path.stat().st_size for path in artifacts.journals(output))


def _timed(act: Callable[[], str]) -> str:
    began, used = time.perf_counter(), time.process_time()
    try:
        told = act()
    except EdlError as error:
        told = str(error)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return f"{seconds:.2f} s ({cpu:.2f} s of CPU): {told}"


def _say(what: str, text: str) -> None:
    print(f"{what:20}{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
