# SPDX-License-Identifier: Apache-2.0
"""A server's calls over gRPC: which callers are admitted, what waits, what is refused and in which words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edl.checkpoints import CheckpointError, CheckpointFile, files
from edl.contract import hangs
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.contract.tokens import Tokens, for_reading
from edl.master.parameter_servers.base import end
from edl.net.listener import Listener
from edl.ps.rpc.service import OPTIONS, READING, Service
from edl.ps.server import ParameterServer
from edl.ps.storage.capture import Capture
from tests.support.models import counting_steps as counting
from tests.support.ps.requests import RUN, commit, pull, stage, start_generation, tables

pytestmark = pytest.mark.waits
SECONDS = 60.0  # for what must happen


class Caller:
    """A worker's side of one server."""

    def __init__(self, port: int, token: str = "token"):
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        self._stub = ps_pb2_grpc.ParameterServerStub(self._channel)
        self._metadata = [("authorization", f"Bearer {token}")]

    async def __call__(self, call: str, request: Any, seconds: float = SECONDS) -> Any:
        return await getattr(self._stub, call)(request, metadata=self._metadata, timeout=seconds)

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    service = Service(
        ParameterServer(0, 1, RUN, tmp_path / "log", str(tmp_path / "checkpoints"), memory_limit=1 << 20)
    )
    listener = Listener(Tokens("token"), options=OPTIONS)
    yield await listener.start("127.0.0.1:0", service.register)
    await listener.close(0)
    await service.close()


@pytest.fixture
async def call(port: int) -> AsyncIterator[Caller]:
    caller = Caller(port)
    yield caller
    await caller.close()


async def refused(call: Caller, name: str, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(name, request)
    return error.value.code(), error.value.details() or ""


async def test_a_step_of_two_workers(call: Caller, port: int) -> None:
    other = Caller(port)
    assert (await call("Declare", tables())).empty
    assert (await other("Declare", tables())).empty
    assert not (await call("StartGeneration", start_generation(1, 0))).empty
    ids = np.array([5, -3, 2**62])
    first = await call("Pull", pull(1, 0, ids))
    assert [len(rows) for rows in first.rows] == [3 * 4 * 4, 3 * 2 * 4]
    await asyncio.gather(call("Push", stage(1, 0, 0)), other("Push", stage(1, 0, 1)))
    assert (await other("Pull", pull(1, 0, ids))) == first, "nothing is in the rows yet"
    touched = np.frombuffer(stage(1, 0, 0).gradients[0].ids, np.int64)
    before = await call("Pull", pull(1, 0, touched))
    after = await call("Pull", pull(1, 1, touched, commit(0)))
    assert all(a != b for a, b in zip(before.rows, after.rows, strict=True))
    description = await call("Describe", pb.DescribeRequest())
    assert description.position.step == 1 and description.memory_limit == 1 << 20
    assert [table.name for table in description.tables] == ["user", "item"]
    assert description.tables[0].rows > 0 and description.memory > 0 and description.log_bytes > 0
    assert description.busy_seconds > 0 and description.rows_pulled > 0 and description.rows_staged > 0
    await other.close()


async def test_without_the_jobs_token_nothing_is_answered(port: int) -> None:
    stranger = Caller(port, "wrong")
    for name, request in (("Pull", pull(1, 0)), ("Push", stage(1, 0)), ("Describe", pb.DescribeRequest())):
        assert (await refused(stranger, name, request))[0] == grpc.StatusCode.UNAUTHENTICATED
    await stranger.close()


async def test_a_call_before_its_generation_has_started_waits_for_it(call: Caller) -> None:
    await call("Declare", tables())
    waiting = [
        asyncio.ensure_future(call("Pull", pull(1, 0, [1]))),
        asyncio.ensure_future(call("Push", stage(1, 0))),
        asyncio.ensure_future(call("Pull", pull(2, 0, [1]))),
    ]
    await call("Describe", pb.DescribeRequest())
    assert not any(one.done() for one in waiting)
    await call("StartGeneration", start_generation(1, 0))
    assert (await waiting[0]).rows and (await waiting[1]).incarnation == "run/1/0/"
    await call("Describe", pb.DescribeRequest())
    assert not waiting[2].done()
    await call("StartGeneration", start_generation(2, 0))
    assert (await waiting[2]).rows


async def test_each_refusal_has_its_status_and_says_what_is_expected(call: Caller) -> None:
    code, text = await refused(call, "Pull", pull(1, 0))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "no tables are declared" in text
    await call("Declare", tables())
    await call("StartGeneration", start_generation(2, 0))
    code, text = await refused(call, "Push", stage(1, 0))
    assert code == grpc.StatusCode.ABORTED and "generation 2 has started" in text
    code, text = await refused(call, "Pull", pull(2, 5, last=commit(4)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "step 5" in text and "at step 0" in text
    bad = pb.Tables(run_id=RUN, seed=7, tables=[pb.Table(name="x", dim=0)])
    assert (await refused(call, "Declare", bad))[0] == grpc.StatusCode.FAILED_PRECONDITION
    code, text = await refused(call, "Pull", pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=9)]))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "table 9" in text
    ids = np.arange(50_000)
    large = pb.PushRequest(
        run_id=RUN,
        generation=2,
        step=0,
        gradients=[pb.Gradients(table=1, ids=ids.tobytes(), values=bytes(8 * len(ids)))],
    )
    code, text = await refused(call, "Push", large)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "ps.servers" in text and "ps.resources" in text
    assert (await call("Push", stage(2, 0))).step == 0, "it goes on"


