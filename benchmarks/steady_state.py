# SPDX-License-Identifier: Apache-2.0
"""Steps of a ring that does not change, against those of plain Horovod or of keras.fit.

    python -m benchmarks.steady_state MODEL PEER... [--ranks N] [--rounds N] ...

The ranks of all sides (benchmarks/steady.py) are started together. The processes of a side are stopped while
a different one is measured.

`scripts/bench ring` measures with one thread of the CPU. The command above is for a GPU, which all ranks and
sides share. It exits with 1 if a peer is faster than the goal allows; the goal does not apply to
fit-resident, which has no input to wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Row, spread
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
    peers: tuple[str, ...] = ("plain",)
    quick: bool = False  # whether it is measured where there is little time
    options: tuple[str, ...] = ()  # of benchmarks/steady.py


STEADY = (
    Steady("mlp-1m", quick=True),
    Steady("mlp-8m", quick=True),
    Steady("mlp-25m", quick=True),
    Steady("mlp-100m"),
    Steady("mlp-8m", "adam", quick=True),
    Steady("mlp-25m", "adam"),
    Steady("mlp-8m", ranks=1, quick=True),
    Steady("mlp-8m", ranks=1, peers=("fit",), quick=True),
    Steady("mlp-8m", "adam", ranks=1, peers=("fit",)),
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
    cpu_milliseconds: list[float] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def forget(self) -> None:
        """Drop what was measured so far."""
        for found in (self.milliseconds, self.mebibytes, self.cpu_milliseconds):
            found.clear()

    async def measure(self) -> float:
        """Seconds of a step, of the slowest rank."""
        self.signal(signal.SIGCONT)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{self.steps}\n".encode())
        lines = [await p.stdout.readline() for p in self.processes]
        if not all(lines):
            raise RuntimeError("a rank ended while it was measured")
        self.signal(signal.SIGSTOP)  # an idle ring's engine polls: it must not be in the way of the other's
        rows = [tuple(map(float, line.split())) for line in lines]
        seconds, mebibytes, cpu = map(max, zip(*rows, strict=True))
        self.milliseconds.append(seconds * 1e3)
        self.mebibytes.append(mebibytes)
        self.cpu_milliseconds.append(cpu * 1e3)
        return seconds


async def measured(case: Steady, rounds: int, seconds: float = STEADY_SECONDS) -> dict[str, Side]:
    """Measure all sides of a case in turns.

    Args:
        seconds: of one measurement of one side.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            started = {n: group.create_task(_side(stack, case, n)) for n in ("edl", *case.peers)}
        sides = {name: task.result() for name, task in started.items()}
        for side in sides.values():
            side.steps = max(FEW, round(seconds / await side.measure()))
            side.forget()
        for _ in range(rounds):
            for side in sides.values():
                await side.measure()
    return sides


async def _side(stack: contextlib.AsyncExitStack, case: Steady, name: str) -> Side:
    store = KeyValueStore(lambda *_: None)
    port = await store.start()
    stack.push_async_callback(store.close)
    store.open(1)
    command = [sys.executable, "-m", "benchmarks.steady", name, case.model, case.optimizer]
    meeting = [str(port), store.secret]
    more = (
        worker_environment(os.environ) if name in ("edl", "deterministic") else {}
    )  # as its masters start it
    side = Side([])
    errors = stack.enter_context(tempfile.TemporaryFile("w+b"))
    for rank in range(case.ranks):
        process = await asyncio.create_subprocess_exec(
            *command,
            str(rank),
            str(case.ranks),
            *meeting,
            *case.options,
            cwd=ROOT,
            env={**os.environ, **more},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        stack.push_async_callback(_end, process)
        side.processes.append(process)
    for process in side.processes:
        assert process.stdout is not None
        while b"here" not in (line := await process.stdout.readline()):
            if not line:
                errors.seek(0)
                said = errors.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(command)} ended before it was warm: {said}")
    side.signal(signal.SIGSTOP)
    return side


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


def steady(rounds: int, cases: Sequence[Steady] = STEADY) -> Iterator[Row]:
    peers = {"plain": "plain Horovod", "fit": "keras.fit"}
    for case in cases:
        (_, ours), (peer_name, peer) = asyncio.run(measured(case, rounds)).items()
        speed = statistics.median(ratios(ours, peer))
        more = max(ours.mebibytes) / max(peer.mebibytes)
        name = f"{case.model}, {case.optimizer}, {case.ranks} rank{'s' * (case.ranks > 1)}"
        against = f"against {peers[peer_name]}"
        yield Row(
            f"{name}: a step, {against}",
            ours.milliseconds,
            peer.milliseconds,
            "ms",
            f"speed >= 0.98 (is {speed:.3f})",
            speed >= 0.98,
        )
        if peer_name == "plain":
            memory = ours.mebibytes[-1:], peer.mebibytes[-1:]
            yield Row(f"{name}: memory of a worker", *memory, "MiB", "ratio <= 1.15", more <= 1.15)


def bits(rounds: int) -> Iterator[Row]:
    """Measure the steps of training.deterministic against others, of batches of some 256 records."""
    for model, ranks in itertools.product(("mlp-1m", "mlp-8m", "mlp-25m"), (2, 3, 4)):
        case = Steady(model, "adam", ranks, ("deterministic",), options=("--batch", str(-(-256 // ranks))))
        plain, ours = asyncio.run(measured(case, rounds)).values()
        name, goal = f"{model}, adam, {ranks} ranks: a deterministic step", "ratio <= 1.15"
        for what, unit in (("milliseconds", "ms"), ("cpu_milliseconds", "ms of CPU")):
            row = Row(f"{name}, {unit}", getattr(ours, what), getattr(plain, what), unit, goal)
            row.met = row.ratio is not None and row.ratio <= 1.15
            yield row


def ratios(ours: Side, peer: Side) -> list[float]:
    """How many times as long the peer's step took, in each round."""
    return [b / a for a, b in zip(ours.milliseconds, peer.milliseconds, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady_state")
    parser.add_argument("model", help="of benchmarks/steady.py")
    parser.add_argument("peers", nargs="+", help="plain, fit, fit-pipeline or fit-resident")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement of one side")
    parser.add_argument(
        "--goal", type=float, default=1.0, help="the least ratio of a peer's step to that of edl"
    )
    args, more = parser.parse_known_args()
    case = Steady(args.model, args.optimizer, args.ranks, tuple(args.peers), options=("--gpu", *more))
    sides = asyncio.run(measured(case, args.rounds, args.seconds))
    for name, side in sides.items():
        cpu, steps = statistics.median(side.cpu_milliseconds), f"{side.steps} steps a round"
        print(f"{name}: {spread(side.milliseconds)} ms a step, {cpu:.3g} ms of CPU, {steps}")
    ours, resident = sides.pop("edl"), sides.pop("fit-resident", None)
    if resident is not None:
        shares = (
            f"{1 / statistics.median(ratios(resident, s)):.2f} of {n}"
            for n, s in [("edl", ours), *sides.items()]
        )
        print("a step without input takes", ", ".join(shares))
    found = {name: ratios(ours, side) for name, side in sides.items()}
    print("; ".join(f"{name} takes {spread(each)} times as long as edl" for name, each in found.items()))
    missed = [name for name, each in found.items() if statistics.median(each) < args.goal]
    print(f"goal >= {args.goal:g}:", f"missed against {', '.join(missed)}" if missed else "met", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
