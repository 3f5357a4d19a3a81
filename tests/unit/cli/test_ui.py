# SPDX-License-Identifier: Apache-2.0
"""The live page of a job, asked by a real HTTP client: what it shows, and what it refuses."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from edl.contract import artifacts
from edl.contract.ids import WorkerId
from edl.errors import EdlError
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.report import live, reading, write
from edl.report.strip import strip
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story

HOSTILE = '<script>alert("1")</script>\x1b'


class Shown:
    """A job whose status the test changes, and a client of its page."""

    def __init__(self, output: Path):
        self.output = output
        self.status: dict[str, Any] = {}
        self.gone = False
        job = live.Job("runs/digits", self.told, lambda: nullcontext(live.Reading(output, self.status)))
        self.server = live.PageServer(job)

    def told(self) -> live.Status:
        if self.gone:
            raise EdlError("the master does not answer")
        return live.Status(self.status)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        try:
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), reply.headers
        finally:
            connection.close()

    def now(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.get(f"/{self.server.token}/now")[1])
        return answer

    def until(self, key: str, value: object) -> dict[str, Any]:
        """Ask as the page does until a part of the answer is as expected."""
        deadline = time.monotonic() + 150
        while (answer := self.now())[key] != value:
            assert time.monotonic() < deadline, answer
            time.sleep(live.STATUS_SECONDS / 4)  # requests without a pause slow down the drawing
        return answer


def journal_in(output: Path, told: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Access to the journal in a directory, as `live.Job` takes it."""
    return lambda: nullcontext(live.Reading(output, told))


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(tmp_path)
    serving = threading.Thread(target=shown.server.run)
    serving.start()
    yield shown
    shown.server.shutdown()
    serving.join()
    shown.server.server_close()