async def test_a_reader_of_no_generation_sees_what_is_there_now(call: Caller) -> None:
    await call("Declare", tables())
    code, text = await refused(call, "Pull", pull(0, 0, [1, 2]))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "has no rows yet" in text
    await call("StartGeneration", start_generation(1, 0))
    initial = await call("Pull", pull(0, 0, [1, 2]))
    await call("Push", stage(1, 0))
    await call("Pull", pull(1, 1, last=commit(0)))
    touched = np.frombuffer(stage(1, 0).gradients[0].ids, np.int64)
    assert (await call("Pull", pull(0, 0, touched))) == await call("Pull", pull(1, 1, touched))
    assert len(initial.rows) == 2


async def test_a_part_of_a_checkpoint_is_of_the_step_that_was_asked_for(call: Caller, tmp_path: Path) -> None:
    await call("Declare", tables())
    await call("StartGeneration", start_generation(1, 0))
    await call("Push", stage(1, 0))
    request = pb.WritePartRequest(
        run_id=RUN, generation=1, step=1, last=commit(0), attempt="a", index=2, of=3
    )
    written, _ = await asyncio.gather(call("WritePart", request), call("Push", stage(1, 1)))
    assert not written.why and written.name.startswith("part-00002-of-00003")
    found = next((tmp_path / "checkpoints").glob(f"*/{written.name}"))
    assert found.stat().st_size == written.nbytes and len(written.sha256) == 32
    position = await call("Committed", pb.CommittedRequest(run_id=RUN, step=1, attempt="a"))
    assert position.step == 1
    assert (await call("Pull", pull(1, 2, last=commit(1)))).rows == [b"", b""]


