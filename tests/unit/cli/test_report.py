# SPDX-License-Identifier: Apache-2.0
"""The report of a job: its numbers are those of the journal, and its page needs nothing but itself."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edl.cli.app import app
from edl.contract import artifacts
from edl.contract.ids import WorkerId
from edl.errors import ConfigError, EdlError
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.report import at_end, pictures, reading, write
from edl.report.timeline import State, Timeline, duration
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.month import Month
from tests.support.jobs.month import keep as keep_month
from tests.support.jobs.stories import Story

HOSTILE = '$x_{ <script>alert("1")</script>'


class Page(HTMLParser):
    """The parts of a page that the tests compare."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"] or "")
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")
        ]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data

    def rows(self, first: str) -> list[list[str]]:
        """The rows of the table whose first column has this name."""
        return next(table[1:] for table in self.tables if table[0][0] == first)


def lines_of(output: Path) -> list[dict[str, Any]]:
    """The lines of the journal, read without the code that is tested."""
    lines = [
        json.loads(line) for path in artifacts.journals(output) for line in path.read_text().splitlines()
    ]
    return [line for line in lines if "event" in line]


def told_of(output: Path) -> dict[str, Any]:
    return artifacts.read_summary(output)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a job whose second worker was killed and replaced."""
    output = tmp_path_factory.mktemp("job")
    keep(whole_story(), output)
    return write.html(output, told_of(output))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose second worker was killed and replaced."""
    output = tmp_path / "job"
    output.mkdir()
    keep(whole_story(), output)
    return output


# --- the timeline


def test_every_change_has_the_size_stall_and_redone_records_of_the_journal(job: Path) -> None:
    found = reading.read(job)
    forms = [e for line in lines_of(job) for e in line["effects"] if e["type"] == "Form"]
    assert [change.members for change in found.changes] == [tuple(form["members"]) for form in forms]
    kept = told_of(job)["generations"]
    assert [change.redone for change in found.changes] == [change["redone_records"] for change in kept]
    whole = [(c.stall, k["stall_seconds"]) for c, k in zip(found.changes, kept, strict=True) if c.stepped]
    assert whole and all(stall == kept for stall, kept in whole)


def test_a_change_is_caused_by_the_worker_that_died_and_how(job: Path) -> None:
    found = reading.read(job)
    causes = [found.cause(change) for change in found.changes]
    assert causes[0] == ("start", "start")
    assert ("lost", "worker 1 lost (SIGKILL)") in causes
    assert ("joined", "worker 2 joined") in causes


def test_a_planned_change_has_the_cause_that_the_master_named(tmp_path: Path) -> None:
    story = Story(workers=1, mode="hybrid", ps={"servers": 2})
    story.tell(ev.ServersReady(2, ("a:1", "b:1")))
    story.running(0)

    def on(servers: int, step: int) -> None:
        g = story.job.ring.generation
        story.tell(ev.JoinedRing(WorkerId(0), g, step, servers=servers))
        story.tell(ev.Stepped(WorkerId(0), g, step + 1, 0.2, 0, 0.0))

    on(2, step=0)
    story.tell(ev.ServersReady(3, ("a:1", "b:1", "c:1")))  # edl scale --servers 3
    story.out(0, step=4)
    on(3, step=4)
    story.tell(ev.Live(1, 1, True, 1))  # edl scale 0
    story.out(0, step=5)
    story.tell(ev.Live(1, 1, False, 1), after=2)
    on(3, step=5)
    story.out(0, step=6, broken="reset by peer")
    on(3, step=6)
    keep(story, tmp_path)
    found = reading.read(tmp_path)
    assert [found.cause(change) for change in found.changes] == [
        ("start", "start"),
        ("planned", "parameter servers 2 -> 3"),
        ("planned", "resumed"),
        ("broken", "reset by peer"),
    ]
    page = write.html(tmp_path, told_of(tmp_path))
    assert "Changes by kind: start 1, planned 2, broken 1." in page


def test_the_phases_of_a_stall_add_up_to_it(job: Path) -> None:
    stalled = [change for change in reading.read(job).changes if change.stall]
    assert stalled
    for change in stalled:
        assert all(seconds >= 0 for _, seconds in change.phases)
        assert sum(seconds for _, seconds in change.phases) == pytest.approx(change.stall)


def test_a_worker_passes_through_its_states_and_is_lost_or_leaves(job: Path) -> None:
    found = reading.read(job)
    created = {e["worker"] for line in lines_of(job) for e in line["effects"] if e["type"] == "Create"}
    assert found.workers.keys() == created
    assert {number for number, worker in found.workers.items() if worker.lost} == {1}
    for worker in found.workers.values():
        ends = [end for _, _, end in worker.intervals]
        assert [start for _, start, _ in worker.intervals][1:] == ends[:-1], "no gap between two states"
    states = [state for state, _, _ in found.workers[1].intervals]
    assert states == [State.STARTING, State.INITIALIZING, State.READY, State.MEMBER]
    (gone,) = [
        line["now"]
        for line in lines_of(job)
        if line["event"]
        == {
            "type": "Closed",
            "worker": 1,
            "why": "its stream ended",
        }
    ]
    assert found.workers[1].ended == pytest.approx(gone - lines_of(job)[0]["now"])


