# SPDX-License-Identifier: Apache-2.0
"""Calls whose callers go away, at random points, many of each: the server answers afterwards, and what it has
is what a server has that was called without any of that.

EDL_CANCELLED_CALLS is the number of calls of each kind: 100 in CI. 10,000 of all servers' calls by hand, for
which pytest's limit of time is switched off:

    EDL_CANCELLED_CALLS=10000 pytest -o timeout=0 tests/unit/ps/test_calls_that_end.py
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edl.checkpoints import CheckpointFile
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import bucket_of
from edl.contract.rows.placement import ShardAssignment
from edl.ps.rpc import service as calls_of_ps
from edl.ps.rpc.service import OPTIONS, Service
from edl.ps.server import ParameterServer
from edl.ps.storage import storage
from tests.support.models import counting_steps as counting
from tests.support.ps.cancelled_storms import AT_ONCE, SECONDS, Node, storm
from tests.support.ps.requests import RUN, batch, commit, pull, stage, start_generation, tables
from tests.support.ps.server_states import commit_manifest

pytestmark = pytest.mark.waits
MAX_STEPS = 64  # in any order, before they begin anew
ALL = {method.name for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods}
ASYNC_CALLS = {"Lease", "Drain", "Reschedule", "Keep"}
ONE, TWO = ShardAssignment(1), ShardAssignment(2)


@pytest.fixture(autouse=True)
def everything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for the other thread, and a snapshot is due again and again."""
    monkeypatch.setattr(calls_of_ps, "SMALL", 0)
    monkeypatch.setattr(storage, "SNAPSHOT_TIMES", 0)


@pytest.fixture
def dice() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
async def nodes(tmp_path: Path, dice: random.Random) -> AsyncIterator[list[Node]]:
    found = [Node(index, tmp_path, dice) for index in range(2)]
    for node in found:
        await node.start()
    yield found
    for node in found:
        await node.close()


# --- steps of a ring