async def test_tables_are_copied_while_the_store_of_checkpoints_hangs(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[Capture] = []
    goes_on, capture = threading.Event(), ParameterServer.capture

    def captured(server: ParameterServer, request: pb.WritePartRequest) -> Capture:
        captures.append(capture(server, request))
        return captures[-1]

    def hangs(server: ParameterServer, capture: Capture, request: pb.WritePartRequest) -> CheckpointFile:
        goes_on.wait(SECONDS)
        raise CheckpointError("the store has answered too late")

    monkeypatch.setattr(ParameterServer, "capture", captured)
    monkeypatch.setattr(ParameterServer, "write", hangs)
    await call("Declare", tables())
    await call("StartGeneration", start_generation(1, 0))
    asked = (pb.WritePartRequest(run_id=RUN, generation=1, attempt=name, of=1) for name in "abc")
    writing = [asyncio.ensure_future(call("WritePart", request)) for request in asked]
    async with asyncio.timeout(SECONDS):
        while len(captures) < len(writing) or not all(capture.is_copied for capture in captures):
            await asyncio.sleep(0.01)
    goes_on.set()
    assert {part.why for part in await asyncio.gather(*writing)} == {"the store has answered too late"}


async def test_a_part_whose_store_hangs_is_answered_in_words_and_the_server_goes_on(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has no deadline: a large shard may take hours, as long as its writer makes progress."""
    answers = threading.Event()
    monkeypatch.setattr(files, "_write_past_cache", lambda descriptor, pieces: answers.wait())
    monkeypatch.setattr(hangs, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hangs, "END_SECONDS", 0.1)
    await call("Declare", tables())
    await call("StartGeneration", start_generation(1, 0))
    for why in "no answer for", "an earlier call still has no answer":
        request = pb.WritePartRequest(run_id=RUN, generation=1, attempt="a", of=1)
        assert why in (await call("WritePart", request)).why
    await call("Push", stage(1, 0))
    await call("Pull", pull(1, 1, last=commit(0)))
    answers.set()


async def test_a_server_that_has_lost_its_log_refuses_to_write_a_part_at_once(call: Caller) -> None:
    await call("Declare", tables())  # as a ring does that is formed again, and died of something else
    request = pb.WritePartRequest(run_id=RUN, generation=1, step=0, attempt="a", index=0, of=1)
    with pytest.raises(grpc.aio.AioRpcError, match="the server has lost its log"):
        await call("WritePart", request)


async def test_a_part_that_cannot_be_written_says_why_and_the_server_goes_on(
    call: Caller, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    await call("Declare", tables())
    await call("StartGeneration", start_generation(1, 0))
    request = pb.WritePartRequest(run_id=RUN, generation=1, step=0, attempt="a", index=0, of=1)
    assert "checkpoints" in (await call("WritePart", request)).why
    await call("Push", stage(1, 0))
    await call("Pull", pull(1, 1, last=commit(0)))


async def test_a_run_that_has_ended_leaves_nothing_and_another_one_may_come(tmp_path: Path) -> None:
    def of_run(run_id: str) -> ParameterServer:
        return ParameterServer(0, 1, run_id, tmp_path / "log")

    service, listener = Service(of_run(RUN), of_run), Listener(Tokens("token"), options=OPTIONS)
    caller = Caller(port := await listener.start("127.0.0.1:0", service.register))
    try:
        await caller("Declare", tables())
        await caller("StartGeneration", start_generation(1, 0))
        await caller("Push", stage(1, 0))
        await caller("Pull", pull(1, 1, last=commit(0)))
        full = await caller("Describe", pb.DescribeRequest())
        await caller("End", pb.EndRequest(run_id="another"))
        again = await caller("Describe", pb.DescribeRequest())
        assert (again.position, again.tables) == (full.position, full.tables), (
            "another run's end is not its own"
        )
        await end([f"127.0.0.1:{port}"], lambda: "token", RUN)
        empty = await caller("Describe", pb.DescribeRequest())
        assert (empty.memory, empty.run_id, len(empty.tables)) == (0, "", 0) and empty.position.empty
        assert empty.log_bytes < full.log_bytes
        status, text = await refused(caller, "Pull", pull(1, 1))
        assert status is grpc.StatusCode.FAILED_PRECONDITION, text
        await caller("End", pb.EndRequest(run_id=RUN))  # a master that comes later says it again
        await caller("Declare", tables())
        assert (await caller("StartGeneration", start_generation(1, 0))).step == 0
    finally:
        await caller.close()
        await listener.close(0)
        await service.close()


# --- steps in any order


async def test_an_asynchronous_step_from_the_initial_values_to_the_drain(call: Caller) -> None:
    steps = 16
    assert (await call("Declare", counting.tables())).empty
    began = await call("Begin", counting.begin(steps))
    assert (began.version, began.step, began.empty) == (0, 0, False)
    take = pb.LeaseRequest(run_id=RUN, incarnation=began.incarnation, worker=1, most=steps, limit=steps)
    assert (await call("Lease", take)).steps.bounds == [0, steps]
    pushes = [counting.push(began.incarnation, step, steps) for step in reversed(range(steps))]
    await asyncio.gather(*(call("Push", one) for one in (*pushes, *pushes)))
    ended = await call("Drain", pb.DrainRequest(run_id=RUN, incarnation=began.incarnation, step=steps))
    assert (ended.version, ended.step, ended.accepted, ended.repeated) == (steps, steps, steps, steps)
    rows = await call("Pull", counting.pull(steps))
    assert rows.version == steps
    dense, ids = counting.counts(steps, [rows.rows])
    assert (dense == 1).all() and (ids == 1).all()
    keep = pb.KeepRequest(run_id=RUN, incarnation=began.incarnation, step=steps, order=1, ledger=b"ledger")
    assert (await call("Keep", keep)).records == 0
    keep.repeated = steps
    assert (await call("Describe", pb.DescribeRequest(kept=True))).kept == keep
    assert not (await call("Describe", pb.DescribeRequest())).HasField("kept")
    reschedule = pb.RescheduleRequest(
        run_id=RUN, incarnation=began.incarnation, steps=pb.Steps(bounds=[3, 5])
    )
    assert (await call("Reschedule", reschedule)).step == 3
    description = await call("Describe", pb.DescribeRequest())
    assert description.accepted.bounds == [0, steps] and description.rescheduled.bounds == [3, 5]
    assert description.incarnation != began.incarnation
    page = await call("List", pb.ListRequest(run_id=RUN, table=1, most=5, since=steps - 1))
    assert len(page.ids) == 3 * 8, "what the last update has changed"


async def test_refused_asynchronous_calls_have_their_statuses(port: int, call: Caller) -> None:
    push = counting.push("other", 0, 8)
    code, text = await refused(call, "Push", push)
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "no tables are declared" in text
    await call("Declare", counting.tables())
    code, text = await refused(call, "Push", push)
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "has no rows" in text
    await call("Begin", counting.begin(8))
    code, text = await refused(call, "Push", push)
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "'other'" in text
    code, text = await refused(call, "Push", stage(1, 0))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "mode=hybrid" in text
    incarnation = (await call("Describe", pb.DescribeRequest())).incarnation
    code, text = await refused(
        call, "Push", counting.push(incarnation, 0, 8, gradients=[pb.Gradients(table=5)])
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "table 5" in text
    ids = np.arange(50_000)
    large = [counting.gradients(1, ids, np.zeros((len(ids), 1)))]
    code, text = await refused(call, "Push", counting.push(incarnation, 0, 8, gradients=large))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "ps.servers" in text
    assert (await call("Push", counting.push(incarnation, 0, 8))).accepted == 1, "it goes on"


async def test_the_token_for_reading_is_enough_for_rows_and_not_for_steps(tmp_path: Path) -> None:
    service = Service(ParameterServer(0, 1, RUN, tmp_path / "log"))
    listener = Listener(Tokens("token"), options=OPTIONS, reading=READING)
    port = await listener.start("127.0.0.1:0", service.register)
    job, reader = Caller(port), Caller(port, for_reading("token"))
    await job("Declare", counting.tables())
    incarnation = (await job("Begin", counting.begin(8))).incarnation
    assert (await reader("Pull", counting.pull(8))).rows
    for name, request in (
        ("Begin", counting.begin(8)),
        ("Lease", pb.LeaseRequest(run_id=RUN, incarnation=incarnation, most=1, limit=8)),
        ("Push", counting.push(incarnation, 0, 8)),
        ("Drain", pb.DrainRequest(run_id=RUN, incarnation=incarnation)),
        ("Reschedule", pb.RescheduleRequest(run_id=RUN, incarnation=incarnation)),
        ("Keep", pb.KeepRequest(run_id=RUN, incarnation=incarnation)),
        ("Describe", pb.DescribeRequest(kept=True)),
    ):
        assert (await refused(reader, name, request))[0] == grpc.StatusCode.PERMISSION_DENIED, name
    for caller in (job, reader):
        await caller.close()
    await listener.close(0)
    await service.close()


# --- calls over one stream


class Talker:
    """A worker's side of one server, over one stream."""

    def __init__(self, port: int, token: str = "token"):
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        stub = ps_pb2_grpc.ParameterServerStub(self._channel)
        self.stream = stub.Converse(metadata=[("authorization", f"Bearer {token}")])

    async def ask(self, number: int, method: str, request: Any = b"") -> None:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        await self.stream.write(pb.Ask(number=number, method=method, request=raw))

    async def answer(self) -> pb.Answer:
        found: Any = await asyncio.wait_for(self.stream.read(), SECONDS)
        assert isinstance(found, pb.Answer), found
        return found

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def talker(port: int) -> AsyncIterator[Talker]:
    talker = Talker(port)
    yield talker
    await talker.close()


async def test_over_a_stream_a_call_is_answered_as_by_itself(call: Caller, talker: Talker) -> None:
    await call("Declare", tables())
    await call("StartGeneration", start_generation(1, 0))
    await talker.ask(7, "Pull", pull(1, 0, [5, -3]))
    answer = await talker.answer()
    assert (answer.number, answer.code) == (7, 0)
    assert pb.Rows.FromString(answer.answer) == await call("Pull", pull(1, 0, [5, -3]))
    await talker.ask(8, "Push", stage(1, 0))
    assert pb.Progress.FromString((await talker.answer()).answer).incarnation == "run/1/0/"


async def test_over_a_stream_who_waits_for_a_generation_does_not_make_others_wait(
    call: Caller, talker: Talker
) -> None:
    await call("Declare", tables())
    await talker.ask(1, "Pull", pull(1, 0, [1]))
    await talker.ask(2, "Describe", pb.DescribeRequest())
    assert (await talker.answer()).number == 2
    await talker.ask(3, "StartGeneration", start_generation(1, 0))
    assert sorted([(await talker.answer()).number, (await talker.answer()).number]) == [1, 3]


async def test_over_a_stream_a_refusal_has_its_status_and_words_and_the_stream_goes_on(
    call: Caller, talker: Talker
) -> None:
    await call("Declare", tables())
    await call("StartGeneration", start_generation(2, 0))
    await talker.ask(1, "Pull", pull(1, 0, [1]))
    refused = await talker.answer()
    assert refused.code == grpc.StatusCode.ABORTED.value[0] and "stale generation" in refused.why
    await talker.ask(2, "WritePart", pb.WritePartRequest())
    assert (await talker.answer()).code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    await talker.ask(3, "Pull", b"no message")
    assert (await talker.answer()).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    await talker.ask(4, "Pull", pull(2, 0, [1]))
    assert (await talker.answer()).code == 0


async def test_a_stream_needs_the_jobs_token(port: int) -> None:
    stranger = Talker(port, "wrong")
    assert await stranger.stream.code() == grpc.StatusCode.UNAUTHENTICATED
    await stranger.close()


async def test_a_server_that_is_to_end_answers_what_it_can_and_ends_the_streams(tmp_path: Path) -> None:
    service = Service(ParameterServer(0, 1, RUN, tmp_path / "another"))
    listener = Listener(Tokens("token"), options=OPTIONS)
    talker = Talker(await listener.start("127.0.0.1:0", service.register))
    await talker.ask(1, "Describe", pb.DescribeRequest())
    await talker.answer()
    await service.end_conversations(SECONDS)
    await asyncio.wait_for(listener.close(SECONDS), SECONDS / 2)
    assert await asyncio.wait_for(talker.stream.read(), SECONDS) is grpc.aio.EOF
    await service.close()
    await talker.close()
