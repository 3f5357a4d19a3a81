# SPDX-License-Identifier: Apache-2.0
"""A parameter server against its peers: what a row costs that is pulled, and one that is pushed.

All are filled with a million rows, and then asked in turn, over and over: ours (gRPC, log, hash and SGD), a
dict of rows in the way of ElasticDL's Python server (the same bytes over the same gRPC, and no log), Redis
(MGET and MSET over a Unix socket, nothing on disk), and numpy's gather and scatter in this process, which
know where each row is, and are the limit.

pull is rows that are asked for. step is what a training step asks for: of ours, a Pull that says what became
of the step before, which is applied then, and a push, which is logged; of the others, a pull and a push
(MGET and MSET). A push is what a step costs more than a pull.

Costs are nanoseconds of CPU time of the server's process for each row, so that other load on the machine
counts less: 1000 / that is millions of rows a second and core.

memory and recovery: benchmarks/ps_recovery.py. streams and dense: benchmarks/ps_limits.py. fit, redis,
ring, servers and quality are trainings: benchmarks/ps_training.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from benchmarks import ps_limits, ps_recovery, ps_training, report
from benchmarks.memory import AtHand
from benchmarks.report import Row, say
from edl.contract.proto import ps_pb2 as pb
from edl.ps.rpc.service import OPTIONS
from edl.trainer.ps_client.multiplex import Conversation

DIMS = (8, 16, 64)
COUNTS = (1_000, 10_000, 100_000)
IDS = ("uniform", "zipf")
FILLED = 1_000_000
FILL = 50_000  # rows a push
MAX_SECONDS = 60.0
LOG_BYTES = 1 << 30  # more than is written to a log in one turn
ROWS = 300_000  # so many are asked for in one measurement, at least
GOAL, AIM = 6.0, 10.0  # millions of rows a second and core, of dim 16
DICT_GOAL, REDIS_GOAL = 5.0, 8.0


class Server(Protocol):
    """A store of rows. A request is made before it is measured."""

    name: str

    def make_pull(self, ids: np.ndarray) -> Any: ...
    def make_push(self, ids: np.ndarray, gradients: np.ndarray) -> Any: ...
    def pull(self, request: Any) -> None: ...
    def push(self, request: Any) -> None:
        """After a pull, as in a training step."""
        ...

    def cpu(self) -> float: ...


class Ours:
    """`python -m edl.ps`, called as workers do."""

    name = "edl"

    def __init__(self, pid: int, channel: grpc.Channel, dim: int):
        self._pid = pid
        self._conversation = Conversation(channel, [("authorization", "Bearer bench")])
        optimizer = json.dumps({"class_name": "SGD", "config": {"learning_rate": 0.1}})
        initializer = json.dumps({"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05}})
        table = pb.Table(name="t", dim=dim, initializer=initializer, optimizer=optimizer)
        self._call("Declare", pb.Tables(run_id="bench", tables=[table]))
        self._call("StartGeneration", pb.StartGenerationRequest(run_id="bench", generation=1, step=0))
        self._step = 0
        self._last: pb.Commit | None = None  # what became of the step before

    def _call(self, name: str, request: Any) -> Any:
        answer: Any = {"Pull": pb.Rows, "Push": pb.Progress}.get(name, pb.Position)
        return self._conversation.ask(name, request.SerializeToString(), answer.FromString).result(
            MAX_SECONDS
        )

    def make_pull(self, ids: np.ndarray) -> pb.PullRequest:
        return pb.PullRequest(run_id="bench", generation=1, ids=[pb.Ids(ids=ids.tobytes())])

    def make_push(self, ids: np.ndarray, gradients: np.ndarray) -> pb.PushRequest:
        given = pb.Gradients(ids=ids.tobytes(), values=gradients.tobytes())
        return pb.PushRequest(run_id="bench", generation=1, gradients=[given])

    def pull(self, request: pb.PullRequest) -> None:
        request.step = self._step
        if self._last is not None:
            request.last.CopyFrom(self._last)
        self._call("Pull", request)

    def push(self, request: pb.PushRequest) -> None:
        request.step = self._step
        self._call("Push", request)
        self._last = pb.Commit(step=self._step, scale=1.0, learning_rate=0.1, iteration=self._step)
        self._step += 1

    def cpu(self) -> float:
        return cpu_seconds(self._pid)


class Dict:
    """`benchmarks.peer_rows`."""

    name = "dict of rows"

    def __init__(self, pid: int, channel: grpc.Channel):
        self._pid = pid
        self._pull: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/peer/Pull")
        self._push: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/peer/Push")

    def make_pull(self, ids: np.ndarray) -> bytes:
        return ids.tobytes()

    def make_push(self, ids: np.ndarray, gradients: np.ndarray) -> bytes:
        return len(ids).to_bytes(8, "little") + ids.tobytes() + gradients.tobytes()

    def pull(self, request: bytes) -> None:
        self._pull(request, timeout=MAX_SECONDS)

    def push(self, request: bytes) -> None:
        self._push(request, timeout=MAX_SECONDS)

    def cpu(self) -> float:
        return cpu_seconds(self._pid)


class Redis:
    """A redis-server without any persistence; a push is an MSET of rows that a client has updated."""

    name = "redis"

    def __init__(self, pid: int, path: Path):
        self._pid = pid
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")

    def make_pull(self, ids: np.ndarray) -> tuple[bytes, int]:
        return _command(b"MGET", [i.tobytes() for i in ids]), len(ids)

    def make_push(self, ids: np.ndarray, gradients: np.ndarray) -> bytes:
        both = zip(ids, gradients, strict=True)
        return _command(b"MSET", [part.tobytes() for pair in both for part in pair])

    def pull(self, request: tuple[bytes, int]) -> None:
        command, count = request
        self._socket.sendall(command)
        assert self._file.readline() == b"*%d\r\n" % count
        for _ in range(count):
            size = int(self._file.readline()[1:])
            if size >= 0:
                self._file.read(size + 2)

    def push(self, request: bytes) -> None:
        self._socket.sendall(request)
        assert self._file.readline() == b"+OK\r\n"

    def cpu(self) -> float:
        return cpu_seconds(self._pid)


class Gather:
    """numpy, told where each row is."""

    name = "numpy"

    def __init__(self, dim: int):
        self._rows = np.zeros((FILLED, dim), np.float32)

    def make_pull(self, ids: np.ndarray) -> np.ndarray:
        return ids % FILLED

    def make_push(self, ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ids % FILLED, gradients

    def pull(self, request: np.ndarray) -> None:
        self._rows[request]

    def push(self, request: tuple[np.ndarray, np.ndarray]) -> None:
        at, gradients = request
        self._rows[at] -= np.float32(0.1) * gradients

    def cpu(self) -> float:
        return time.thread_time()


def _command(name: bytes, parts: list[bytes]) -> bytes:
    pieces = [b"*%d\r\n$%d\r\n%s\r\n" % (len(parts) + 1, len(name), name)]
    pieces += [b"$%d\r\n%s\r\n" % (len(part), part) for part in parts]
    return b"".join(pieces)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all live threads of a process."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def servers(dim: int) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield list(_started(dim, directory, stack))


def _started(dim: int, directory: Path, stack: contextlib.ExitStack) -> Iterator[Server]:
    def process(*command: str | Path, **more: Any) -> subprocess.Popen[str]:
        started = subprocess.Popen(list(map(str, command)), text=True, **more)
        stack.callback(started.wait)
        stack.callback(started.kill)
        return started

    def channel(address: str) -> grpc.Channel:
        opened = grpc.insecure_channel(address, options=OPTIONS)
        stack.callback(opened.close)
        return opened

    (directory / "token").write_text(ps_recovery.RUN)
    ours = process(*ps_recovery.server_command(directory))
    yield Ours(ours.pid, channel(_until(lambda: (directory / "address").read_text())), dim)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    peer = process(sys.executable, "-m", "benchmarks.peer_rows", str(dim), **pipes)
    assert peer.stdout is not None
    yield Dict(peer.pid, channel(f"127.0.0.1:{int(peer.stdout.readline())}"))
    path = directory / "redis"
    pid = stack.enter_context(ps_training.started_redis(path))
    yield _until(lambda: Redis(pid, path))
    yield Gather(dim)


def _until(attempt: Callable[[], Any]) -> Any:
    until = time.monotonic() + MAX_SECONDS
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)  # it has not begun to listen


def batches(kind: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Ids of several steps, each once in a step, as a worker asks for them."""
    found = []
    for _ in range(max(4, min(32, ROWS // count))):
        if kind == "uniform":
            ids = rng.choice(FILLED, count, replace=False)
        else:  # the frequent ones are the same in each batch
            weights = 1.0 / np.arange(1, FILLED + 1)
            ids = rng.choice(FILLED, count, replace=False, p=weights / weights.sum(), shuffle=True)
            ids = ids * 2654435761 % FILLED  # neighbours in frequency are none in memory
        found.append(ids.astype(np.int64))
    return found


def measure(only: list[str], rounds: int) -> Iterable[list[Row]]:
    if any(f"dim{dim}" in only for dim in DIMS):
        yield from measure_servers(only, rounds)
    yield from ps_recovery.measure(only, rounds)
    yield from ps_limits.measure(only, rounds)
    yield from ps_training.measure(only, rounds)


def measure_servers(only: list[str], rounds: int) -> Iterable[list[Row]]:
    for dim in (dim for dim in DIMS if f"dim{dim}" in only):
        with servers(dim) as all_of_them:
            say(f"dim {dim}: filling {', '.join(s.name for s in all_of_them)} with {FILLED:,} rows")
            rng = np.random.default_rng(dim)
            order = rng.permutation(FILLED).astype(np.int64)
            for start in range(0, FILLED, FILL):
                ids = order[start : start + FILL]
                gradients = np.ones((len(ids), dim), np.float32)
                for server in all_of_them:
                    for part in range(0, FILL, 10_000):  # Redis refuses requests of more than a million parts
                        some = slice(part, part + 10_000)
                        server.pull(server.make_pull(ids[some]))
                        server.push(server.make_push(ids[some], gradients[some]))
            for kind in IDS:
                for count in COUNTS:
                    yield _rows(all_of_them, dim, kind, batches(kind, count, rng), rounds)


def _rows(all_of_them: list[Server], dim: int, kind: str, steps: list[np.ndarray], rounds: int) -> list[Row]:
    """Measure all servers in turn, round by round, so that other load on the machine affects all of them."""
    costs: dict[tuple[str, str], list[float]] = {}
    walls: list[float] = []
    for _ in range(rounds):
        for server in all_of_them:
            pulls = [server.make_pull(ids) for ids in steps]
            pushes = [server.make_push(ids, np.ones((len(ids), dim), np.float32)) for ids in steps]
            repeats = max(1, -(-ROWS // sum(map(len, steps))))
            rows = repeats * sum(map(len, steps))
            AtHand(LOG_BYTES).give()
            both = repeats * [*zip(pulls, pushes, strict=True)]
            server.pull(pulls[0])
            before, began = server.cpu(), time.perf_counter()
            for pull, _ in both:
                server.pull(pull)
            pulled = (server.cpu() - before) / rows * 1e9
            if server.name == "edl":
                walls.append(rows / (time.perf_counter() - began) / 1e6)
            before = server.cpu()
            for pull, push in both:
                server.pull(pull)
                server.push(push)
            server.pull(pulls[0])  # the last one of ours is applied
            step = (server.cpu() - before) / rows * 1e9
            for what, cost in (("pull", pulled), ("push", step - pulled), ("step", step)):
                costs.setdefault((what, server.name), []).append(cost)
    found = []
    count = round(statistics.mean(map(len, steps)))
    for what in ("pull", "push", "step"):
        ours = costs[what, "edl"]
        speed = 1000 / statistics.median(ours)
        for server in all_of_them[1:]:
            theirs = costs[what, server.name]
            ratio = statistics.median(theirs) / statistics.median(ours)
            goal, met = "", None
            if what == "step":
                pass
            elif server.name == "dict of rows":
                goal, met = f">= {DICT_GOAL:g}x", ratio >= DICT_GOAL
            elif server.name == "redis":
                goal, met = f">= {REDIS_GOAL:g}x", ratio >= REDIS_GOAL
            name = f"{what} dim {dim}, {count:,} ids {kind}: {speed:.1f} M rows/s and core"
            name += f"; {server.name}: {ratio:.2f}x"
            found.append(Row(name, ours, theirs, "ns/row", goal, met))
        if dim == 16 and what in ("pull", "push") and count >= 9_000:
            name = f"{what} dim {dim}, {count:,} ids {kind}: {speed:.1f} M rows/s and core (aim {AIM:g})"
            if what == "pull":
                name += f", {statistics.median(walls):.1f} M rows/s over the wire"
            found.append(Row(name, ours, [], "ns/row", f">= {GOAL:g} M rows/s", speed >= GOAL))
    return found


def main() -> int:
    parts = [*(f"dim{dim}" for dim in DIMS), *ps_recovery.PARTS, *ps_limits.PARTS, *ps_training.PARTS]
    return report.main("scripts/bench ps", __doc__, parts, measure)


if __name__ == "__main__":
    sys.exit(main())
