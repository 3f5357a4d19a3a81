# SPDX-License-Identifier: Apache-2.0
"""The peer of `scripts/bench ring`: a job of stock Elastic Horovod on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Self

import psutil

from benchmarks.journal import MOST_WAIT
from edl.contract import artifacts

HERE = Path(__file__).parent


class Stock:
    """Stock Elastic Horovod on hosts that are all this machine."""

    HOSTS = ("localhost", "127.0.0.1", os.uname().nodename)

    def __init__(self, python: str, directory: Path, hosts: int):
        self.directory = directory / f"stock-{time.monotonic_ns()}"
        self.directory.mkdir(parents=True)
        self.hosts = self.directory / "hosts"
        self.set_hosts(hosts)
        script = self.directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        script.chmod(0o755)
        self.log = open(self.directory / "log", "wb")
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
        ]
        environment = {
            **os.environ,
            "BENCH_DIR": str(self.directory),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        }
        self.process = subprocess.Popen(
            [*run, python, str(HERE / "peer_elastic.py")],
            env=environment,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def set_hosts(self, hosts: int) -> None:
        """As a whole: the driver takes half a list for hosts that are gone."""
        artifacts.write_whole(self.hosts, "".join(f"{host}:1\n" for host in self.HOSTS[:hosts]))

    def steps(self) -> dict[int, list[tuple[float, int, int]]]:
        """(when, step, ring size) of each worker, by process id."""
        found = {}
        for file in self.directory.glob("steps.*"):
            rows = [
                line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
            ]
            found[int(file.suffix[1:])] = [(float(t), int(s), int(n)) for t, s, n in rows]
        return found

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
        raise TimeoutError((self.directory / "log").read_text()[-2000:])

    def stall(self, since: float, size: int) -> float:
        """The longest time from a step to the next one of a survivor around `since`, up to MOST_WAIT."""
        deadline = time.monotonic() + MOST_WAIT
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
        return MOST_WAIT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the driver and all that it has started: its workers are in sessions of their own."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        for process in [psutil.Process(self.process.pid), *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.log.close()