def test_training_and_held_out_values_have_the_steps_of_the_journal(tmp_path: Path) -> None:
    story = Story(workers=1).running()
    g = story.job.ring.generation
    story.tell(ev.Progress(g, 4, loss=0.75), ev.Progress(g, 8, loss=None))
    story.tell(ev.EpochEnded(WorkerId(0), g, 1, facts.EpochLoss(0, 100, 0.5), {"mae": 0.25, "odd": None}))
    story.tell(ev.Evaluated(WorkerId(0), g, 10, "test", 50, {"loss": 0.625, "mae": 0.375}))
    keep(story, tmp_path)
    found = reading.read(tmp_path)
    assert found.loss == {4: 0.75}
    assert found.trained == {"loss": {10: 0.5}, "mae": {10: 0.25}}
    assert found.held_out == {("test", "loss"): {10: 0.625}, ("test", "mae"): {10: 0.375}}


def test_the_head_has_loss_metric_and_held_out_values_first(text: str) -> None:
    head = text[: text.index("</header>")]
    assert head.index("<dt>val_accuracy</dt><dd>0.9000</dd>") < head.index("<dt>duration</dt>")
    assert text.index('id="metrics-head"') < text.index('id="ring-head"') < text.index('id="workers-head"')


def test_a_loss_over_more_than_two_decades_has_a_log_scale() -> None:
    def scales(*losses: float) -> list[str]:
        steps = dict(enumerate(losses))
        figure = pictures.metrics(Timeline(loss=steps, trained={"mae": steps}))
        assert figure is not None
        return [axes.get_yscale() for axes in figure.axes]

    assert scales(2.0, 0.5, 0.021) == ["linear", "linear"]
    assert scales(2.0, 0.5, 1e-6) == ["log", "linear"], "a metric such as accuracy keeps its scale"
    assert scales(2.0, 1e-6, 0.0) == ["log", "linear"], "a loss of 0 has no place on it and hides nothing"
    assert scales(2.0, 1e-6, -1.0) == ["linear", "linear"]


def test_the_age_of_the_newest_checkpoint_is_what_a_loss_would_cost(tmp_path: Path) -> None:
    story = Story(workers=1, checkpoint={"dir": "/checkpoints", "seconds": 5}).running()
    story.waits(6)
    story.tell(ev.PartsWritten(WorkerId(0), 3, "a", (WorkerId(0),)))
    story.tell(ev.Checkpointed(WorkerId(0), 3, "a", 2_000_000))
    story.waits(2)
    keep(story, tmp_path)
    found = reading.read(tmp_path)
    ((at, step, nbytes),) = found.checkpoints
    assert (step, nbytes) == (3, 2_000_000)
    assert max(age for _, age in pictures.ages(found)) == pytest.approx(at)
    page = write.html(tmp_path, told_of(tmp_path))
    ago = duration(found.ends - at)
    assert f"1 checkpoint; the newest one was at most {duration(at)} old" in page
    assert f"The last: step 3, 2.0 MB, {ago} before the end." in page


def test_a_shortened_journal_begins_with_its_oldest_head(tmp_path: Path) -> None:
    keep_month(Month(3, 1500, most=1 << 20), tmp_path, full_at=1 << 16)
    found, kept = reading.read(tmp_path), told_of(tmp_path)
    assert 0 < found.begins < found.ends
    assert found.ends == pytest.approx(kept["seconds"])
    newest = [change["generation"] for change in kept["generations"]]
    assert [change.generation for change in found.changes][-len(newest) :] == newest
    assert found.changes[0].before, "the ring before the first kept change is known from the head"
    text = write.html(tmp_path, kept)
    changes = kept["earlier_generations"]["changes"] + len(kept["generations"]) - 1
    assert f"<dt>ring changes</dt><dd>{changes:,}</dd>" in text
    assert len(Page(text).rows("change")) == 200, "those with the longest stalls"


