# SPDX-License-Identifier: Apache-2.0
"""The live page and the report in a real browser: Chromium, which scripts/dev/chromium finds or installs."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from edl.contract import artifacts
from edl.master.core import view
from edl.report import live, reading, write
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story

pytestmark = [pytest.mark.waits, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
MILLISECONDS = 300_000  # for a machine under load; nothing waits that long otherwise
# Narrow widths at which people read: two phones, and a screen of 1280 pixels at 400 % (WCAG 1.4.10).
NARROW = (390, 360, 320)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = subprocess.check_output([ROOT / "scripts" / "dev" / "chromium"], text=True).strip()
    # Root may not use Chromium's sandbox. The pages are this test's own.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox, timeout=MILLISECONDS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """Open a page. At the end, check that it has asked no other server and has reported no error."""
    context = browser.new_context()
    context.set_default_timeout(MILLISECONDS)
    page, asked, errors = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert asked and all(url.startswith(address) for url in asked), asked
    assert not errors, "an error of the script, or of the Content-Security-Policy"


def fits(page: Page) -> None:
    """Check that only pictures and tables scroll sideways on a narrow screen, and that pictures say so."""
    hints = "[...document.querySelectorAll('figure')].map(each => getComputedStyle(each, '::before').content)"
    for width in NARROW:
        page.set_viewport_size({"width": width, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert all("scroll sideways" in hint for hint in page.evaluate(hints))
    page.set_viewport_size({"width": 1280, "height": 800})


def rows_of(page: Page, first: str) -> list[list[str]]:
    """The cells of the first table whose first column has this name."""
    table = page.locator("table").filter(has=page.locator(f"th:first-child:text-is('{first}')")).first
    rows: list[list[str]] = table.evaluate(
        "table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return rows


def test_the_live_page_shows_the_journal_and_obeys_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    status: dict[str, Any] = view.status(story.job, story.now)
    keep(whole_story(), tmp_path)
    summary = tmp_path / artifacts.SUMMARY
    ended = summary.read_text()
    summary.unlink()
    answers, age = threading.Event(), 0.0
    answers.set()

    def newest() -> live.Status:
        answers.wait()  # as a call to a master that is paused
        return live.Status(status, age)

    job = live.Job("runs/digits", newest, lambda: nullcontext(live.Reading(tmp_path, status)))
    job._draw()  # imports Matplotlib, which takes longest, before anything waits for it
    server = live.PageServer(job)
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        with opened(browser, server.address) as page:
            expect(page.locator("#pictures svg").first).to_be_visible(timeout=MILLISECONDS)
            expect(page).to_have_title("Training: runs/digits")
            assert [row[0] for row in rows_of(page, "worker")[:2]] == ["0", "1"]
            lanes = "nodes => nodes.map(each => each.ariaLabel)"
            workers = [
                f"worker {w.id}: {'lost' if w.lost else 'left'}"
                for w in reading.read(tmp_path).workers.values()
            ]
            assert page.locator("#ring svg.lane").evaluate_all(lanes) == workers
            expect(page.locator("#ring .newest")).to_contain_text("worker 1 lost (SIGKILL); 2 to 1 worker, ")
            fits(page)

            # Numbers, ring and pictures say how old they are, also while no answer comes.
            heads = ("#now > :first-child", "#ring h2", "#pictures h2")
            for head in heads:
                expect(page.locator(head).first).not_to_have_attribute("data-age", re.compile(""))
            age = 40.0
            expect(page.locator(heads[0])).to_have_attribute("data-age", re.compile("^4[0-9] s old$"))
            answers.clear()
            for head in heads:
                grown = re.compile("^(4[3-9]|[5-9][0-9]) s old$|min old$")
                expect(page.locator(head).first).to_have_attribute("data-age", grown)
            expect(page.locator("#state")).to_contain_text("Waiting for an answer")
            age = 0.0
            answers.set()
            for head in heads:
                expect(page.locator(head).first).not_to_have_attribute("data-age", re.compile(""))
            expect(page.locator("#state")).to_have_text("Live: follows the job.")

            # The keyboard alone unfolds a table, which stays unfolded and focused when the page is updated.
            summaries = page.locator("summary").count()
            for _ in range(3 * summaries):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.textContent").startswith("Table: "):
                    break
            page.keyboard.press("Enter")
            expect(page.locator("details[open]")).to_have_count(1)
            status |= {"phase": "Succeeded", "reason": "all epochs trained"}
            summary.write_text(ended)
            job.wake()
            complete = "The job has ended; this page is complete."
            expect(page.locator("#state")).to_have_text(complete, timeout=MILLISECONDS)
            expect(page.locator("[data-age]")).to_have_count(0)
            assert_journal(page, tmp_path)
            expect(page.locator(".verdict")).to_contain_text("exactly once")
            expect(page.locator("details[open]")).to_have_count(1)
            expect(page.locator("details[open] > summary:focus")).to_have_count(1)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def assert_journal(page: Page, output: Path) -> None:
    """Compare the table of ring changes with the journal."""
    found = reading.read(output)
    shown = [row[2:5] for row in rows_of(page, "change")]
    assert shown == [
        [str(len(change.before)), str(len(change.members)), found.cause(change)[1]]
        for change in found.changes
    ]


def test_the_report_shows_the_journal_without_a_server(browser: Browser, tmp_path: Path) -> None:
    keep(whole_story(), tmp_path)
    report = tmp_path / artifacts.REPORT
    report.write_text(write.html(tmp_path, artifacts.read_summary(tmp_path), "runs/digits"))
    with opened(browser, report.as_uri()) as page:
        expect(page.locator("h1")).to_contain_text("runs/digits")
        assert_journal(page, tmp_path)
        fits(page)
        assert page.locator("svg[role=img] > title, svg > title").count() == page.locator("figure").count()
