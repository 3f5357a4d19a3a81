# SPDX-License-Identifier: Apache-2.0
"""A ring of worker loops on threads, and real parameter servers, which are killed: every row counts once.

The loops, the client, the servers' processes and the checkpoints are what ships; the model counts, and the
ring is that of a process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.checkpoints import Store
from edl.trainer.ps_client.client import PsClient
from tests.support.jobs.checkpoint_writers import configured
from tests.support.jobs.workers import BATCH, POSITIONS, STEPS, come_to_sum, ring_of
from tests.unit.ps.test_worker_with_servers import W, end, stop, write

RUN_ID = "run-1"


class Process:
    """One server, and those that follow it in its place."""

    def __init__(self, index: int, servers: int, where: Path, checkpoints: Path):
        self.index, self.servers, self.where, self.checkpoints = index, servers, where, checkpoints
        self.address = ""
        self.start()

    def start(self) -> None:
        file = self.where / f"address-{self.index}"
        file.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "edl.ps",
            "--index",
            str(self.index),
            "--servers",
            str(self.servers),
            "--listen",
            self.address or "127.0.0.1:0",
            "--run-id",
            RUN_ID,
            "--log-dir",
            str(self.where / f"log-{self.index}"),
            "--checkpoint-dir",
            str(self.checkpoints),
            "--address-file",
            str(file),
        ]
        self.process = subprocess.Popen(command, env={**os.environ, "EDL_TOKEN": "token"})
        listening = threading.Event()
        while not file.exists():
            assert self.process.poll() is None, "the server does not start"
            listening.wait(0.05)
        self.address = file.read_text().strip()

    def kill(self, lose: bool = False) -> None:
        self.process.kill()
        self.process.wait()
        if lose:
            shutil.rmtree(self.where / f"log-{self.index}")


class Servers:
    """Real ones, as the workers of tests/unit/ps/test_worker_with_servers.py are given them."""

    def __init__(self, count: int, where: Path, checkpoints: Path, replicas: int = 1):
        where.mkdir()
        self.replicas = replicas
        self.there = [Process(index, count, where, checkpoints) for index in range(count)]

    def another(self) -> PsClient:
        return PsClient.at([p.address for p in self.there], "token", RUN_ID, 7, self.replicas)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def one(count: int, replicas: int = 1) -> Servers:
        made.append(Servers(count, tmp_path / f"servers-{len(made)}", tmp_path / "checkpoints", replicas))
        return made[-1]

    yield one
    for servers in made:
        for process in servers.there:
            process.kill()


def counts(w: Any) -> list[float]:
    """What all rows count, as a worker that has the last state pulls them."""
    (rows,) = w.servers.pull(w.worker.state.step, [np.arange(POSITIONS)])
    return [float(row) for row in rows[:, 0]]


def test_ring_and_servers_go_back_to_a_checkpoint_when_a_server_has_lost_its_log(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    servers = make(2)
    w = W(0, servers, configured(where), where)
    ring_of(w)
    write([w], 2)
    (made,) = Store.open(str(where)).checkpoints()
    assert len(made.manifest.of_servers) == 2
    made.verify()
    come_to_sum(4, w)
    servers.there[1].kill(lose=True)
    servers.there[1].start()
    w.ring.free()
    assert "has lost its log" in w.says("left_ring", 1).broken
    ring_of(w, generation=2, step=w.worker.state.step, sync=False)
    joined = w.says("joined_ring", 2)
    assert (joined.step, joined.rolled_back) == (2, "parameter server 1 has lost its log and rows")
    end(2, w)
    assert w.worker.state.step == STEPS and counts(w) == [1.0] * POSITIONS
    stop(w)
    # Another job goes on from the checkpoint with three servers.
    more = make(3)
    new = W(1, more, configured(where), where)
    ring_of(new, step=2)
    assert new.says("joined_ring", 1).step == 2
    end(1, new)
    assert counts(new) == [1.0] * POSITIONS and POSITIONS > 2 * BATCH
    stop(new)


def test_the_trained_rows_wait_for_a_server_that_a_ring_would_do_without(
    make: Callable[..., Servers],
) -> None:
    servers = make(2, 2)
    w = W(0, servers)
    ring_of(w)
    end(1, w)
    servers.there[0].kill()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(w.servers.all_rows, 0)
        asked = threading.Event()
        while w.servers.waiting() is None and not reading.done():
            asked.wait(0.01)
        servers.there[0].start()
        ids, rows = reading.result(timeout=60)
    assert np.sort(ids).tolist() == list(range(POSITIONS)) and (rows == 1).all()
    stop(w)