class Ring:
    """A worker, its servers, and a server beside them that is called directly."""

    def __init__(self, nodes: list[Node], directory: Path):
        self.nodes, self._directory = nodes, directory
        self.one, self.other = nodes
        self.generation, self.step, self._attempts, self._lives = 0, 0, 0, 0
        self.last: pb.Commit | None = None
        self.ids = np.unique(np.concatenate([np.concatenate([b[0] for b in batch(s, 0)]) for s in range(4)]))

    async def begin(self) -> None:
        self._lives += 1
        where = self._directory / f"straight-{self._lives}"
        self.straight = ParameterServer(0, 1, RUN, where, str(self._directory / "checkpoints"))
        self.straight.declare(tables())
        for node in self.nodes:
            await node("Declare", tables())
        self.step, self.last = 0, None
        await self.start_generation()

    async def start_generation(self) -> None:
        self.generation += 1
        request = start_generation(self.generation, self.step, self.last)
        request.assignment.CopyFrom(ONE.to_proto())
        await self.one("StartGeneration", request)
        self.straight.mode.start_generation(start_generation(self.generation, self.step, self.last))

    def to(self, name: str, number: int) -> Node:
        return self.nodes[number % 2 if name == "Assign" else int(name == "Fetch")]

    def _part(self) -> pb.WritePartRequest:
        self._attempts += 1
        return pb.WritePartRequest(
            run_id=RUN,
            generation=self.generation,
            step=self.step,
            last=self.last,
            attempt=f"a{self._attempts}",
            index=0,
            of=1,
        )

    def _fetch(self, of: ShardAssignment, to: ShardAssignment) -> pb.FetchRequest:
        return pb.FetchRequest(
            run_id=RUN,
            generation=self.generation,
            step=self.step,
            last=self.last,
            of=of.to_proto(),
            to=to.to_proto(),
            addresses=[node.address for node in self.nodes],
        )

    def _arrange(self, to: ShardAssignment) -> pb.AssignRequest:
        return pb.AssignRequest(
            run_id=RUN, generation=self.generation, step=self.step, last=self.last, to=to.to_proto()
        )

    async def requests(self, name: str) -> list[Any]:
        g, step, many = self.generation, self.step, range(AT_ONCE)
        match name:
            case "Declare":
                return [tables() for _ in many]
            case "StartGeneration":
                self.generation += AT_ONCE
                return [start_generation(g + i, step, self.last) for i in many]
            case "Restore":
                self.generation += AT_ONCE
                return [pb.RestoreRequest(run_id=RUN, generation=g + 1 + i) for i in many]
            case "Begin":
                await self.restore()
                return [self._load(i, self.generation + i % 2) for i in many]
            case "Pull":
                for rank in (0, 1):
                    await self.one("Push", stage(g, step, rank))
                takes, waits = pull(g, step + 1, self.ids, commit(step)), pull(g + 1, step, self.ids)
                return [(takes, waits)[i % 2] for i in many]
            case "List":
                last, more = self.last, 1 + AT_ONCE
                return [
                    pb.ListRequest(
                        run_id=RUN, generation=g + i % 2, step=step, last=last, table=i % 2, most=more
                    )
                    for i in many
                ]
            case "Push":
                return [stage(g + i % 2, step, i % 4 // 2) for i in many]
            case "WritePart":
                return [self._part() for _ in many]
            case "Committed":
                return [await self._committed() for _ in many]
            case "Page":
                of, to = ONE.to_proto(), TWO.to_proto()
                return [
                    pb.PageRequest(
                        run_id=RUN, generation=g, step=step, table=i % 2, most=600, index=1, of=of, to=to
                    )
                    for i in many
                ]
            case "Fetch":
                return [self._fetch(ONE, TWO) for _ in many]
            case "Assign":
                await self.other("Fetch", self._fetch(ONE, TWO))
                return [self._arrange(TWO) for _ in many]
            case "End":
                return [pb.EndRequest(run_id=RUN) for _ in many]
            case "Converse":
                return [
                    ("Push", stage(g, step, 0)),
                    ("Pull", pull(g, step, self.ids)),
                    ("Pull", pull(g + 1, step, self.ids)),
                    ("Describe", pb.DescribeRequest()),
                    ("StartGeneration", start_generation(g, step, self.last)),
                    ("Declare", tables()),
                ]
        return [getattr(pb, f"{name}Request")() for _ in many]

    def _load(self, number: int, generation: int) -> pb.BeginRequest:
        ids = np.arange(1000 * (number + 1), 1000 * (number + 1) + 20)
        values = counting.gradients(0, ids, np.full((len(ids), 4), number))
        return pb.BeginRequest(run_id=RUN, generation=generation, values=[values])

    async def _committed(self) -> pb.CommittedRequest:
        request = self._part()
        written = await self.one("WritePart", request)
        part = CheckpointFile(written.name, written.nbytes, written.sha256.hex())
        commit_manifest(self.straight, self.step, request.attempt, [part])
        return pb.CommittedRequest(run_id=RUN, step=self.step, attempt=request.attempt)

    async def restore(self) -> None:
        self.generation += 1
        request = pb.RestoreRequest(run_id=RUN, generation=self.generation)
        await self.one("Restore", request)
        self.straight.mode.restore(request)
        self.step, self.last = 0, None

    async def meanwhile(self, name: str) -> None:
        """Calls of the next generation wait for this."""
        if name in ("Begin", "Pull", "List", "Push"):
            await self.start_generation()

    async def mend(self, name: str) -> None:
        """Have a worker do, and be answered, what was cancelled or not."""
        match name:
            case "StartGeneration":
                await self.start_generation()
            case "Restore":
                await self.restore()
            case "Begin":
                for number in range(AT_ONCE):
                    request = self._load(number, self.generation)
                    await self.one("Begin", request)
                    self.straight.mode.begin(request.SerializeToString())
            case "Fetch":
                await self.other("Fetch", self._fetch(ONE, TWO))
                await self._move()
            case "Assign":
                await self._move()
            case "End":
                await self.one("End", pb.EndRequest(run_id=RUN))
                await self.begin()

    async def _move(self) -> None:
        """To two servers and back to one. One of the two fetches nothing."""
        for node in self.nodes:
            await node("Assign", self._arrange(TWO))
        await self._check_rows(TWO)
        await self.one("Fetch", self._fetch(TWO, ONE))
        for node in self.nodes:
            await node("Assign", self._arrange(ONE))

    async def check(self) -> None:
        """It takes a step, as the other one does."""
        description = await self.one("Describe", pb.DescribeRequest())
        assert description.position.step in (self.step, self.step + 1)
        for rank in (0, 1):
            request = stage(self.generation, self.step, rank)
            await self.one("Push", request)
            self.straight.mode.push(request.SerializeToString())
        self.last = commit(self.step)
        self.step += 1
        self.straight.pull(pull(self.generation, self.step, (), self.last))
        await self._check_rows(ONE)

    async def _check_rows(self, of: ShardAssignment) -> None:
        request = pull(self.generation, self.step, self.ids, self.last)
        expected = [rows.copy() for rows in self.straight.pull(request)]
        whose = of.first[bucket_of(self.ids)]
        for index in range(of.servers):
            mine = self.ids[whose == index]
            rows = (await self.nodes[index]("Pull", pull(self.generation, self.step, mine, self.last))).rows
            for found, wanted in zip(rows, expected, strict=True):
                wanted = wanted.reshape(len(self.ids), -1)[whose == index]
                np.testing.assert_array_equal(np.frombuffer(found, np.float32), wanted.reshape(-1))


async def test_a_server_of_a_ring_answers_whichever_calls_end_early(
    nodes: list[Node], dice: random.Random, tmp_path: Path
) -> None:
    ring = Ring(nodes, tmp_path)
    await ring.begin()
    await storm(ALL - ASYNC_CALLS, ring, nodes, dice)


# --- steps in any order


class InAnyOrder:
    """Workers whose steps come in any order, and a server whose rows count them."""

    def __init__(self, nodes: list[Node], _: Path):
        [self.one, _other] = nodes
        self._generation, self._kept, self._attempts = 0, 0, 0
        self._made: set[int] = set()

    async def begin(self) -> None:
        await self.one("Declare", counting.tables())
        self.incarnation, self._made = (await self.one("Begin", self._begin())).incarnation, set()

    def _begin(self) -> pb.BeginRequest:
        request = counting.begin(MAX_STEPS)
        request.assignment.CopyFrom(ONE.to_proto())
        return request

    def to(self, name: str, number: int) -> Node:
        return self.one

    async def _anew(self) -> None:
        self._generation += 1
        await self.one("Restore", pb.RestoreRequest(run_id=RUN, generation=self._generation))

    async def requests(self, name: str) -> list[Any]:
        asked, many = {"run_id": RUN, "incarnation": self.incarnation}, range(AT_ONCE)
        match name:
            case "Begin":
                await self._anew()
                return [self._begin() for _ in many]
            case "Lease":
                return [pb.LeaseRequest(worker=i, most=2, limit=MAX_STEPS, **asked) for i in many]
            case "Push":
                return [self._push(i % MAX_STEPS) for i in many]
            case "Drain":
                return [pb.DrainRequest(step=0, **asked) for _ in many]
            case "Reschedule":
                return [pb.RescheduleRequest(steps=pb.Steps(bounds=[i, i + 1]), **asked) for i in many]
            case "Keep":
                self._kept += AT_ONCE
                return [pb.KeepRequest(order=self._kept + i, ledger=b"ledger", **asked) for i in many]
            case "Pull":
                return [counting.pull(MAX_STEPS) for _ in many]
            case "WritePart":
                self._attempts += AT_ONCE
                names = [f"a{self._attempts + i}" for i in many]
                return [pb.WritePartRequest(run_id=RUN, attempt=name, of=1) for name in names]
        push = self._push(0)
        return [("Push", push), ("Push", self._push(1)), ("Describe", pb.DescribeRequest(kept=True))]

    def _push(self, step: int) -> pb.PushRequest:
        return counting.push(self.incarnation, step, MAX_STEPS)

    async def meanwhile(self, name: str) -> None:
        """A step is taken."""
        if name == "WritePart":
            await self._take(max(self._made, default=0) + 1)

    async def _take(self, step: int) -> None:
        if step >= MAX_STEPS:
            await self._anew()
            await self.begin()
            step = 0
        await self.one("Push", self._push(step))
        self._made.add(step)

    async def mend(self, name: str) -> None:
        match name:
            case "Begin":
                await self.begin()
            case "Push" | "Converse":
                for step in range(min(AT_ONCE, MAX_STEPS) if name == "Push" else 2):
                    await self._take(step)
        self.incarnation = (await self.one("Describe", pb.DescribeRequest())).incarnation

    async def check(self) -> None:
        """Each step counts once."""
        await self._take(max(self._made, default=0) + 1)
        answer = await self.one("Pull", counting.pull(MAX_STEPS))
        dense, rows = counting.counts(MAX_STEPS, [answer.rows])
        expected = np.isin(np.arange(MAX_STEPS), list(self._made)).astype(np.float32)
        np.testing.assert_array_equal(dense, expected)
        np.testing.assert_array_equal(rows.reshape(MAX_STEPS, -1)[:, 0], expected)


async def test_an_async_server_answers_whichever_calls_end_early(
    nodes: list[Node], dice: random.Random, tmp_path: Path
) -> None:
    workers = InAnyOrder(nodes, tmp_path)
    await workers.begin()
    await storm(ASYNC_CALLS | {"Begin", "Push", "Converse", "Pull", "WritePart"}, workers, nodes, dice)


# --- callers that say nothing more

CALL = """
import sys
import grpc
pull = grpc.insecure_channel(sys.argv[1]).unary_unary("/edl.ParameterServer/Pull")
pull(bytes.fromhex(sys.argv[2]))
"""


class Watching(grpc.aio.ServerInterceptor):
    """Says when a call begins, and when it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)

        async def answer(request: Any, context: Any) -> Any:
            self.begun.set()
            try:
                return await handler.unary_unary(request, context)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        return grpc.unary_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )


async def test_a_call_whose_caller_is_stopped_ends(tmp_path: Path) -> None:
    rows, watching = ParameterServer(0, 0, RUN, tmp_path / "log", ""), Watching()
    rows.declare(tables())
    rows.mode.start_generation(start_generation(1, 0, None))
    service, waits = Service(rows), pull(2, 0, np.arange(4))
    sooner = [(name, 500 if "keepalive" in name else value) for name, value in OPTIONS]
    assert sooner != OPTIONS
    server = grpc.aio.server(interceptors=[watching], options=[*sooner, ("grpc.http2.ping_timeout_ms", 500)])
    service.register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALL, address, waits.SerializeToString().hex()
    )
    try:
        await asyncio.wait_for(watching.begun.wait(), SECONDS)
        caller.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(watching.cancelled.wait(), SECONDS)
    finally:
        caller.kill()
        await caller.wait()
        await server.stop(0)
        await service.close()
