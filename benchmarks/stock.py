# SPDX-License-Identifier: Apache-2.0
"""A script with hvd.elastic, run by stock horovodrun or by `edl horovod`, and watched by what it writes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from benchmarks.journal import MAX_WAIT
from edl.contract import artifacts
from edl.net.master_client import Client

SCRIPT = Path(__file__).with_name("peer_elastic.py")


class Watched:
    """A job of `peer_elastic.py`.

    Args:
        directory: where its workers write their steps.
    """

    directory: Path
    log: Path

    def steps(self) -> dict[int, list[tuple[float, int, int]]]:
        """(when, step, ring size) of each worker, by process id."""
        return {pid: [(now, step, n) for now, step, n, *_ in rows] for pid, rows in self.rows().items()}

    def rows(self) -> dict[int, list[tuple[float, int, int, float, float]]]:
        """(when, step, ring size, seconds of the step, seconds of its commit) of each worker."""
        found = {}
        for file in self.directory.glob("steps.*"):
            rows = [
                line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
            ]
            found[int(file.suffix[1:])] = [
                (float(t), int(s), int(n), float(step), float(commit)) for t, s, n, step, commit in rows
            ]
        return found

    def losses(self) -> list[tuple[float, float]]:
        """(when, loss over all records), in order."""
        found = []
        for file in self.directory.glob("losses.*"):
            whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [(float(now), float(loss)) for now, loss in map(str.split, whole)]
        return sorted(found)

    def wait(self, size: int, seconds: float = 90) -> list[int]:
        """Until every worker of a ring of that size steps; their process ids."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = [
                pid
                for pid, rows in self.steps().items()
                if rows and rows[-1][2] == size and time.monotonic() - rows[-1][0] < 1
            ]
            if len(now) == size:
                return sorted(now)
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text()[-2000:])

    def stall(self, since: float, size: int) -> float:
        """The longest time from a step to the next one of a survivor around `since`, up to MAX_WAIT."""
        deadline = time.monotonic() + MAX_WAIT
        while time.monotonic() < deadline:
            gaps = []
            for rows in self.steps().values():
                before = [t for t, _, _ in rows if t <= since]
                after = [t for t, _, n in rows if t > since and n == size]
                if before and after:
                    gaps.append(after[0] - max(t for t, _, _ in rows if t < after[0]))
            if len(gaps) >= min(size, 2):
                return max(gaps)
            time.sleep(0.05)
        return MAX_WAIT


class Stock(Watched):
    """Stock Elastic Horovod on hosts that are all this machine.

    Args:
        flags: more of horovodrun's.
        environment: more variables of the workers.
    """

    HOSTS = ("localhost", "127.0.0.1", os.uname().nodename)

    def __init__(
        self, python: str, directory: Path, hosts: int, flags: Sequence[str] = (), **environment: str
    ):
        self.directory = directory / f"stock-{time.monotonic_ns()}"
        self.directory.mkdir(parents=True)
        self.hosts = self.directory / "hosts"
        self.set_hosts(hosts)
        script = self.directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        script.chmod(0o755)
        self.log = self.directory / "log"
        run = [
            str(Path(python).with_name("horovodrun")),
            "-np",
            str(hosts),
            "--min-np",
            "1",
            "--max-np",
            "3",
            "--gloo",
            "--host-discovery-script",
            str(script),
            "--network-interfaces",
            "lo",
            *flags,
        ]
        paths = {
            "BENCH_DIR": str(self.directory),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*run, python, str(SCRIPT)],
                env=os.environ | paths | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def set_hosts(self, hosts: int) -> None:
        """As a whole: the driver takes half a list for hosts that are gone."""
        artifacts.write_whole(self.hosts, "".join(f"{host}:1\n" for host in self.HOSTS[:hosts]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the driver and all that it has started: its workers are in sessions of their own."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        for process in [psutil.Process(self.process.pid), *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class OurScript(Watched):
    """The same script under `edl horovod`, with new Python processes for new workers.

    Args:
        environment: more variables of the workers.
    """

    SETTINGS = "local.startMethod=spawn,elastic.maxFailures=1000,elastic.heartbeatTimeoutSeconds=5"

    def __init__(self, directory: Path, workers: int, **environment: str):
        self.directory = directory / f"script-{time.monotonic_ns()}"
        self.directory.mkdir(parents=True)
        self.log, self.output = self.directory / "log", self.directory / "job"
        flags = ["-np", str(workers), "--min-np", "1", "--max-np", "3", "--set", self.SETTINGS]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("edl"), "horovod", *flags, "--output", self.output, SCRIPT],
                env=os.environ | {"BENCH_DIR": str(self.directory)} | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def set_hosts(self, workers: int) -> None:
        """Scale the job."""
        Client(artifacts.read_contact(self.output)).scale(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
