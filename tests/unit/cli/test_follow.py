# SPDX-License-Identifier: Apache-2.0
"""What `edl run` prints while a job trains: edl.cli.start.follow, and the end in edl.cli.shared.display."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edl.cli.shared import display
from edl.cli.start import follow


def a_status(*news: tuple[str, str], **fields: Any) -> dict[str, Any]:
    """A status with these notices: reason and text."""
    notices = [
        {"number": n, "seconds": float(n), "reason": reason, "text": text}
        for n, (reason, text) in enumerate(news, 1)
    ]
    status: dict[str, Any] = {
        "model": "digits",
        "phase": "Training",
        "reason": "2 workers (generation 1)",
        "seconds": 3.0,
        "records": {"total": 200, "applied": 50},
        "task": {"kind": "train", "epoch": 1, "epochs": 4, "step": 5, "steps": 20},
        "rate": 10.0,
        "eta_seconds": 15.0,
        "loss": 0.5,
        "epoch_loss": 0.75,
        "workers": [],
        "target": 2,
        "news": notices,
    }
    return status | fields


EPOCH = ("EpochApplied", "epoch 1 of 4 is applied: loss 1.6670, accuracy 0.4520")
HELD_OUT = (
    "Evaluated",
    "Evaluation at step 45 on 359 records of data('validation'): loss 2.0857, accuracy 0.8914",
)
LAST = ("Evaluated", "Evaluation on the held-out records: loss 0.0223")
LOST = ("WorkerFailed", "worker 1 is lost")
TOGETHER = "epoch 1 of 4: loss 1.6670, accuracy 0.4520; held out: loss 2.0857, accuracy 0.8914"


def told(*news: tuple[str, str]) -> list[str]:
    story = follow.Story()
    lines = [*story.lines(a_status(*news)), *story.rest()]
    return [line.plain.partition("] ")[2] for line in lines]


@pytest.mark.parametrize(
    ("news", "lines"),
    [
        ([EPOCH, HELD_OUT], [TOGETHER]),
        ([EPOCH], ["epoch 1 of 4: loss 1.6670, accuracy 0.4520"]),
        ([EPOCH, LOST], ["epoch 1 of 4: loss 1.6670, accuracy 0.4520", "worker 1 is lost"]),
        ([HELD_OUT], [HELD_OUT[1]]),
        (
            [EPOCH, ("Evaluating", "the model is saved"), LAST],
            ["epoch 1 of 4: loss 1.6670, accuracy 0.4520; held out: loss 0.0223"],
        ),
        ([EPOCH, ("Succeeded", "the job succeeded")], ["epoch 1 of 4: loss 1.6670, accuracy 0.4520"]),
        (
            [("EpochApplied", "epoch 1 of 4 is applied"), ("Evaluated", "words of a later version")],
            ["epoch 1 of 4", "words of a later version"],
        ),
    ],
)
def test_an_epoch_is_one_line(news: list[tuple[str, str]], lines: list[str]) -> None:
    assert told(*news) == lines


def test_places_below_the_current_directory_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the checkpoint of step 5 is in {} (0.1 MiB)"
    monkeypatch.chdir(tmp_path)
    below = ("Checkpointed", text.format(tmp_path / "runs" / "a" / "checkpoints"))
    beside = ("Checkpointed", text.format(f"{tmp_path}-2/runs"))
    within = ("Checkpointed", text.format(f"/mnt{tmp_path}/runs"))
    assert told(below, beside, within) == [text.format("runs/a/checkpoints"), beside[1], within[1]]
    monkeypatch.chdir("/")
    assert told(below) == [below[1]]


def test_an_evaluation_is_added_to_the_epoch_of_an_earlier_status() -> None:
    story = follow.Story()
    assert list(story.lines(a_status(EPOCH))) == []
    assert [line.plain for line in story.lines(a_status(EPOCH, HELD_OUT))] == [f"[    1.0 s] {TOGETHER}"]
    assert list(story.lines(a_status(EPOCH, HELD_OUT))) == []


def test_lines_are_in_the_order_of_their_times_during_a_long_evaluation() -> None:
    def at(seconds: float, *notices: tuple[float, tuple[str, str]]) -> dict[str, Any]:
        news = [
            {"number": number, "seconds": then, "reason": reason, "text": text}
            for number, (then, (reason, text)) in enumerate(notices, 1)
        ]
        return a_status(seconds=seconds, news=news)

    def lines(*statuses: dict[str, Any]) -> list[str]:
        screen = display.Screen()
        screen.file = file = io.StringIO()
        follow.show(screen, iter(statuses))
        return file.getvalue().splitlines()

    progress = display.progress_line(a_status())
    epoch = (9.0, EPOCH)
    assert lines(at(5.0), at(10.0, epoch), at(11.0, epoch, (10.5, HELD_OUT)), at(11.5)) == [
        f"[    5.0 s] {progress}",
        f"[    9.0 s] {TOGETHER}",
        f"[   11.0 s] {progress}",
    ]
    assert lines(at(5.0), at(13.9, epoch), at(14.0, epoch), at(17.0, epoch, (16.5, HELD_OUT))) == [
        f"[    5.0 s] {progress}",
        "[    9.0 s] epoch 1 of 4: loss 1.6670, accuracy 0.4520",
        f"[   14.0 s] {progress}",
        f"[   16.5 s] {HELD_OUT[1]}",
    ]


def test_a_job_without_workers_says_once_what_starts_the_training() -> None:
    story = follow.Story()
    idle = "workers=0: nothing trains until `edl scale N`"
    assert [line.plain for line in story.lines(a_status(target=0))] == [f"[    3.0 s] {idle}"]
    assert list(story.lines(a_status(target=0))) == []
    assert display.idle(a_status(target=0, phase="Succeeded")) == ""


class Terminal(io.StringIO):
    """A terminal's standard output."""

    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **environment: str) -> str:
    """What is printed of one status and of the end of a job."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60", "LINES": "40", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", file)
    screen = display.Screen()
    follow.show(screen, iter([a_status(EPOCH, LOST)]))
    screen.print(display.ended("Failed", "Failed after 3.0 s: why\n  warning   a text\n  kept in   job"))
    return file.getvalue()


def test_colours_are_only_for_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = printed(monkeypatch, Terminal())
    assert "\x1b[31mFailed after 3.0 s: why" in coloured and "\x1b[33m  warning   a text" in coloured
    assert "\x1b[33m[    2.0 s] worker 1 is lost" in coloured
    without = printed(monkeypatch, Terminal(), NO_COLOR="1")
    assert "\x1b[3" not in without and "worker 1 is lost" in without
    assert "\x1b" not in printed(monkeypatch, io.StringIO())


def test_a_log_or_a_notebook_with_forced_colours_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = printed(monkeypatch, io.StringIO())
    forced = printed(monkeypatch, io.StringIO(), FORCE_COLOR="1", CLICOLOR_FORCE="1")
    assert "\x1b[33m[    2.0 s] worker 1 is lost" in forced, "colours were asked for"
    assert re.sub(r"\x1b\[[0-9;]*m", "", forced) == plain, "no other code, and no other line"
    cell = printed(monkeypatch, Terminal(), FORCE_COLOR="1", JPY_PARENT_PID="1")  # !edl run
    assert cell == forced
    assert "\x1b[1A" in printed(monkeypatch, Terminal()), "a terminal has the picture, drawn over"


def test_tables_are_as_wide_without_a_terminal_whether_colours_are_forced_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for colours in ("1", "0", ""):
        monkeypatch.setenv("FORCE_COLOR", colours)
        monkeypatch.setattr("sys.stdout", io.StringIO())
        assert display.Screen().width == display.PLAIN_WIDTH
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert display.Screen().width == 60


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_bar_is_as_wide_as_the_terminal_and_needs_no_colours(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=True)
    with console.capture() as captured:
        console.print(follow.Bar(0.25))
    bar = captured.get().rstrip("\n")
    assert len(bar) == width and bar.endswith("  25 %")
    assert (bar.count("\N{FULL BLOCK}"), bar.count("\N{LIGHT SHADE}")) == (
        (width - 6) // 4,
        width - 6 - (width - 6) // 4,
    )


def test_the_end_names_what_to_do_next() -> None:
    ended: dict[str, Any] = {"phase": "Succeeded", "model": "model.keras", "task": {"kind": "train"}}
    assert display.next_steps(ended, "runs/a b", reported=True).splitlines() == [
        "  next      open the report: edl report --open 'runs/a b'",
        "            load the model: keras.models.load_model('runs/a b/model.keras')",
    ]
    needs = "m.keras can be loaded only with custom objects (A): import the module that registers them"
    noted = {**ended, "model_note": needs}
    assert display.next_steps(noted, "job", reported=False) == f"  next      load the model: {needs}"
    stopped = {**ended, "phase": "Stopped", "model": "", "checkpoint": {"step": 7}}
    assert (
        display.next_steps(stopped, "job", reported=False)
        == "  next      resume the job: edl run --resume job"
    )
    failed = {**stopped, "phase": "Failed", "checkpoint": None}
    assert display.next_steps(failed, "job", reported=False) == "  next      read the logs: edl logs job"


def test_what_is_awaited_is_said_once_before_the_first_step_and_after_the_last() -> None:
    out = io.StringIO()
    screen = display.Screen()
    screen.file = out
    importing, building = "worker 0: importing TensorFlow", "worker 0: importing and building the model"
    saving, loading = "worker 0 saves the model", "the model is saved; worker 0 loads it again"
    statuses = [
        a_status(phase="Starting", reason="starting", seconds=0.0),
        a_status(phase="Starting", reason=importing, seconds=0.1),
        a_status(phase="Starting", reason=importing, seconds=3.0),
        a_status(phase="Starting", reason=building, seconds=5.0),
        a_status(phase="Training", seconds=9.0),
        a_status(EPOCH, phase="Finishing", reason=saving, seconds=2.0),
        a_status(EPOCH, phase="Finishing", reason=saving, seconds=8.0),
        a_status(EPOCH, phase="Finishing", reason=loading, seconds=9.0),
    ]
    follow.show(screen, iter(statuses))
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines[:2] == [importing, building]
    assert lines[-2:] == [saving, loading], "after the epoch, whose line waits for its evaluation"
    assert [line for line in lines if "loss 1.6670" in line] == [lines[-3]]
    assert display.progress_line(a_status(phase="Finishing", reason=loading)) == loading


def test_next_steps_work_as_pasted_where_no_environment_is_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := tmp_path / "edl").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(mine)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert f"{mine} report --open job" in display.next_steps({"phase": "Stopped"}, "job", reported=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ": edl report --open job" in display.next_steps({"phase": "Stopped"}, "job", reported=True)
