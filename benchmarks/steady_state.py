# SPDX-License-Identifier: Apache-2.0
"""Steps of a ring that does not change, against those of plain Horovod or of keras.fit.

The ranks of both sides (benchmarks/steady.py) are started together. The processes of a side are stopped while
the other side is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Row
from edl.contract.workers import worker_environment
from edl.trainer.session.kvstore import KeyValueStore

ROOT = Path(__file__).parents[1]
FEW = 4  # steps of the first measurement, and at least of each other
STEADY_SECONDS = 1.5  # of one measurement


@dataclass(frozen=True)
class Steady:
    """A job whose steps are measured against a peer's."""

    model: str  # of benchmarks/steady.py
    optimizer: str = "sgd"
    ranks: int = 2
    peer: str = "plain"
    quick: bool = False  # whether it is measured where there is little time


STEADY = (
    Steady("mlp-1m", quick=True),
    Steady("mlp-8m", quick=True),
    Steady("mlp-25m", quick=True),
    Steady("mlp-100m"),
    Steady("mlp-8m", "adam", quick=True),
    Steady("mlp-25m", "adam"),
    Steady("mlp-8m", ranks=1, quick=True),
    Steady("mlp-8m", ranks=1, peer="fit", quick=True),
    Steady("mlp-8m", "adam", ranks=1, peer="fit"),
    Steady("mlp-8m", ranks=4),
    Steady("mobilenet-v2"),
    Steady("resnet50"),
    Steady("encoder-20m"),
    Steady("encoder-20m", "adam"),
)


@dataclass
class Side:
    """The processes of one side, all of them stopped but while it is measured."""

    processes: list[asyncio.subprocess.Process]
    steps: int = FEW  # that one measurement takes
    milliseconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    async def measure(self) -> float:
        """Seconds of a step, of the slowest rank."""
        self.signal(signal.SIGCONT)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{self.steps}\n".encode())
        told = [(await p.stdout.readline()).split() for p in self.processes]
        self.signal(signal.SIGSTOP)  # an idle ring's engine polls: it must not be in the way of the other's
        seconds = max(float(words[0]) for words in told)
        self.milliseconds.append(seconds * 1e3)
        self.mebibytes.append(max(float(words[1]) for words in told))
        return seconds


async def _steady(case: Steady, rounds: int) -> tuple[Side, Side]:
    async with contextlib.AsyncExitStack() as stack:
        sides = [await _side(stack, case, name) for name in ("edl", case.peer)]
        for side in sides:
            seconds = await side.measure()
            side.steps = max(FEW, round(STEADY_SECONDS / seconds))
            side.milliseconds.clear()
        for _ in range(rounds):
            for side in sides:
                await side.measure()
    return sides[0], sides[1]


async def _side(stack: contextlib.AsyncExitStack, case: Steady, name: str) -> Side:
    store = KeyValueStore(lambda *_: None)
    port = await store.start()
    stack.push_async_callback(store.close)
    store.open(1)
    command = [sys.executable, "-m", "benchmarks.steady", name, case.model, case.optimizer]
    meeting = [str(port), store.secret]
    more = worker_environment(os.environ) if name == "edl" else {}  # as its masters start it
    side = Side([])
    for rank in range(case.ranks):
        process = await asyncio.create_subprocess_exec(
            *command,
            str(rank),
            str(case.ranks),
            *meeting,
            cwd=ROOT,
            env={**os.environ, **more},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(_end, process)
        side.processes.append(process)
    for process in side.processes:
        assert process.stdout is not None
        while b"here" not in (line := await process.stdout.readline()):
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended before it was warm")
    side.signal(signal.SIGSTOP)
    return side


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


def steady(rounds: int, cases: Sequence[Steady] = STEADY) -> Iterator[Row]:
    peers = {"plain": "plain Horovod", "fit": "keras.fit"}
    for case in cases:
        ours, peer = asyncio.run(_steady(case, rounds))
        speed = statistics.median(b / a for a, b in zip(ours.milliseconds, peer.milliseconds, strict=True))
        more = max(ours.mebibytes) / max(peer.mebibytes)
        name = f"{case.model}, {case.optimizer}, {case.ranks} rank{'s' * (case.ranks > 1)}"
        against = f"against {peers[case.peer]}"
        yield Row(
            f"{name}: a step, {against}",
            ours.milliseconds,
            peer.milliseconds,
            "ms",
            f"speed >= 0.98 (is {speed:.3f})",
            speed >= 0.98,
        )
        if case.peer == "plain":
            memory = ours.mebibytes[-1:], peer.mebibytes[-1:]
            yield Row(f"{name}: memory of a worker", *memory, "MiB", "ratio <= 1.15", more <= 1.15)
