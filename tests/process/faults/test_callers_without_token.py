# SPDX-License-Identifier: Apache-2.0
"""Callers without the job's token: what they can make a master, a parameter server or a worker do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from edl.contract.tokens import for_reading
from edl.net.listener import PERMISSION_DENIED, UNAUTHENTICATED
from edl.trainer.session.kvstore import KeyValueStore

pytestmark = pytest.mark.waits
ROOT = Path(__file__).parents[3]
SECONDS = 60.0  # for what must happen
MIB = 1 << 20
STRANGERS, LARGE = 20, 60 * MIB
# A message of one unknown field.
MESSAGE = b"\x7a" + b"\x80\x80\x80\x1e" + bytes(LARGE)
MASTER = """
import asyncio, sys
from pathlib import Path
from edl.contract.tokens import Tokens
from edl.net.listener import Listener
from edl.master.rpc.server import MasterServer
from tests.process.jobs.test_rpc import Idle

async def serve():
    port = await MasterServer(Idle(), Listener(Tokens("token")), "{}", "").start("127.0.0.1:0")
    Path(sys.argv[1]).write_text(f"127.0.0.1:{port}")
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@contextlib.asynccontextmanager
async def listening(command: list[str], tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """A process, from when it has written its address; and its id."""
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EDL_TOKEN": "token"},
        )
    try:
        async with asyncio.timeout(SECONDS):
            while not (tmp_path / "address").exists() or not (tmp_path / "address").read_text():
                assert process.poll() is None, (tmp_path / "output").read_text()
                await asyncio.sleep(0.05)
        yield (tmp_path / "address").read_text(), process.pid
        assert process.poll() is None, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()


def memory(pid: int, what: str) -> int:
    """VmRSS or VmHWM, the most that was resident, in bytes."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def refusal(address: str, method: str, token: str) -> grpc.StatusCode:
    """How a call is refused that sends a large message, over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        metadata = (("authorization", f"Bearer {token}"),)
        if method.endswith(("Work", "Converse")):
            begin: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
            stream = begin(metadata=metadata, timeout=SECONDS)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(MESSAGE)
            return await stream.code()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(MESSAGE, metadata=metadata, timeout=SECONDS)
        return error.value.code()


STRANGER, READER = "wrong", for_reading("token")


@pytest.mark.parametrize(
    ("command", "calls"),
    [
        (
            ["-c", MASTER, "{address}"],
            [(f"/edl.Master/{call}", STRANGER) for call in ("Work", "Stop", "Watch", "Scale")],
        ),
        (
            ["-m", "edl.ps", "--log-dir", "{log}", "--address-file", "{address}"],
            [
                *(
                    (f"/edl.ParameterServer/{call}", STRANGER)
                    for call in ("Converse", "Begin", "Pull", "WritePart")
                ),
                *((f"/edl.ParameterServer/{call}", READER) for call in ("Converse", "Begin", "Push")),
            ],
        ),
    ],
    ids=["master", "server"],
)
async def test_a_call_without_its_token_is_refused_before_its_message_is_read(
    command: list[str], calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    places = {"{address}": str(tmp_path / "address"), "{log}": str(tmp_path / "log")}
    async with listening([places.get(word, word) for word in command], tmp_path) as (address, pid):
        assert memory(pid, "VmHWM") - memory(pid, "VmRSS") < 8 * MIB, "the peak below is that of the calls"
        before = memory(pid, "VmHWM")
        made = [calls[number % len(calls)] for number in range(STRANGERS)]
        codes = await asyncio.gather(*(refusal(address, method, token) for method, token in made))
        for (method, token), code in zip(made, codes, strict=True):
            refused = UNAUTHENTICATED if token == STRANGER else PERMISSION_DENIED
            # INTERNAL: the refusal came while the client was still sending.
            assert code in (refused, grpc.StatusCode.INTERNAL), method
        assert memory(pid, "VmHWM") - before < STRANGERS * MIB


async def test_the_store_of_a_worker_answers_only_its_own_process() -> None:
    relayed: list[str] = []
    store = KeyValueStore(lambda generation, key, value: relayed.append(key))
    port = await store.start()
    store.open(1)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path in (
                "/global/0",
                "/",
                f"/{store.secret[:-1]}x/global/0",
                f"/{store.secret[:-1]}/global/0",
            ):
                for call in (
                    session.put(path, data=bytes(MIB // 2)),
                    session.get(path),
                    session.delete(path),
                ):
                    # The connection may be gone before the client has sent all: no body is read.
                    with contextlib.suppress(aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                        async with call as answer:
                            assert answer.status == 403, path
            assert not relayed and not store._values
            async with session.put(f"/{store.secret}:{port}/global/0", data=b"here") as answer:
                assert answer.status == 200
            async with session.get(f"/{store.secret}/global/0") as answer:
                assert await answer.read() == b"here"
        assert relayed == ["/global/0"]
    finally:
        await store.close()