def test_the_time_goes_on_under_the_next_master(tmp_path: Path) -> None:
    story = whole_story()
    keep(story, tmp_path, len(story.watchdog.history) // 2)
    found = reading.read(tmp_path)
    assert found.masters == 2
    assert sorted(change.formed for change in found.changes) == [change.formed for change in found.changes]
    assert all(
        0 <= start <= end <= found.ends for w in found.workers.values() for _, start, end in w.intervals
    )


# --- the page


def test_the_page_has_the_numbers_of_the_journal(job: Path, text: str) -> None:
    found, kept, page = reading.read(job), told_of(job), Page(text)
    changes = page.rows("change")
    assert [(int(row[2]), int(row[3])) for row in changes] == [
        (change["from_size"], len(change["members"])) for change in kept["generations"]
    ]
    assert [row[4] for row in changes] == [found.cause(change)[1] for change in found.changes]
    assert [float(row[5]) for row in changes] == pytest.approx(
        [change.stall for change in found.changes], abs=0.01
    )
    assert [(row[0], row[-1]) for row in page.rows("worker")] == [
        ("0", "left"),
        ("1", "lost: SIGKILL"),
        ("2", "left"),
    ]
    hours = {row[0]: float(row[1]) for row in page.rows("spent on")}
    assert hours == pytest.approx({k: s / 3600 for k, s in kept["goodput_seconds"].items()}, abs=0.001)


def test_the_page_needs_nothing_but_itself_and_can_be_read_by_ear(text: str) -> None:
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "embed"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids)), "an id names one element"
    assert page.tags.count("svg") == page.tags.count("desc") == text.count('<svg role="img"') == 6
    assert all(link[1:] in page.ids for link in page.links)
    assert all(
        name in page.ids for names in re.findall(r'aria-labelledby="([^"]+)"', text) for name in names.split()
    )


def test_the_audit_is_told_and_a_damaged_journal_is_an_error(job: Path, text: str) -> None:
    assert "<strong>Audit.</strong> exactly once: 100 records x 1 epoch in 10 steps, " in text
    kept = told_of(job)
    (job / artifacts.SUMMARY).write_text(json.dumps({**kept, "task": {**kept["task"], "steps_done": 9}}))
    assert write.verdict(job).startswith("FAILED: summary.json says 9 steps are in the model")
    journal = job / artifacts.JOURNAL
    journal.write_text(journal.read_text().replace('"Stepped"', '"Skipped"'))
    with pytest.raises(EdlError, match="the chain is broken"):
        write.html(job, kept)


def test_foreign_text_is_no_markup(tmp_path: Path) -> None:
    story = Story(workers=2).running()
    g = story.job.ring.generation
    story.tell(ev.EpochEnded(WorkerId(0), g, 1, facts.EpochLoss(0, 100, 0.5), {HOSTILE: 0.25}))
    story.tell(ev.Closed(WorkerId(0), HOSTILE))
    keep(story, tmp_path)
    page = write.html(tmp_path, {**view.status(story.job, story.now), "reason": HOSTILE})
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_a_running_job_has_a_report_of_what_there_is_so_far(tmp_path: Path) -> None:
    story = Story(workers=2).running()
    keep(story, tmp_path)
    (tmp_path / artifacts.SUMMARY).unlink()
    page = write.html(tmp_path, view.status(story.job, story.now))
    assert '<span class="phase mixed">Training</span>' in page
    assert "the job has not ended; so far, " in page


def test_a_job_that_never_trained_and_whose_master_does_not_answer_has_a_page(tmp_path: Path) -> None:
    keep(Story(workers=2), tmp_path)
    (tmp_path / artifacts.SUMMARY).unlink()
    text = write.html(tmp_path, {})
    assert "no status" in text
    assert [row[0] for row in Page(text).rows("worker")] == ["0", "1"]


# --- the command, and the end of a job


def report(*arguments: str) -> None:
    """`edl report` with these arguments, in this process."""
    app(["report", *arguments], standalone_mode=False)


def test_a_picture_is_written_alone(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report(str(job), "--svg", "workers")
    shown = re.findall(r">worker (\d)<", Path("workers.svg").read_text())
    assert shown == [str(number) for number in reading.read(job).workers]
    report(str(job), "--png", "goodput")
    assert Path("goodput.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--svg rings: unknown picture \(expected ring, metrics"):
        report(str(job), "--svg", "rings")
    with pytest.raises(EdlError, match="nothing to show in the picture 'checkpoints'"):
        report(str(job), "--svg", "checkpoints")


def test_the_report_at_the_end_is_named_or_a_warning_says_why_there_is_none(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at_end.write_report(job) == "", "these tests switch it off"
    monkeypatch.delenv(at_end.SWITCH)
    assert at_end.write_report(job) == f"report    {job / artifacts.REPORT}"
    assert (job / artifacts.REPORT).read_text().endswith("</html>\n")
    (job / artifacts.REPORT).unlink()
    (job / artifacts.REPORT).mkdir()  # it cannot be replaced
    told = at_end.write_report(job)
    assert told.startswith("warning   no report: ") and "\n" not in told, told
    assert not list(job.glob(".report*")), "nothing unfinished is left"


def test_without_matplotlib_a_job_ends_with_a_warning(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no module named matplotlib')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "edl.report"))]:
        monkeypatch.delitem(sys.modules, name)
    from edl.report import write as fresh

    with pytest.raises(
        EdlError, match=r"a report needs Matplotlib \(.*\); install it with: pip install matplotlib"
    ):
        fresh.html(job, told_of(job))


def test_durations_are_short() -> None:
    found = [duration(seconds) for seconds in (0.04, 59.94, 60, 3725, 48 * 3600 + 60)]
    assert found == ["0.0 s", "59.9 s", "1:00", "1:02:05", "2 d 00:01"]
