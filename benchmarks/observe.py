# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench observe`: what it costs to observe a job, and to be able to resume it.

report       the report of a simulated month: 64 workers, 10,000 changes of the ring
page         the live page of a job with 1,000 workers: the master's processor with a viewer and without one,
             the first paint in Chromium, and the time until a lost worker is shown
checkpoint   the checkpoints of `edl run`: their share of the time of a job with 25 million parameters
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks import life, report
from benchmarks.month import BATCH, CHANGES, EPOCHS, EVALUATIONS, RECORDS, WORKERS
from benchmarks.report import Row
from edl.cli.local.job_values import LOCAL_SECONDS
from edl.config import values
from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.errors import MasterUnavailable
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import snapshot
from edl.master.journal.journal import Journal
from edl.master.spec import JobSpec
from edl.net.master_client import Client
from tests.support.jobs import month
from tests.support.jobs.month import BusyMonth

ROOT = Path(__file__).parents[1]
SECONDS = 600.0  # to wait for anything
MAX_KEPT = 1 << 30  # journal.maxBytes with which a month's journal is kept whole
MANY = 1000  # workers of the live page
WINDOW = 60.0  # seconds in which the master's processor time is measured
LOST_EVERY = 20.0  # seconds: a worker is lost and replaced, so the ring changes twice
STATUSES = 200  # requests whose cost is measured
STATUSES_A_SECOND = 2.0  # of a viewer, as in edl/report/live.js
FIRST_PAINT = """() => new Promise(resolve => new PerformanceObserver(
  seen => seen.getEntriesByName("first-contentful-paint").forEach(entry => resolve(entry.startTime))
).observe({type: "paint", buffered: true}))"""  # milliseconds since the address was opened


# --- the report


def reported(work: Path, rounds: int) -> Iterator[Row]:
    """The report of a month with the journal that is kept by default, and with all of it."""
    usual = values.defaults()["journal"]["maxBytes"]
    lived = BusyMonth(
        WORKERS,
        CHANGES,
        evaluations=EVALUATIONS,
        records=RECORDS,
        epochs=EPOCHS,
        batch=BATCH,
        most=usual,
    )
    kept: list[tuple[Path, Journal]] = []  # of one life, which takes longer than all the rest
    for most in (usual, MAX_KEPT):
        (output := work / f"month-{most}").mkdir()
        spec = JobSpec.parse(values.merge(lived.spec.values, {"journal": {"maxBytes": most}}))
        state = partial(snapshot.dump, lived.job)
        kept.append((output, Journal(output / artifacts.JOURNAL, month.RUN, spec, state)))

    def hear(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        for _, written_to in kept:
            written_to.write(now, event, effects)

    lived.hear = hear
    report.say("a month in virtual time")
    lived.run()
    for output, written_to in kept:
        written_to.close()
        month.summarize(lived, written_to, output)
    for name, (output, _) in zip(("journal.maxBytes by default", "the whole journal"), kept, strict=True):
        yield from written(output, rounds, name)


def written(output: Path, rounds: int, name: str) -> Iterator[Row]:
    """The seconds and the size of the report of an ended job, written by a process of its own."""
    taken, spent = [], []
    for _ in range(rounds):
        began, before = time.monotonic(), _of_children()
        subprocess.run([*module_command("edl.report.write"), str(output)], check=True, timeout=SECONDS)
        taken.append(time.monotonic() - began)
        spent.append(_of_children() - before)
    journal = sum(path.stat().st_size for path in artifacts.journals(output)) / 1e6
    size = (output / artifacts.REPORT).stat().st_size / 1e6
    title = f"report of a month, {name} ({journal:.0f} MB)"
    yield Row(f"{title}: time", taken, [], "s", "<= 10 s", statistics.median(taken) <= 10)
    yield Row(f"{title}: processor time", spent, [], "s", "")
    yield Row(f"{title}: size", [size], [], "MB", "<= 5 MB", size <= 5)


def _of_children() -> float:
    """Seconds of the processor that ended children of this process have used."""
    times = os.times()
    return times.children_user + times.children_system


# --- the live page


def watched(work: Path, rounds: int) -> Iterator[Row]:
    """Minutes of the master with a viewer and without, in turns, while workers are lost and replaced."""
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=work)))
        master, kill = stack.enter_context(_master(output))
        address, page_server = stack.enter_context(_page_server(output))
        browser = stack.enter_context(_browser())
        alone, viewed, asked, served, paints, complete, shown = [], [], [], [], [], [], []
        for _ in range(rounds):
            alone.append(_window(master, kill, None)[0])
            asked.append(_status(master))
            with closing(browser.new_context()) as context:
                page = context.new_page()
                page.goto(address)
                paints.append(page.evaluate(FIRST_PAINT) / 1000)
                page.locator("#ring svg").first.wait_for(timeout=1000 * SECONDS)
                complete.append(page.evaluate("performance.now()") / 1000)
                before = _used(page_server)
                began = time.monotonic()
                share, seen = _window(master, kill, page)
                viewed.append(share)
                shown += seen
                served.append((_used(page_server) - before) / (time.monotonic() - began))
    title = f"live page, {MANY:,} workers"
    yield Row(f"{title}: the master with a viewer; without", viewed, alone, "cores", "")
    # The difference above also contains the heartbeats, and a busy machine sends fewer of them.
    added = [cpu * STATUSES_A_SECOND for cpu in asked]
    met = statistics.median(added) <= 0.05
    yield Row(f"{title}: added by a viewer's requests", added, [], "cores", "<= 0.05 cores", met)
    yield Row(f"{title}: the process that serves the page", served, [], "cores", "")
    yield Row(f"{title}: first paint", paints, [], "s", "<= 1 s", statistics.median(paints) <= 1)
    yield Row(f"{title}: until ring and workers are there", complete, [], "s", "")
    yield Row(f"{title}: until a lost worker is shown", shown, [], "s", "<= 1 s", report.p95(shown) <= 1)


