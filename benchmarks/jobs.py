# SPDX-License-Identifier: Apache-2.0
"""Jobs of ours under measurement: a master with its workers on this machine, watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.journal import Journal
from edl.config import values
from edl.contract import artifacts
from edl.net.master_client import Client

ROOT = Path(__file__).parents[1]
LEASE = 1.0  # heartbeat timeout in seconds


class Job:
    """A running job, ended at the end of the `with` block.

    Args:
        output: its output directory, which exists.
        sets: its values, as for --set.
        environment: of the master and its workers, in addition to that of this process.
    """

    def __init__(self, output: Path, sets: Sequence[str], environment: Mapping[str, str]):
        self.output = output
        (output / "values.json").write_text(json.dumps(values.load([], [*sets])))
        self._log = open(output / "master.log", "wb")
        arguments = ["--values", str(output / "values.json"), "--output", str(output)]
        self.master = subprocess.Popen(
            [sys.executable, "-m", "edl.master", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.master.stdout is not None
        self.master.stdout.readline()
        self.client = Client(artifacts.read_contact(output))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.master.terminate()
        try:
            self.master.wait(30)
        except subprocess.TimeoutExpired:
            self.master.kill()
            self.master.wait()
        self._log.close()


class OurJob(Job):
    """A running job of the counting model, watched through its journal."""

    def __init__(self, directory: Path, workers: int, *sets: str, start: str = "fork"):
        output = directory / f"ours-{time.monotonic_ns()}"
        output.mkdir(parents=True)
        given = (
            f"workers={workers}",
            "model.module=counting",
            "training.epochs=10000",
            "elastic.maxFailures=1000",
            f"elastic.heartbeatTimeoutSeconds={LEASE}",
            f"local.startMethod={start}",
            *sets,
        )
        sizes = {"EDL_COUNTING_SLEEP": "0.01", "EDL_COUNTING_RECORDS": "100000"}
        super().__init__(output, given, {name: os.environ.get(name, size) for name, size in sizes.items()})
        self.journal = Journal(["tail", "--lines=+1", "--follow=name", self.output / artifacts.JOURNAL])

    def pid(self, worker: int) -> int:
        """The process id of a worker."""
        return next(
            int(e["event"]["handle"])
            for e in self.journal.entries
            if e["event"]["type"] == "Seen" and e["event"]["worker"] == worker
        )

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        super().__exit__()
