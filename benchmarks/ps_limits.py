# SPDX-License-Identifier: Apache-2.0
"""What one server stands.

    streams     so many workers, each with a connection of its own, over which it pulls 100 rows a second: the
                server's CPU time for each pull, its memory, and how long a pull takes
    dense       mode=ps with 25 million dense weights, one worker and one server: seconds a step, and what
                server and worker have in memory

These are rows of `scripts/bench ps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks import ps_training
from benchmarks.ps_recovery import RUN, Process
from benchmarks.report import Row, p95, say
from edl.contract.proto import ps_pb2 as pb
from edl.ps.rpc.service import OPTIONS

PARTS = ("streams", "dense")
STREAMS = (10, 100, 1000)
ROWS, DIM, SECONDS = 100, 16, 10.0
BATCH = 64


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    for part, measured in (("streams", _streams), ("dense", _dense)):
        if part in only:
            found: dict[str, Row] = {}
            for number in range(rounds):
                say(f"{part}, round {number + 1} of {rounds}")
                for name, value, unit in measured():
                    found.setdefault(name, Row(name, [], [], unit, "", None)).ours.append(value)
            yield list(found.values())


def _streams() -> Iterator[tuple[str, float, str]]:
    for streams in STREAMS:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            server = Process(Path(folder), stack)
            optimizer = json.dumps({"class_name": "SGD", "config": {"learning_rate": 0.1}})
            initializer = json.dumps(
                {"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05}}
            )
            table = pb.Table(name="t", dim=DIM, initializer=initializer, optimizer=optimizer)
            server.call("Declare", pb.Tables(run_id=RUN, tables=[table]))
            server.call("StartGeneration", pb.StartGenerationRequest(run_id=RUN, generation=1, step=0))
            empty = server.resident()
            pulls, seconds, cpu = asyncio.run(_pulls(server, streams))
            name = f"{streams:,} workers that pull {ROWS} rows a second"
            yield f"{name}: CPU time of a pull", cpu / len(pulls) * 1e6, "us"
            yield f"{name}: of the server's core", 100 * cpu / seconds, "%"
            yield f"{name}: median until it is answered", 1000 * statistics.median(pulls), "ms"
            yield f"{name}: 95 % are answered within", 1000 * p95(pulls), "ms"
            yield f"{name}: memory of a connection", (server.resident() - empty) / streams / 1024, "KiB"


async def _pulls(server: Process, streams: int) -> tuple[list[float], float, float]:
    """Seconds of each pull, and of all of it; and of the server's processor."""
    process = psutil.Process(server.process.pid)
    rng = np.random.default_rng(1)
    taken: list[float] = []
    ready, ended, go = 0, asyncio.Event(), asyncio.Event()

    async def worker(number: int) -> None:
        nonlocal ready
        # A connection of its own: channels of one process share one otherwise.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            begin: Any = channel.stream_stream("/edl.ParameterServer/Converse")
            stream = begin(metadata=[("authorization", f"Bearer {RUN}")])
            ids = rng.integers(0, 1 << 40, ROWS).tobytes()
            request = pb.PullRequest(run_id=RUN, generation=1, ids=[pb.Ids(ids=ids)]).SerializeToString()

            async def pull(count: int) -> None:
                ask = pb.Ask(number=count, method="Pull", request=request)
                await stream.write(ask.SerializeToString())
                answer = pb.Answer.FromString(await stream.read())
                assert answer.number == count and len(answer.answer) > 4 * DIM * ROWS, answer.why

            await pull(1)
            ready += 1
            if ready == streams:
                go.set()
            await go.wait()
            count = 1
            await asyncio.sleep(number / streams)  # not all at the same moment
            while not ended.is_set():
                began = time.perf_counter()
                count += 1
                await pull(count)
                taken.append(time.perf_counter() - began)
                await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(worker(number))
        await go.wait()
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        await asyncio.sleep(SECONDS)
        seconds, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - before
        ended.set()
    return taken, seconds, cpu


def _dense() -> Iterator[tuple[str, float, str]]:
    module = str(ps_training.ROOT / "benchmarks/timed_mlp.py")
    for logged in (True, False):
        with (
            tempfile.TemporaryDirectory() as folder,
            ps_training.Training(
                Path(folder),
                module,
                {},
                "workers=1",
                f"training.batchSize={BATCH}",
                "training.epochs=100000",
                f"ps.log={str(logged).lower()}",
                *ps_training.hybrid(1, "ps"),
            ) as job,
        ):
            rate = job.samples_a_second(1)
            status = job.client.status()
            name = f"25 M dense weights, SGD, {'with' if logged else 'without'} a log"
            yield f"{name}: a step of {BATCH} records", BATCH / rate, "s"
            worker = psutil.Process(int(ps_training.in_ring(status)[0]["handle"]))
            yield f"{name}: memory of the worker", worker.memory_info().rss / 2**20, "MiB"
            server = psutil.Process(int(status["servers"][0]["handle"]))
            yield f"{name}: memory of the server", server.memory_info().rss / 2**20, "MiB"