@contextmanager
def _master(output: Path) -> Iterator[tuple[psutil.Process, Callable[[int], None]]]:
    """A master with workers that only talk, in a ring; and what kills one of them."""
    command = [sys.executable, "-m", "benchmarks.talked", str(output), str(MANY)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    pipe = process.stdin

    def kill(worker: int) -> None:
        pipe.write(f"{worker}\n")
        pipe.flush()

    try:
        process.stdout.readline()
        client = Client(artifacts.read_contact(output))
        _until(lambda: len(_workers(client)) == MANY)
        yield psutil.Process(process.pid), kill
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def _page_server(output: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The live page of a job: its address, and the process that serves it."""
    command = [*module_command("edl.cli"), "ui", str(output), "--attached"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.communicate()


@contextmanager
def _browser() -> Iterator[Browser]:
    path = subprocess.check_output([ROOT / "scripts" / "dev" / "chromium"], text=True).strip()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        sync_playwright() as playwright,
        closing(playwright.chromium.launch(executable_path=path, args=sandbox)) as browser,
    ):
        yield browser


def _window(
    master: psutil.Process, kill: Callable[[int], None], page: Page | None
) -> tuple[float, list[float]]:
    """The cores that the master uses while workers are lost, and the seconds until the page shows each."""
    client, seen = Client(artifacts.read_contact(Path(master.cmdline()[-2]))), []
    before, began = _used(master), time.monotonic()
    for nth in range(int(WINDOW / LOST_EVERY)):
        _until(lambda: bool(_workers(client)))
        worker = _workers(client)[0]["id"]
        lost = time.monotonic()
        kill(worker)
        if page is not None:
            news = page.locator("#now li", has_text=f"worker {worker} lost")
            news.first.wait_for(timeout=1000 * SECONDS)
            seen.append(time.monotonic() - lost)
        time.sleep(max(began + (nth + 1) * LOST_EVERY - time.monotonic(), 0))
    share = (_used(master) - before) / (time.monotonic() - began)
    _until(lambda: len(_workers(client)) == MANY)  # each window begins with a whole ring
    return share, seen


def _status(master: psutil.Process) -> float:
    """Seconds of the master's processor for one request for the status, beside what it does anyway."""
    client = Client(artifacts.read_contact(Path(master.cmdline()[-2])))
    before, began = _used(master), time.monotonic()
    time.sleep(STATUSES / 20)
    share = (_used(master) - before) / (time.monotonic() - began)
    before, began = _used(master), time.monotonic()
    for _ in range(STATUSES):
        client.status()
    return (_used(master) - before - share * (time.monotonic() - began)) / STATUSES


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _workers(client: Client) -> list[dict[str, Any]]:
    """The workers that are in the ring and make steps; none while the master is too busy to answer."""
    try:
        return [w for w in client.status()["workers"] if w["rank"] is not None and w["step"] > 0]
    except MasterUnavailable:
        return []


def _until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.5)


# --- checkpoints


def checkpointed(work: Path, rounds: int) -> Iterator[Row]:
    """The share of a job's time that the checkpoints of `edl run` take: by time, and with short epochs."""
    with tempfile.TemporaryDirectory(dir=work) as directory:
        plain, writing = life.windows(Path(directory), Path(directory) / "kept", rounds)
    pairs = list(zip(plain, writing, strict=True))
    title = f"{life.MILLIONS} million parameters, Adam, {life.RANKS} ranks"
    with_it, without = [1e3 * w.mean for w in writing], [1e3 * w.mean for w in plain]
    name = f"{title}: mean step in {life.INTERVAL:g} s with a checkpoint; without"
    yield Row(name, with_it, without, "ms", "")
    for seconds, why in ((LOCAL_SECONDS, "by time"), (LOCAL_SECONDS / 10, "at the end of short epochs")):
        shares = [100 * (w.mean / p.mean - 1) * life.INTERVAL / seconds for p, w in pairs]
        name = f"{title}: a checkpoint every {seconds:g} s ({why})"
        yield Row(name, shares, [], "% of the time", "<= 2 %", statistics.median(shares) <= 2)


PARTS = ("report", "page", "checkpoint")


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        parts = {"report": reported, "page": watched, "checkpoint": checkpointed}
        for name in only:
            report.say(name)
            yield list(parts[name](Path(directory), rounds))


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench observe", __doc__, PARTS, measure))
