# SPDX-License-Identifier: Apache-2.0
"""How long the ring is stalled while rows move from one server to two, against stopping with a checkpoint.

`python -m benchmarks.moving [ROWS] [hybrid|ps]`: real servers, and the client that the ring's root has. In
mode=ps no worker steps meanwhile. What is compared with is only the servers' part of it: a checkpoint of
one server, two new processes that each read their rows. Workers, which start more slowly, are not in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from edl.checkpoints import Store
from edl.checkpoints.manifest import Manifest
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS
from edl.contract.rows.placement import ShardAssignment, moves
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.ps_client.calls import Link
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ps_client.root import NOWHERE

DIM, STEP_ROWS = 16, 100_000
ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.01}}
UNIFORM = {"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05, "seed": None}}
TABLE = Table("user", DIM, json.dumps(UNIFORM), json.dumps(ADAM), own_learning_rate=True)


class Process:
    def __init__(self, index: int, where: Path, address: str = "127.0.0.1:0"):
        file = where / f"address-{index}"
        file.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edl.ps",
                "--index",
                str(index),
                "--listen",
                address,
                "--run-id",
                "run",
                "--log-dir",
                str(where / f"log-{index}"),
                "--checkpoint-dir",
                str(where / "checkpoints"),
                "--address-file",
                str(file),
            ],
            env={**os.environ, "EDL_TOKEN": "token"},
            stderr=subprocess.DEVNULL,
        )
        while not file.exists() or not file.read_text().strip():
            time.sleep(0.005)
        self.address = file.read_text().strip()


class Ring:
    """A ring of one, without a model."""

    def __init__(self, processes: list[Process], replicas: int = 1):
        addresses = [process.address for process in processes]
        self.servers = PsClient.at(addresses, "token", "run", 7, replicas)
        self.commit: Commit | None = None
        self.step = 0
        self.servers.declare((TABLE,), lambda: self.commit)

    def form(self, processes: list[Process], servers: int) -> None:
        self.servers.enter([process.address for process in processes], servers)
        self.servers.claim(0)
        if self.step:
            assert not (why := self.servers.start_generation(self.step)), why
            if self.servers.moves:
                assert not (why := self.servers.move(self.step)), why
        else:
            self.servers.restore(0, "")

    def restore(self, processes: list[Process], step: int) -> None:
        self.servers.enter([process.address for process in processes], len(processes))
        self.servers.claim(0)
        self.servers.restore(step, "bench")

    def take(self, ids: np.ndarray) -> None:
        self.servers.pull(self.step, [ids])
        self.servers.stage(self.step, 0, [(ids, np.ones((len(ids), DIM), np.float32))])
        generation = self.servers.generation
        self.commit = Commit(self.step, False, 1.0, 0.01, self.step, generation)
        self.step += 1
        self.servers.pull(self.step, [ids[:1]])


class AsyncWorkers:
    """The same of mode=ps: one worker, without a model."""

    def __init__(self, processes: list[Process]):
        addresses, interrupt = [process.address for process in processes], Interrupt()

        def connect(index: int, address: str) -> Link:
            return ServerLink(index, address, "token", interrupt)

        links = [connect(index, address) for index, address in enumerate(addresses)]
        self.servers = PsClient(
            links,
            "run",
            7,
            interrupt,
            connect=connect,
            addresses=addresses,
            asynchronous=pb.Asynchronous(),
        )
        self.servers.declare((TABLE,))
        self.step = 0

    def form(self, processes: list[Process], servers: int) -> None:
        self.servers.enter([process.address for process in processes], servers)
        self.servers.take_charge(0)
        if not self.step:
            self.servers.begin([(np.zeros(0, np.int64), np.zeros((0, DIM), np.float32))])
        self.servers.introduce()
        if self.servers.moves:
            self.servers.drain(self.step)
            assert self.servers.move_quiesced(0) == (NOWHERE, "")

    def restore(self, processes: list[Process], step: int) -> None:
        self.servers.enter([process.address for process in processes], len(processes))
        self.servers.take_charge(0)
        self.servers.restore(step, "bench")

    def take(self, ids: np.ndarray) -> None:
        [step] = self.servers.lease_steps(0, 1, self.step + 1)
        versions = self.servers.pull_current([ids]).versions
        gradients = [(ids, np.ones((len(ids), DIM), np.float32))]
        assert self.servers.push(StepGradients(step, gradients, 0.0, 1, 0.01), 0, versions)
        self.step += 1


def filled(ring: Ring | AsyncWorkers, rows: int) -> None:
    for start in range(0, rows, STEP_ROWS):
        ring.take(np.arange(start, min(start + STEP_ROWS, rows), dtype=np.int64))


def main() -> int:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    kind = AsyncWorkers if sys.argv[2:] == ["ps"] else Ring
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        try:
            processes.append(Process(0, where))
            ring = kind(processes)
            ring.form(processes, 1)
            filled(ring, rows)
            # Stopping with a checkpoint, as far as the servers have to do with it.
            began = time.perf_counter()
            with ring.servers.take_parts(ring.step, "bench", 0) as written:
                parts = tuple(written())
            state = {"servers": {"count": 1, "parts": [part.name for part in parts]}}
            told = Manifest(
                step=ring.step,
                run="run",
                attempt="bench",
                epoch=0,
                records=0,
                model="",
                variables=(),
                parts=parts,
                state=state,
            )
            Store.open(str(where / "checkpoints")).begin(ring.step, "bench").commit(told)
            others = where / "others"
            others.mkdir()
            (others / "checkpoints").symlink_to(where / "checkpoints")
            fresh = [Process(index, others) for index in range(2)]
            processes += fresh
            again = kind(fresh)
            again.restore(fresh, ring.step)
            stopped = time.perf_counter() - began
            for process in fresh:
                process.process.kill()
            # The second server is started while the job trains.
            pair = [processes[0], Process(1, where)]
            processes.append(pair[1])
            began = time.perf_counter()
            ring.form(pair, 2)
            ring.take(np.arange(1000, dtype=np.int64))
            moved = time.perf_counter() - began
            share = moves(ShardAssignment(1), ShardAssignment(2), 0, 1).sum() / BUCKETS
            print(
                f"mode={'ps' if kind is AsyncWorkers else 'hybrid'}: {rows:,} rows of {DIM} with Adam, "
                f"1 -> 2 servers: {share:.3f} of the buckets in "
                f"{moved:.2f} s with the next step; checkpoint, two new servers, reading: {stopped:.2f} s"
            )
        finally:
            for process in processes:
                process.process.kill()
                process.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
