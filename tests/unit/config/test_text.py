# SPDX-License-Identifier: Apache-2.0
"""`edl.formatting`, `edl.config.address`, and what the command line prints: no text controls a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from edl.cli.shared import display
from edl.cli.shared.jobs import JobSnapshot
from edl.config.address import Address
from edl.errors import ConfigError
from edl.formatting import numbered, one_line, plain
from tests.support.jobs.stories import ended_job

NASTY = "[red]x[/red] [/] :smile: \x1b[2J\x1b]0;title\x07\x9b31m\r\x08 \u202egpj.exe\u2028\ud800 \0"


def test_plain_text_controls_no_terminal() -> None:
    assert plain("tab\tand\nline") == "tab\tand\nline"
    assert plain("Größe 3 ≥ 2, 漢字, 🙂") == "Größe 3 ≥ 2, 漢字, 🙂"
    assert plain("\x1b[31m\x9b1m\x07\r\0\x7f") == r"\x1b[31m\x9b1m\x07\x0d\x00\x7f"
    assert plain("\u202e\u2028\ud800") == r"\u202e\u2028\ud800"
    assert one_line("a\nb") == r"a\nb"
    plain(NASTY).encode()


def test_things_are_named_by_their_numbers() -> None:
    assert [numbered("worker", range(count), 3) for count in range(1, 6)] == [
        "worker 0",
        "workers 0 and 1",
        "workers 0, 1 and 2",
        "workers 0, 1, 2 and 1 more",
        "workers 0, 1, 2 and 2 more",
    ]


def printed(monkeypatch: pytest.MonkeyPatch, job: JobSnapshot, terminal: bool) -> str:
    file = io.StringIO()
    file.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    display.snapshot(job)
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_status_is_shown_without_obeying_what_is_in_it(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = {"id": 0, "handle": NASTY, "rank": 0, "state": NASTY, "step": 1, "rate": 1.0, "memory": 1}
    records = {"size": 1, "total": 10, "applied": 1}
    task = {"kind": "train", "epoch": 1, "epochs": 1, "step": 1, "steps": 10}
    data: dict[str, Any] = {
        "model": NASTY,
        "phase": "Training",
        "reason": NASTY,
        "workers": [worker],
        "records": records,
        "task": task,
        "rate": 1.0,
        "eta_seconds": None,
        "loss": None,
    }
    shown = printed(monkeypatch, JobSnapshot(data, NASTY, NASTY, (NASTY,)), terminal)
    # rich folds a cell that is too wide for the screen, so the table's have line breaks in them
    assert shown.replace("\n", "").count("[red]x[/red]") >= 3
    for unfit in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\u2028", "\ud800", "\0", "\x08", "\r"):
        assert unfit not in shown
    ended = {
        "phase": "Failed",
        "reason": NASTY,
        "seconds": 1.0,
        "traceback": NASTY,
        "step": 1,
        "loss": 0.5,
        "records": {"size": 1, "applied": 1, "skipped": 0, "bad": 0},
        "task": {**task, "epochs_done": 1, "steps_done": 1},
        "metrics": {NASTY: 0.5},
        "goodput_seconds": {"useful": 1.0},
        "generations": [{}],
        "state_losses": 0,
    }
    shown = printed(monkeypatch, JobSnapshot(ended, NASTY, NASTY), terminal)
    assert shown.count("[red]x[/red] [/] :smile: \\x1b[2J") == 4
    assert "\x1b" not in shown and "\x9b" not in shown


def test_the_changes_of_a_ring_are_told_whole_though_only_the_last_are_kept_one_by_one() -> None:
    changes = [{"redone_records": 3, "stall_seconds": 0.2}, {"redone_records": 4, "stall_seconds": 0.1}]
    ended = ended_job(generations=changes)
    assert "ring      changed 1 time, longest stall 0.10 s, 4 records redone" in display.result(ended, "", "")
    earlier = {"changes": 9_900, "stall_seconds": 1.5, "redone_records": 100}
    told = display.result({**ended, "earlier_generations": earlier}, "", "")
    assert "ring      changed 9,901 times, longest stall 1.50 s, 107 records redone" in told


def test_the_newest_checkpoint_is_named_as_the_directory_of_the_job_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, given, shown in (
        (f"{tmp_path}/runs/a/checkpoints", "runs/a", "in runs/a/checkpoints\n"),
        (f"{tmp_path}/runs/a/checkpoints", f"{tmp_path}/runs/a", f"in {tmp_path}/runs/a/checkpoints\n"),
        ("/elsewhere", "runs/a", "in /elsewhere\n"),
        ("s3://bucket/a", "runs/a", "in s3://bucket/a\n"),
        ("/checkpoints", "configmap/edl-status", "in /checkpoints\n"),
    ):
        ended = ended_job(phase="Stopped", checkpoint={"step": 5, "dir": place})
        assert shown in display.result(ended, given, "")


def test_a_log_line_is_as_it_is_but_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in ((False, "a\rb\x1b[1m\n"), (True, "b\\x1b[1m\n")):
        file = io.StringIO()
        file.isatty = lambda terminal=terminal: terminal  # type: ignore[method-assign, misc]
        monkeypatch.setattr("sys.stdout", file)
        display.line("a\rb\x1b[1m")
        assert file.getvalue() == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1", "expected HOST:PORT, e.g. 127.0.0.1:8500"),
        ("127.0.0.1:", "expected HOST:PORT"),
        ("localhost:http", "expected HOST:PORT"),
        ("::1:80", "expected HOST:PORT"),
        ("a b:80", "expected HOST:PORT"),
        ("", "expected HOST:PORT"),
        ("localhost:-1", "expected HOST:PORT"),
        ("localhost:65536", "port 65536 is out of range (expected 0 to 65535)"),
    ],
)
def test_an_address_that_is_none_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Address.parse(text, "--listen")
    assert str(refused.value).startswith(f"--listen {text}: ")
    assert words in str(refused.value)


def test_an_address() -> None:
    assert Address.parse("[::1]:80", "--listen") == Address("[::1]", 80)
    assert Address.parse(":0", "--listen") == Address("", 0)
    assert str(Address.parse("a.example:65535", "--listen")) == "a.example:65535"
