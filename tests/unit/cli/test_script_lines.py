# SPDX-License-Identifier: Apache-2.0
"""The lines of a script in the terminal of `edl run --script` and `edl horovod`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from edl.cli.start.script_lines import BURST, PIECE, ScriptLines


def a_status(*ranks: int | None, exporter: int | None = None) -> dict[str, Any]:
    """The status of workers 0, 1 ... with these ranks."""
    return {"workers": [{"id": n, "rank": rank} for n, rank in enumerate(ranks)], "exporter": exporter}


class Job:
    """Logs of workers, and what is shown of them."""

    def __init__(self, logs: Path, everyone: bool = False):
        self._logs = logs
        self.shown: list[str] = []
        self.lines = ScriptLines(logs, self.shown.append, everyone)

    def write(self, worker: int, text: str) -> None:
        with open(self._logs / f"worker-{worker}.log", "a") as log:
            log.write(text)

    def look(self, status: dict[str, Any]) -> list[str]:
        """The lines that are shown after this status."""
        for _ in self.lines.follow(iter([status])):
            self.shown.clear()
            self.lines.look()
        return [*self.shown]


def test_the_lines_are_those_of_rank_0_also_after_its_replacement(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(0, "trial of 0\n")
    job.write(1, "trial of 1\n")
    assert job.look(a_status(None, None)) == ["trial of 0"], "before the first ring: the first worker"
    job.write(
        0, "2026-11-29T11:06:35.066481Z generation 1, rank 0, step 1: Loss 1.0 in this epoch\nstep 1 of "
    )
    assert job.look(a_status(0, 1)) == [], "edl's own line, and one that is not complete"
    job.write(0, "0\n2026-11-29T11:06:35.066481Z INFO root: the script's logger\n")
    job.write(1, "step 1 of 1\n" * 3)
    assert job.look(a_status(0, 1)) == [
        "step 1 of 0",
        "2026-11-29T11:06:35.066481Z INFO root: the script's logger",
    ]
    for _ in range(10):
        assert job.look(a_status(0, 1)) == []
    job.write(1, "step 2 of 1\n")
    assert job.look(a_status(0, 1)) == []
    assert job.look(a_status(None, 0)) == ["step 2 of 1"], "its last moments before the status says so, too"
    job.write(1, "\x1b[31m 1 %\r 99 %\r\x1b[0m\n")
    job.write(0, "saved\n")
    assert job.look(a_status(None, 0)) == [" 99 %"]
    assert job.look(a_status(None, None, exporter=0)) == ["saved"]


def test_the_lines_of_all_workers_have_a_prefix(tmp_path: Path) -> None:
    job = Job(tmp_path, everyone=True)
    job.write(0, "a\n")
    job.write(1, "b\n")
    assert job.look(a_status(1, 0)) == ["[worker 0] a", "b"]


def test_a_flood_of_lines_is_cut_and_counted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(0, "".join(f"{n}\n" for n in range(1000)))
    with job.lines:
        pass
    assert job.shown == [], "no worker is known"
    job = Job(tmp_path)
    assert job.look(a_status(0)) == [str(n) for n in range(BURST)]
    with job.lines:
        job.shown.clear()
    assert job.shown == [f"... at least {1000 - BURST} more lines are in {tmp_path}"]
    job.write(0, "0123456789" * (PIECE // 10) + "\nlast\n")
    assert job.look(a_status(0))[0] == "last", "only the end of a large piece is read"


def test_a_terminal_that_does_not_take_lines_does_not_stop_the_job_and_one_that_is_closed_ends_it(
    tmp_path: Path,
) -> None:
    taken, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def show(line: str) -> None:
        taken.set()
        go_on.wait()
        raise BrokenPipeError

    lines = ScriptLines(tmp_path, show, False, closed.set)
    (tmp_path / "worker-0.log").write_text("line\n")
    with lines:
        assert next(iter(lines.follow(iter([a_status(0)])))) == a_status(0)
        assert taken.wait(30)
        assert len([*lines.follow(iter([a_status(0), a_status(0)]))]) == 2, "statuses are read meanwhile"
        go_on.set()
        assert closed.wait(30)
