# SPDX-License-Identifier: Apache-2.0
"""Jobs under a real mpiexec, whose training processes and ranks are killed: each record counts once.

Each commit runs one of the two; EDL_STORMS=all runs both.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.contract import artifacts
from edl.journal import audit
from edl.net.master_client import Client
from tests.process.conftest import MODELS
from tests.support.jobs.by_commit import of_this_commit
from tests.support.jobs.evidence import check_weights

BIN = Path(sys.executable).parent
RECORDS = 2000
SECONDS = 150


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "EDL_FAULTS": str(tmp_path),
        "EDL_COUNTING_RECORDS": str(RECORDS),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }.items():
        monkeypatch.setenv(name, value)


class Launched:
    """A running mpiexec with a job of the counting model, which idles while the file `idle` exists."""

    def __init__(self, folder: Path, ranks: int, *more: str, flags: tuple[str, ...] = ()):
        (folder / "idle").touch()
        self.folder, self.output = folder, folder / "job"
        command = [str(BIN / "mpiexec"), "--oversubscribe", "--bind-to", "none", *flags, "-n", str(ranks)]
        self.log = folder / "mpiexec.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, str(BIN / "edl"), "mpi", str(MODELS / "counting_faulty.py"), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.seen: dict[int, psutil.Process] = {}  # all processes of the job so far

    def until(self, test: Callable[[dict[str, Any]], Any], output: Path) -> Any:
        """Follow the status until the test is true; return its result."""
        while self.process.poll() is None and not (output / artifacts.CONTACT).exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        assert (output / artifacts.CONTACT).exists(), self.log.read_text()
        for status in Client(artifacts.read_contact(output)).follow(SECONDS):
            self.note()
            if found := test(status):
                return found
        raise AssertionError(f"the job has ended, or nothing happened: {self.log.read_text()}")

    def note(self) -> None:
        """Remember the processes of the job."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process

    def ranks(self) -> list[psutil.Process]:
        """The processes that mpiexec has started, by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "mpi" in process.cmdline():
                    found[int(process.environ()["OMPI_COMM_WORLD_RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def training(self, rank: psutil.Process) -> list[psutil.Process]:
        """The training process of a rank; empty if the rank is a spare."""
        return [p for p in rank.children() if "edl.trainer" in p.cmdline()]

    def end(self) -> int:
        """Let the job end by itself; return the exit code of mpiexec."""
        (self.folder / "idle").unlink()
        return self.process.wait(SECONDS)

    def leftovers(self) -> list[psutil.Process]:
        """Wait for the end of all processes of the job; return those that still live."""
        return psutil.wait_procs(list(self.seen.values()), timeout=60)[1]


@contextlib.contextmanager
def mpiexec(folder: Path, ranks: int, *more: str, flags: tuple[str, ...] = ()) -> Iterator[Launched]:
    job = Launched(folder, ranks, *more, flags=flags)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.note()
            job.process.kill()
            for process in job.seen.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def ring(status: dict[str, Any]) -> set[int]:
    return {w["id"] for w in status["workers"] if w["rank"] is not None}


def exact(output: Path, epochs: int) -> dict[str, Any]:
    """Prove a job by its weights and its journal; return its summary."""
    summary = artifacts.read_summary(output)
    assert summary["phase"] == "Succeeded", summary["reason"]
    assert check_weights(output / summary["model"], RECORDS, epochs) == ""
    return summary


def killed_processes_are_replaced_and_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    output = tmp_path / "job"
    sets = ["--workers=2", "--set=minWorkers=2,training.epochs=2", f"--output={output}"]
    with mpiexec(tmp_path, 3, *sets, flags=("--with-ft", "ulfm")) as job:
        first = job.until(lambda s: len(ring(s)) == 2 and s["step"] > 0 and ring(s), output)
        busy = [rank for rank in job.ranks() if job.training(rank)]
        assert len(busy) == 2
        job.training(busy[0])[0].send_signal(signal.SIGKILL)
        second = job.until(lambda s: len(ring(s)) == 2 and ring(s) != first and ring(s), output)
        assert len(job.ranks()) == 3  # mpiexec has not noticed it

        killed = next(rank for rank in job.ranks()[1:] if job.training(rank))
        trained = job.training(killed)
        for process in (killed, *trained):
            process.send_signal(signal.SIGKILL)
        job.until(lambda s: len(ring(s)) == 2 and ring(s) != second, output)
        assert job.end() == 0, job.log.read_text()
        summary = exact(output, 2)
        assert not job.leftovers()
    assert summary["failures"] == []  # the second kill may meet the only holder of the state: trained again
    assert audit.audit(output).startswith(f"exactly once: {RECORDS:,} records x 2 epochs")


def plain_mpiexec_ends_the_job_with_a_killed_rank_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    output, second = tmp_path / "job", tmp_path / "second"
    sets = ["--set=training.epochs=2"]
    with mpiexec(tmp_path, 2, *sets, f"--output={output}") as job:
        job.until(lambda s: len(ring(s)) == 2 and s["step"] > 2, output)
        # mpiexec kills the other one, and the master stays to save.
        job.ranks()[0].send_signal(signal.SIGKILL)
        assert job.process.wait(SECONDS) == 128 + signal.SIGKILL, job.log.read_text()
        assert not job.leftovers()
    stopped = artifacts.read_summary(output)
    assert stopped["phase"] == "Stopped"
    saved = f"its state is in the checkpoint of step {stopped['step']}"
    assert stopped["reason"] == f"rank 0 of `edl mpi` was ended; {saved}"
    with mpiexec(tmp_path, 2, f"--resume={output}", f"--output={second}") as job:
        assert job.end() == 0, job.log.read_text()
        assert exact(second, 2)["step"] > stopped["step"] > 0
    proved = audit.audit(second)
    assert proved.startswith(f"exactly once: {RECORDS:,} records x 2 epochs")
    assert f"the first {stopped['step']} steps are of the checkpoint" in proved


SCENARIOS = of_this_commit(
    [
        killed_processes_are_replaced_and_a_spare_takes_the_place_of_a_killed_rank,
        plain_mpiexec_ends_the_job_with_a_killed_rank_and_its_checkpoint_goes_on,
    ]
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda of: of.__name__)
def test_a_job_under_mpiexec(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    scenario(tmp_path)
