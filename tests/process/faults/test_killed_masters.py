# SPDX-License-Identifier: Apache-2.0
"""The master dies with kill -9; a new one goes on with the job, and the weights say that nothing was lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from edl.errors import EdlError
from edl.net.master_client import Client
from edl.trainer.runtime.output_lock import PER_RUN
from tests.process.conftest import MODELS, ROOT, Orders
from tests.support.jobs.evidence import check_weights

EDL = [sys.executable, "-m", "edl.cli"]
MODEL = str(MODELS / "counting_faulty.py")
RECORDS, EPOCHS = 10_000, 2
LONGEST_GAP = 1.9  # seconds between two steps of 0.3 s: less than any timeout, on a busy machine too


class External:
    """A job whose two sides this test starts. It idles until it is to be exact."""

    def __init__(self, directory: Path):
        self.output, self.orders = directory / "job", Orders(directory / "orders")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.times = directory / "times"
        self.times.mkdir()
        self.environment = {
            **os.environ,
            "EDL_COUNTING_RECORDS": str(RECORDS),
            "EDL_FAULTS": str(self.orders.directory),
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "EDL_STEP_TIMES": str(self.times),
        }

    @property
    def address(self) -> str:
        """Where a master listens: the first one at any port, the next ones at the same."""
        known = (self.output / artifacts.CONTACT).exists()
        return artifacts.read_contact(self.output).address if known else "127.0.0.1:0"

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.run(name, [*EDL, *arguments])

    def run(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = open(self.output.parent / f"{name}-{len(self.processes)}.log", "wb")
        with log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**self.environment, **environment}, cwd=ROOT
            )
        self.processes.append(process)
        return process

    def start_master(self) -> subprocess.Popen[bytes]:
        sets = f"workers=3,training.epochs={EPOCHS}"
        sets += ",elastic.heartbeatTimeoutSeconds=2,elastic.masterOutageTimeoutSeconds=60"
        return self.start(
            "master", "master", MODEL, "--set", sets, "--listen", self.address, "--output", str(self.output)
        )

    def start_worker(self) -> subprocess.Popen[bytes]:
        """One that notes when its steps are done."""
        token = artifacts.read_contact(self.output).token
        command = [sys.executable, "-m", "tests.support.jobs.timed_worker", "--master", self.address]
        return self.run("worker", command, EDL_TOKEN=token)

    def step_times(self, since: float) -> list[list[float]]:
        """When each worker has done its steps, on the clock of `time.monotonic`."""
        times = [[float(at) for at in path.read_text().split()] for path in self.times.iterdir()]
        return [[at for at in of_one if at >= since] for of_one in times]

    def status(self) -> dict[str, Any]:
        try:
            return Client(artifacts.read_contact(self.output)).status()
        except EdlError:
            return {"step": -1, "generation": -1, "phase": "", "workers": [], "last_change": None}

    def until(self, happens: Any) -> dict[str, Any]:
        """Wait for a status, as long as the newest master runs: a busy machine takes any time."""
        master = next(p for p in reversed(self.processes) if "'master'" in str(p.args))
        while not happens(status := self.status()):
            assert master.poll() is None, status
            time.sleep(0.05)
        return status


@pytest.fixture
def job(tmp_path: Path) -> Iterator[External]:
    job = External(tmp_path)
    yield job
    for process in job.processes:
        process.kill()
        process.wait()
    for log in sorted(tmp_path.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text()[-3000:]}")


def started(job: External) -> tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]]]:
    master = job.start_master()
    job.until(lambda s: s["phase"] == "Starting")
    workers = [job.start_worker() for _ in range(3)]
    job.until(lambda s: in_ring_of(s, 3) and s["step"] > s["last_change"]["step"])
    return master, workers


def in_ring_of(status: dict[str, Any], size: int) -> bool:
    change = status["last_change"]
    return bool(change) and len(change["members"]) == size and change["up_seconds"] is not None


def is_exact(job: External, master: subprocess.Popen[bytes]) -> dict[str, Any]:
    job.orders.go()
    assert master.wait() == 0
    summary = json.loads((job.output / artifacts.SUMMARY).read_text())
    assert summary["phase"] == "Succeeded"
    assert check_weights(job.output / summary["model"], RECORDS, EPOCHS) == ""
    done = subprocess.run([*EDL, "audit", str(job.output)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"exactly once: {RECORDS:,} records x {EPOCHS} epochs"), done
    assert "1 exported file as written (SHA-256)" in done.stdout
    return dict(summary)


@pytest.mark.timeout(600)  # four workers import TensorFlow: on a busy machine it took more than two minutes
def test_a_worker_dies_or_is_given_up_and_comes_back_while_there_is_no_master(job: External) -> None:
    others = job.output / artifacts.MODEL  # as in a claim that an earlier run of the release has used
    job.output.mkdir()
    others.write_bytes(b"of another run")
    job.environment[PER_RUN] = "1"
    master, workers = started(job)
    master.kill()
    master.wait()
    workers[1].kill()
    workers[1].wait()
    master = job.start_master()
    after = job.until(lambda s: in_ring_of(s, 2))
    workers.append(job.start_worker())
    job.until(lambda s: in_ring_of(s, 3) and s["generation"] > after["generation"])

    os.kill(workers[2].pid, signal.SIGSTOP)
    job.until(lambda s: in_ring_of(s, 2))
    master.kill()
    master.wait()
    os.kill(workers[2].pid, signal.SIGCONT)
    master = job.start_master()
    summary = is_exact(job, master)
    assert summary["state_losses"] == 0
    assert workers[2].wait() in (0, 3, 75), "it comes back, unless the new master learns of its ring late"
    assert summary["model"] == f"run-{summary['run_id']}/{artifacts.MODEL}"
    assert others.read_bytes() == b"of another run"


def test_masters_die_at_any_moment_one_after_the_other_and_no_step_waits_for_them(job: External) -> None:
    seed = int(os.environ.get("EDL_SEED", time.time_ns() % 2**32))
    kills = int(os.environ.get("EDL_MASTER_KILLS", "6"))
    chance = random.Random(seed)
    print(f"EDL_SEED={seed} EDL_MASTER_KILLS={kills}")
    master, workers = started(job)
    before, began = job.status(), time.monotonic()
    first = began - before["seconds"]
    for _ in range(kills):
        if chance.random() < 0.5:
            job.until(lambda s: s["phase"] == "Training")
        time.sleep(chance.uniform(0, 1.5))  # it starts, reads the journal, takes over, or has done so
        master.kill()
        master.wait()
        master = job.start_master()
    after = job.until(lambda s: s["phase"] == "Training")
    seconds = time.monotonic() - began
    assert after["generation"] == before["generation"], "no member has left the ring"
    assert [w["id"] for w in after["workers"]] == [w["id"] for w in before["workers"]] == [0, 1, 2]
    assert [w.poll() for w in workers] == [None] * 3
    for times in job.step_times(since=began):
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        middle, longest = gaps[len(gaps) // 2], gaps[-1]
        print(f"{kills} kills in {seconds:.0f} s; {len(gaps)} steps, {middle:.2f} s, at most {longest:.2f} s")
        assert longest < LONGEST_GAP, "a step has waited for a master"

    master.kill()
    master.wait()
    job.orders.go()
    time.sleep(1)  # a while without any master: they train what they were given, and wait
    assert all(w.poll() is None for w in workers)
    job.orders.idle()
    master = job.start_master()
    job.until(lambda s: s["generation"] >= 0)  # it answers: how long its start takes is the machine's
    began = time.monotonic()
    last = job.until(lambda s: s["phase"] == "Training")
    assert time.monotonic() - began < 10
    assert (last["generation"], [w["id"] for w in last["workers"]]) == (before["generation"], [0, 1, 2])
    job.until(lambda s: s["step"] > last["step"])
    lived = time.monotonic() - first
    summary = is_exact(job, master)
    assert summary["state_losses"] == 0
    assert [w.wait() for w in workers] == [0, 0, 0]
    # It covers all masters, and the time between them.
    assert summary["seconds"] >= lived - 1
    assert sum(summary["goodput_seconds"].values()) == pytest.approx(summary["seconds"], abs=0.1)
    assert summary["goodput_seconds"]["useful"] >= seconds / 2, "its ring trained all the time"
    rings = summary["earlier_generations"]["changes"] + len(summary["generations"])
    assert rings == summary["generations"][-1]["generation"]
    # One that was killed before it acted has written none.
    assert len(artifacts.journals(job.output)) > 1


def test_other_values_are_another_job(job: External) -> None:
    master = job.start_master()
    job.until(lambda s: s["phase"] == "Starting")
    master.kill()
    master.wait()
    done = subprocess.run(
        [*EDL, "master", MODEL, "--set", "training.batchSize=7", "--output", str(job.output)],
        capture_output=True,
        text=True,
        check=False,
        env=job.environment,
    )
    assert done.returncode == 2
    assert "training.batchSize" in done.stderr and "new job" in done.stderr
