# SPDX-License-Identifier: Apache-2.0
"""Rows are read while a job trains, from servers that listen: what is read, and with which token."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from edl.cli.app import app
from edl.contract import artifacts
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.contract.rows.buckets import server_of
from edl.contract.rows.placement import ShardAssignment
from edl.contract.tokens import Tokens, for_reading
from edl.errors import EdlError
from edl.net.listener import Listener
from edl.ps.rpc.service import OPTIONS, READING, Service
from edl.ps.server import ParameterServer
from edl.rows.client import Changed, Client, text_ids
from tests.support.ps.requests import RUN, SGD, UNIFORM, commit, start_generation, tables

pytestmark = pytest.mark.waits
SECONDS = 60.0  # for what must happen
T = TypeVar("T")
DIM = 4
COUNTS = tables(
    pb.Table(name="first", dim=1, initializer=UNIFORM, optimizer=SGD),
    pb.Table(name="words", dim=DIM, initializer=UNIFORM, optimizer=SGD),
)


class Job:
    """Servers that listen, and the one worker: a step adds 0.05 to each value of some rows."""

    def __init__(self, folder: Path, servers: int, replicas: int = 1):
        self.of = ShardAssignment(servers, replicas)
        self._services = [
            Service(
                ParameterServer(index, servers, RUN, folder / f"log-{index}", str(folder / "checkpoints"))
            )
            for index in range(servers)
        ]
        self._listeners = [
            Listener(Tokens("token"), options=OPTIONS, reading=READING) for _ in range(servers)
        ]
        self._channels: list[grpc.aio.Channel] = []
        self.addresses: list[str] = []
        self.step = 0
        self.generation = 1

    async def start(self) -> None:
        for service, listener in zip(self._services, self._listeners, strict=True):
            port = await listener.start("127.0.0.1:0", service.register)
            self.addresses.append(f"127.0.0.1:{port}")
            self._channels.append(grpc.aio.insecure_channel(self.addresses[-1], options=OPTIONS))

    async def ask(self, index: int, call: str, request: Any, token: str = "token") -> Any:
        stub = ps_pb2_grpc.ParameterServerStub(self._channels[index])
        metadata = [("authorization", f"Bearer {token}")]
        return await getattr(stub, call)(request, metadata=metadata, timeout=SECONDS)

    async def all(self, call: str, request: Any) -> None:
        for index in self.of.members:
            await self.ask(index, call, request)

    async def begin(self) -> None:
        await self.all("Declare", COUNTS)
        request = start_generation(1, 0)
        request.assignment.CopyFrom(self.of.to_proto())
        await self.all("StartGeneration", request)

    async def goes_on_without(self, index: int) -> None:
        """The ring does, as it does when a server is away whose rows others have."""
        self.of, self.generation = self.of.without((index,)), self.generation + 1
        request = start_generation(self.generation, self.step, commit(self.step - 1))
        request.assignment.CopyFrom(self.of.to_proto())
        await self.all("StartGeneration", request)

    async def learn(self, ids: Any, gradient: float = -1) -> None:
        """Take a step that has these ids of the table `words`."""
        for index in self.of.members:
            own = np.asarray(ids, np.int64)
            own = own[self.of.has(index, own)]
            # By the scale and the learning rate of `commit`.
            values = np.full((len(own), DIM), gradient, np.float32)
            gradients = pb.Gradients(table=1, ids=own.tobytes(), values=values.tobytes())
            request = pb.PushRequest(
                run_id=RUN, generation=self.generation, step=self.step, rank=0, gradients=[gradients]
            )
            await self.ask(index, "Push", request)
        self.step += 1
        await self.all(
            "Pull",
            pb.PullRequest(
                run_id=RUN, generation=self.generation, step=self.step, last=commit(self.step - 1)
            ),
        )

    async def go_back(self) -> None:
        """To the beginning."""
        self.generation += 1
        self.step = 0
        await self.all("Restore", pb.RestoreRequest(run_id=RUN, generation=self.generation, step=0))

    async def take_back(self) -> None:
        """The ring continues from the step before: the worker with the last one has died."""
        self.generation += 1
        self.step -= 1
        await self.all("StartGeneration", start_generation(self.generation, self.step, commit(self.step - 1)))

    async def end(self, index: int) -> None:
        await self._listeners[index].close(0)

    async def close(self) -> None:
        for channel, listener, service in zip(self._channels, self._listeners, self._services, strict=True):
            await channel.close()
            await listener.close(0)
            await service.close()


@pytest.fixture(params=[1, 3], ids=["1 server", "3 servers"])
async def job(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path, request.param)
    await job.start()
    yield job
    await job.close()


@pytest.fixture
async def client(job: Job) -> AsyncIterator[Client]:
    with Client(job.addresses, for_reading("token"), SECONDS) as client:
        yield client


async def away(act: Callable[[], T]) -> T:
    """The client's calls block, and the servers are of this thread's loop."""
    return await asyncio.to_thread(act)


async def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(EdlError) as error:
        await away(act)
    return str(error.value)


async def test_a_row_is_read_as_soon_as_it_is_learned(job: Job, client: Client) -> None:
    await job.begin()
    ids = np.array([7, -3, 2**62, 7, 11])
    before = await away(lambda: client.rows("words", ids))
    assert before.shape == (5, DIM) and before.dtype == np.float32
    assert np.abs(before).max() <= 0.05 and before.any(), "the initial rows"
    np.testing.assert_array_equal(before[0], before[3])
    await job.learn([-3, 7])
    after = await away(lambda: client.rows("words", ids))
    np.testing.assert_allclose(after - before, np.outer([1, 1, 0, 1, 0], [0.05] * DIM), atol=1e-7)
    assert await away(lambda: client.step) == 1
    assert (await away(lambda: client.rows("words", []))).shape == (0, DIM)
    about = await away(client.tables)
    assert [(t.name, t.dim, t.rows) for t in about] == [("first", 1, 0), ("words", DIM, 2)]


async def test_a_reader_takes_no_step(job: Job, client: Client) -> None:
    await job.begin()
    own = np.array([1], np.int64)
    index = int(server_of(own, len(job.addresses))[0])
    values = np.ones((1, DIM), np.float32)
    before = await away(lambda: client.rows("words", own))
    await job.ask(
        index,
        "Push",
        pb.PushRequest(
            run_id=RUN,
            generation=1,
            step=0,
            rank=0,
            gradients=[pb.Gradients(table=1, ids=own.tobytes(), values=values.tobytes())],
        ),
    )
    np.testing.assert_array_equal(await away(lambda: client.rows("words", own)), before)
    assert (await away(lambda: client.changed("words"))).ids.size == 0
    assert await away(lambda: client.step) == 0


async def test_only_rows_that_have_changed_since_are_sent(job: Job, client: Client) -> None:
    await job.begin()
    await job.learn(np.arange(1000))
    for _ in range(3):
        await job.learn([])
    everything = await away(lambda: client.changed("words"))
    assert everything.whole and everything.step == 4
    np.testing.assert_array_equal(np.sort(everything.ids), np.arange(1000))
    await job.learn(np.arange(500, 510))
    news = await away(lambda: client.changed("words", everything.mark))
    np.testing.assert_array_equal(np.sort(news.ids), np.arange(500, 510))
    np.testing.assert_array_equal(news.rows, await away(lambda: client.rows("words", news.ids)))
    assert not news.whole and news.step == 5
    sent = news.ids.nbytes + news.rows.nbytes
    assert sent <= (everything.ids.nbytes + everything.rows.nbytes) / 10
    await job.learn([])
    again = await away(lambda: client.changed("words", news.mark))
    # The last step could be taken back.
    np.testing.assert_array_equal(np.sort(again.ids), np.arange(500, 510))
    await job.learn([])
    assert (await away(lambda: client.changed("words", again.mark))).ids.size == 0


async def test_a_copy_that_is_kept_up_to_date_is_what_the_servers_have(job: Job, client: Client) -> None:
    await job.begin()
    copy: dict[int, np.ndarray] = {}
    mark, rng = "", np.random.default_rng(1)
    last = np.empty(0, np.int64)  # ids of the last step
    for round in range(12):
        if round == 6:
            await job.go_back()
        if round in (3, 9):  # the same records, and not quite the same sums
            await job.take_back()
            await job.learn(last, gradient=-1.5)
        for _ in range(2):
            last = np.unique(rng.integers(0, 200, 20))
            await job.learn(last)
        news: Changed = await away(partial(client.changed, "words", mark))
        assert news.whole == (round in (0, 6)), round
        if news.whole:
            copy.clear()
        copy |= dict(zip(news.ids.tolist(), news.rows, strict=True))
        mark = news.mark
        ids = np.array(sorted(copy))
        there = (await away(client.tables))[1].rows
        assert len(copy) == there
        np.testing.assert_array_equal(
            np.array([copy[id] for id in ids.tolist()]), await away(partial(client.rows, "words", ids))
        )


async def test_servers_that_begin_anew_are_not_taken_for_the_ones_before(job: Job, tmp_path: Path) -> None:
    await job.begin()
    for _ in range(5):
        await job.learn([1, 2])
    with Client(job.addresses, "token", SECONDS) as client:
        before = await away(lambda: client.changed("words"))
    anew = Job(tmp_path / "anew", len(job.addresses))  # all logs are lost, and there is no checkpoint
    await anew.start()
    anew.generation = 7
    await anew.all("Declare", COUNTS)
    await anew.all("StartGeneration", start_generation(7, 0))
    await anew.learn([3])
    with Client(anew.addresses, "token", SECONDS) as client:
        news = await away(lambda: client.changed("words", before.mark))
    await anew.close()
    assert news.whole and news.ids.tolist() == [3]


async def test_a_listing_of_many_pages_has_each_row_once(
    job: Job, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.rows.client.PAGE_BYTES", 30 * (8 + 4 * DIM))
    await job.begin()
    await job.learn(np.arange(-100, 400))
    found = await away(lambda: client.changed("words"))
    np.testing.assert_array_equal(np.sort(found.ids), np.arange(-100, 400))
    rows = await away(lambda: client.rows("words", found.ids))
    np.testing.assert_array_equal(rows, found.rows)


async def test_the_token_for_reading_is_enough_for_nothing_else(job: Job) -> None:
    await job.begin()
    reading = for_reading("token")
    run: dict[str, Any] = {"run_id": RUN, "generation": 1}
    for call, request in (
        ("Declare", COUNTS),
        ("StartGeneration", start_generation(1, 0)),
        ("Push", pb.PushRequest(**run)),
        ("Restore", pb.RestoreRequest(**run)),
        ("Pull", pb.PullRequest(**run)),
        ("List", pb.ListRequest(**run)),
        ("WritePart", pb.WritePartRequest(**run)),
        ("Committed", pb.CommittedRequest(run_id=RUN)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await job.ask(0, call, request, reading)
        assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED, call
        assert "needs the job's token" in (error.value.details() or "")
    assert (await job.ask(0, "Describe", pb.DescribeRequest(), reading)).position.step == 0
    assert for_reading(reading) != reading


async def test_what_cannot_be_answered_is_told_in_words(job: Job, client: Client) -> None:
    await job.begin()
    assert "unknown table 'user': the job has 'first', 'words'" in await refusal(
        lambda: client.rows("user", [1])
    )
    assert "expected integers in one dimension (text_ids" in await refusal(
        lambda: client.rows("words", ["a"])
    )
    assert "expected the mark" in await refusal(lambda: client.changed("words", "yesterday"))
    with Client(job.addresses, "wrong") as stranger:
        text = await refusal(lambda: stranger.rows("words", [1]))
    assert re.search(r"parameter server \d \(127.0.0.1", text) and "token is missing or wrong" in text
    with Client([*job.addresses, job.addresses[0]], "token") as confused:
        assert "expected the addresses of all, in the order" in await refusal(confused.tables)
    with pytest.raises(EdlError, match="expected those of all servers"):
        Client([], "token")


async def test_a_server_without_rows_is_waited_for_and_not_taken_at_its_word(job: Job) -> None:
    with Client(job.addresses, "token", timeout=2.0) as hasty:
        while "it does not answer" in (text := await refusal(lambda: hasty.rows("words", [1]))):
            pass  # it may take as long to connect to all of them
        assert re.search(r"parameter server \d .*has no rows yet", text) and "waited for 2 s" in text
    with Client(job.addresses, "token", SECONDS) as patient:
        reading = asyncio.ensure_future(away(lambda: patient.rows("words", [1])))
        await job.all("Declare", COUNTS)  # it knows its tables, and is not at any step yet
        with pytest.raises(grpc.aio.AioRpcError, match="has no rows yet"):
            await job.ask(0, "Pull", pb.PullRequest(ids=[pb.Ids(table=1)]))
        await job.all("StartGeneration", start_generation(1, 0))
        assert (await reading).shape == (1, DIM)


async def test_a_server_that_is_away_is_named(job: Job) -> None:
    await job.begin()
    last = len(job.addresses) - 1
    with Client(job.addresses, "token", timeout=0.5) as client:
        await away(client.tables)
        await job.end(last)
        ids = np.arange(100)  # of all servers
        text = await refusal(lambda: client.rows("words", ids))
    assert f"parameter server {last} ({job.addresses[last]})" in text


# --- where each row is on two servers


@pytest.fixture
async def twice(tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path, 3, replicas=2)
    await job.start()
    await job.begin()
    await job.learn(IDS)
    yield job
    await job.close()


IDS = np.arange(60)


async def read(client: Client) -> np.ndarray:
    return await away(lambda: client.rows("words", IDS))


async def test_rows_of_a_server_that_is_away_are_read_from_the_other_that_has_them(twice: Job) -> None:
    with Client(twice.addresses, for_reading("token"), SECONDS) as client:
        before = await read(client)
        copy = await away(lambda: client.changed("words"))
        np.testing.assert_array_equal(np.sort(copy.ids), IDS)
        await twice.end(1)
        np.testing.assert_array_equal(await read(client), before)
        await twice.goes_on_without(1)
        await twice.learn(IDS)
        np.testing.assert_allclose(await read(client), before + 0.05, atol=1e-6)
        news = await away(lambda: client.changed("words", copy.mark))
        assert await away(lambda: client.step) == news.step == 2
        assert sorted(news.ids.tolist()) == IDS.tolist(), "each once, whichever server has it"
        np.testing.assert_array_equal(news.rows, await away(lambda: client.rows("words", news.ids)))


async def test_a_server_that_is_out_and_does_not_know_it_is_not_asked(
    twice: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(twice.addresses, for_reading("token"), SECONDS) as client:
        before = await read(client)
        await twice.goes_on_without(0)
        await twice.learn(IDS)
        assert await away(lambda: client.step) == 2
        np.testing.assert_allclose(await read(client), before + 0.05, atol=1e-6)
    with Client(twice.addresses, for_reading("token"), SECONDS) as another:
        np.testing.assert_allclose(await read(another), before + 0.05, atol=1e-6)


async def test_a_reader_that_reaches_only_who_is_out_reads_nothing_older_than_it_has_read(twice: Job) -> None:
    with Client(twice.addresses, for_reading("token"), timeout=3.0) as client:
        await twice.goes_on_without(0)
        await twice.learn(IDS)
        assert await away(lambda: client.step) == 2
        for index in (1, 2):
            await twice.end(index)
        text = await refusal(lambda: client.rows("words", IDS))
    assert "parameter server" in text


async def test_a_call_with_an_outdated_assignment_is_refused(twice: Job) -> None:
    await twice.goes_on_without(0)
    for wrong in (
        ShardAssignment(3, 2),
        ShardAssignment(3, 2, (0, 1)),
        ShardAssignment(2, 2, (0,)),
        ShardAssignment(3),
    ):
        request = pb.PullRequest(ids=[pb.Ids(table=1)], assignment=wrong.to_proto())
        with pytest.raises(grpc.aio.AioRpcError, match="the rows are on 3 servers, 0 out now"):
            await twice.ask(1, "Pull", request)


def test_a_job_prints_its_token_for_reading_and_not_the_other(tmp_path: Path) -> None:
    artifacts.write_contact(tmp_path, artifacts.Contact("127.0.0.1:1", "token", 1))
    printed = CliRunner().invoke(app, ["token", "--read", str(tmp_path)])
    assert (printed.exit_code, printed.output) == (0, f"{for_reading('token')}\n")
    refused = CliRunner().invoke(app, ["token", str(tmp_path)])
    assert refused.exit_code and "--read" in str(refused.exception)


def test_texts_have_the_ids_that_the_layer_gives_them() -> None:
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    texts = [rng.bytes(size) for size in [*range(140), 191, 192, 193, 1000]] + ["größe".encode()]
    expected = tf.strings.to_hash_bucket_fast(texts, (1 << 63) - 1).numpy()
    np.testing.assert_array_equal(text_ids(texts), expected)
    np.testing.assert_array_equal(text_ids(["größe"]), expected[-1:])
    small = 1 + tf.strings.to_hash_bucket_fast(texts[1:], 99).numpy()
    np.testing.assert_array_equal(text_ids(texts, 100, mask_zero=True), [0, *small])


def test_a_reader_needs_no_tensorflow_and_edl_does_not_need_the_reader() -> None:
    program = (
        "import sys, edl; assert 'edl.rows.client' not in sys.modules and 'numpy' not in sys.modules; "
        "import edl.rows.client; assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