def test_the_page_follows_a_job_until_it_has_ended(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Story(workers=2, joinDelaySeconds=0.5).running()
    shown.status = {**view.status(running.job, running.now), "reason": HOSTILE}
    first = shown.now()
    assert first["title"] == "Training: runs/digits" and not first["final"]
    assert "2 workers now" in first["now"] and "&lt;script&gt;" in first["now"]
    assert "<script" not in first["now"] and "\x1b" not in first["now"]
    assert shown.get(f"/{shown.server.token}/pictures")[1] == "", "there is no journal yet"
    story = whole_story()
    keep(story, shown.output)
    summary = shown.output / artifacts.SUMMARY
    ended = summary.read_text()
    summary.unlink()
    now = shown.until("version", 1)
    assert shown.get(f"/{shown.server.token}/nothing")[0] == 404
    assert '<section id="ring"' in now["now"], "ring and workers come with the numbers"
    drawn = shown.get(f"/{shown.server.token}/pictures")[1]
    assert '<section aria-labelledby="metrics-head">' in drawn and "<svg" in drawn
    assert "Audit" not in drawn, "a running job is not audited"
    monkeypatch.setattr(live, "STATUS_SECONDS", 0.0)
    shown.gone = True
    without = shown.now()
    assert "the master does not answer" in without["now"] and "2 workers now" in without["now"]
    assert without["state"].startswith("No answer from the job") and without["title"].startswith("no answer")
    shown.gone = False
    summary.write_text(ended)
    shown.status = artifacts.read_summary(shown.output)
    shown.server.job.wake()
    shown.until("final", True)
    shown.server.job.show_the_end()
    drawn = shown.get(f"/{shown.server.token}/pictures")[1]
    assert "exactly once" in drawn and shown.now()["title"] == "Succeeded: runs/digits"


def test_numbers_ring_and_pictures_have_the_age_of_what_they_were_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(whole_story(), tmp_path)
    clock, answers = Clock(), [live.Status({"phase": "Training"}, 0.5)]

    def status() -> live.Status:
        if not answers:
            raise EdlError("the master does not answer")
        return answers[-1]

    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(write, "sections", lambda *_: "a picture")
    job = live.Job("job", status, journal_in(tmp_path))
    assert job.now()["ages"] == {"now": 0.5, "ring": 0.5}, "as old as the status of a master that writes it"
    job._draw()
    clock.now += 40
    answers[:] = [live.Status({"phase": "Training"})]
    assert job.now()["ages"] == {"now": 0.0, "ring": 0.0, "pictures": 40.0}, "the pictures were not redrawn"
    job._draw()
    assert job.now()["ages"]["pictures"] == 0.0, "they still show the whole journal"
    answers.clear()
    clock.now += 50
    job._draw()
    assert job.now()["ages"] == {"now": 50.0, "ring": 50.0, "pictures": 50.0}, "nothing newer is known"


def test_an_ended_job_has_one_final_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(whole_story(), tmp_path)
    summary = artifacts.read_summary(tmp_path)
    running = {"phase": "Training", "task": {"step": 7, "steps": 10}}
    drawn = list[Mapping[str, Any]]()

    def sections(_: object, told: Mapping[str, Any], live: bool) -> str:
        drawn.append(told)
        return "a picture"

    monkeypatch.setattr(write, "sections", sections)
    monkeypatch.setattr(live, "STATUS_SECONDS", 1e9)  # the status that was read last stays
    told = running
    job = live.Job("job", lambda: live.Status(told), lambda: nullcontext(live.Reading(tmp_path, told)))
    job._draw()
    assert not job.now()["final"], "the summary is there, and the status is older"
    told = summary
    job._asked_at = float("-inf")
    assert "step 10 of 10" in job.now()["now"]
    job._told = running  # as if it had been read while the job ended
    job._draw_the_end()
    answer = job.now()
    assert answer["final"] and answer["ages"] == {} and answer["title"] == "Succeeded: job"
    assert "step 10 of 10" in answer["now"] and drawn[-1] is summary


def test_results_and_ring_stand_before_pictures_and_these_before_notices(tmp_path: Path) -> None:
    keep(whole_story(), tmp_path)
    timeline = reading.read(tmp_path)
    timeline.notices.append((2.0, "Scaled", "workers: 3"))
    evaluated = {"validation": {"step": 4, "records": 5, "metrics": {"loss": 1e-6, "mae": 0.5}}}
    status = {
        "phase": "Training",
        "epoch_loss": 0.25,
        "epoch_metrics": {"mae": 0.375},
        "evaluations": evaluated,
        "workers": [{"id": 0, "handle": "", "rank": 0, "state": "member", "step": 1, "rate": 1.0}],
    }
    now = live.now(status, ring=strip(timeline))
    head = ("loss</dt><dd>0.2500", "val_loss</dt><dd>1.000e-06", "mae</dt><dd>0.3750", "val_mae")
    places = [now.index(text) for text in (*head, 'id="ring"', "1 worker now")]
    assert places == sorted(places)
    text = live.page("job")
    assert text.index('id="now"') < text.index('id="pictures"')
    drawn = write.sections(timeline, status, live=True)
    assert drawn.index("metrics-head") < drawn.index("notices-head")
    assert "ring-head" not in drawn, "it stands beside the numbers"


def test_a_kill_stays_in_sight_while_short_epochs_pass(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.up(4)
    g = story.job.ring.generation
    for _ in range(60):
        story.tell(ev.EpochEnded(WorkerId(0), g, 1, facts.EpochLoss(0, 100, 0.5), {}))
    keep(story, tmp_path)
    (first, *_) = strip(reading.read(tmp_path)).split("<li>")[1:]
    assert "worker 1 lost (SIGKILL); 2 to 1 worker, " in first


def test_an_event_is_shown_within_a_second(shown: Shown) -> None:
    shown.status = {"phase": "Starting", "reason": "starting"}
    assert "starting" in shown.now()["now"]
    shown.status = {"phase": "Training", "reason": "2 workers (generation 1)"}
    began = time.monotonic()
    while "Training" not in shown.now()["now"]:
        assert time.monotonic() < began + 1.0


def test_the_status_is_answered_while_pictures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(whole_story(), tmp_path)
    job = live.Job("job", lambda: live.Status({"phase": "Training"}), journal_in(tmp_path))
    answered = list[str]()

    def sections(*_: object) -> str:
        other = threading.Thread(target=lambda: answered.append(job.now()["title"]))
        other.start()
        other.join(60)
        return "a picture"

    monkeypatch.setattr(write, "sections", sections)
    job._draw()
    assert (answered, job.pictures) == (["Training: job"], "a picture")


def test_only_this_page_is_served_and_only_with_the_token(shown: Shown) -> None:
    token = shown.server.token
    status, page, headers = shown.get(f"/{token}/")
    assert status == 200 and '<script src="live.js" defer>' in page and "runs/digits" in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors" in policy
    assert "http" not in policy and headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    status, script, headers = shown.get(f"/{token}/live.js")
    assert (
        status == 200 and 'answer("now")' in script and headers["Content-Type"].startswith("text/javascript")
    )
    for path in (
        "/",
        "/now",
        f"/{token}",
        f"/{token[:-1]}/now",
        f"/{token}x/now",
        f"/{token}/../etc",
        "//now",
        "/%00/now",
    ):
        assert shown.get(path)[0] == 404, path
    assert shown.get(f"/{token}/now", Host=f"evil.example:{shown.server.server_port}")[0] == 404
    assert shown.get(f"/{token}/now", method="POST")[0] == 501
    assert shown.server.server_address[0] == "127.0.0.1"


class ThirdTime(threading.Event):
    """Set once it was looked at three times."""

    times = 0

    def is_set(self) -> bool:
        self.times += 1
        return self.times > 3


def test_nothing_is_drawn_while_no_browser_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(whole_story(), tmp_path)
    job = live.Job("job", lambda: live.Status({"phase": "Training"}), journal_in(tmp_path))
    monkeypatch.setattr(live, "MIN_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(write, "sections", lambda *_: "a picture")
    job.draw(ThirdTime())
    assert job.version == 0
    monkeypatch.setattr(job, "_looked_at", time.monotonic())
    job.draw(ThirdTime())
    assert job.version == 1, "a browser has asked"
