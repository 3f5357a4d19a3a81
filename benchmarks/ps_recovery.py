# SPDX-License-Identifier: Apache-2.0
"""What a row of a server takes, and how long a server needs that was killed.

    memory      bytes for a row of 16 numbers with Adam: of the tables, and of the process
    recovery    from the start of the process, after a kill -9, until it answers at the step where it was; it
                has nothing but its log, where each row was learned once

These are rows of `scripts/bench ps`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks.report import Row, say
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.ps.rpc.service import OPTIONS

PARTS = ("memory", "recovery")
DIM, SIZES = 16, (500_000, 2_000_000)
STEP = 50_000  # rows
SECONDS = 120.0
RUN = "bench"


def server_command(directory: Path) -> list[str]:
    """A server whose token, log and address are in this directory."""
    files = {"token-file": "token", "log-dir": "log", "address-file": "address"}
    options = [word for option, name in files.items() for word in (f"--{option}", str(directory / name))]
    return [sys.executable, "-m", "edl.ps", "--run-id", RUN, "--log-level", "warning", *options]


class Process:
    """`python -m edl.ps`, with a log of its own."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack):
        (directory / "token").write_text(RUN)
        address = directory / "address"
        address.unlink(missing_ok=True)
        self.began_at = time.perf_counter()
        self.process = subprocess.Popen(server_command(directory))
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        until = time.monotonic() + SECONDS
        while not address.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server does not listen")
            time.sleep(0.005)
        self.address = address.read_text()
        channel = grpc.insecure_channel(self.address, options=OPTIONS)
        stack.callback(channel.close)
        self._stub = ps_pb2_grpc.ParameterServerStub(channel)

    def call(self, name: str, request: Any) -> Any:
        metadata = [("authorization", f"Bearer {RUN}")]
        return getattr(self._stub, name)(request, metadata=metadata, timeout=SECONDS)

    def resident(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    if not {*only} & {*PARTS}:
        return
    found: dict[str, Row] = {}

    def add(name: str, value: float, unit: str) -> None:
        found.setdefault(name, Row(name, [], [], unit, "", None)).ours.append(value)

    for rows in SIZES:
        for number in range(rounds):
            say(f"{rows:,} rows, round {number + 1} of {rounds}")
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                _once(rows, Path(folder), stack, only, add)
    yield list(found.values())


def _once(rows: int, directory: Path, stack: contextlib.ExitStack, only: list[str], add: Any) -> None:
    server = Process(directory, stack)
    empty = server.resident()
    step = _filled(server, rows)
    description = server.call("Describe", pb.DescribeRequest())
    if "memory" in only:
        add(f"memory of {rows:,} rows: tables", description.memory / rows, "bytes/row")
        add(f"memory of {rows:,} rows: process", (server.resident() - empty) / rows, "bytes/row")
    if "recovery" in only:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        again = Process(directory, stack)
        position = again.call("Describe", pb.DescribeRequest()).position
        assert (position.step, position.empty) == (step, False), position
        name = f"recovery of {rows:,} rows, a log of {description.log_bytes >> 20:,} MiB"
        add(name, time.perf_counter() - again.began_at, "s")
        times = psutil.Process(again.process.pid).cpu_times()
        add(f"{name}: CPU time", times.user + times.system, "s")


def _filled(server: Process, rows: int) -> int:
    """Learn so many rows; returns the step that is reached."""
    optimizer = json.dumps({"class_name": "Adam", "config": {"learning_rate": 0.1}})
    initializer = json.dumps({"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05}})
    table = pb.Table(name="t", dim=DIM, initializer=initializer, optimizer=optimizer)
    server.call("Declare", pb.Tables(run_id=RUN, tables=[table]))
    server.call("StartGeneration", pb.StartGenerationRequest(run_id=RUN, generation=1, step=0))
    gradients = np.ones((STEP, DIM), np.float32).tobytes()
    for step, start in enumerate(range(0, rows, STEP)):
        ids = (np.arange(start, start + STEP, dtype=np.int64) * 2654435761) % (1 << 40)
        given = pb.Gradients(ids=ids.tobytes(), values=gradients)
        server.call("Push", pb.PushRequest(run_id=RUN, generation=1, step=step, gradients=[given]))
        last = pb.Commit(step=step, scale=1.0, learning_rate=0.1, iteration=step)
        server.call("Pull", pb.PullRequest(run_id=RUN, generation=1, step=step + 1, last=last))
    return rows // STEP
