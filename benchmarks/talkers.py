# SPDX-License-Identifier: Apache-2.0
"""Workers that only talk: streams to a master, no model and no ring behind them. For `benchmarks.master`.

    python -m benchmarks.talkers HOST:PORT FIRST COUNT BEATS

Each sends a worker's messages, at once, and BEATS heartbeats a second. A line of standard input with a
worker's number ends that worker's stream, as its death would; `+NUMBER` starts a further worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc

import edl
from edl.contract import addresses
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc

STREAMS = 50  # of one connection; a server allows a hundred
ADDRESS = bytes(131)  # what follows five bytes in the address of a socket, for Gloo


class Talker:
    """One of them."""

    def __init__(self, worker: int, channel: grpc.aio.Channel, beats: float):
        self.worker, self._pause = worker, 1 / beats
        self._stub, self._speaks = rpc.MasterStub(channel), asyncio.Lock()
        self._run_id, self._step, self._generation = "", 0, 0

    async def talk(self) -> None:
        self._stream = self._stub.Work(metadata=[("authorization", "Bearer token")])
        hello = pb.Hello(worker=self.worker, version=edl.__version__)
        await self._stream.write(pb.FromWorker(hello=hello))
        beating = asyncio.create_task(self._beats())
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in self._stream:
                await self._hear(message)
        beating.cancel()

    async def say(self, generation: int = 0, **body: object) -> None:
        message = pb.FromWorker(run_id=self._run_id, generation=generation, **body)  # type: ignore[arg-type]
        async with self._speaks:  # a stream takes one message at a time
            await self._stream.write(message)

    def die(self) -> None:
        self._stream.cancel()

    async def _hear(self, message: pb.ToWorker) -> None:
        generation = message.generation
        match message.WhichOneof("body"):
            case "welcome":
                self._run_id = message.run_id
                await self.say(ready=pb.Ready(layout=pb.Layout(records=10**8, block=1, shards=64)))
            case "form":
                rank, size = list(message.form.members).index(self.worker), len(message.form.members)
                ports = [bytes((2, 0, self.worker % 251, other % 251, other // 251)) for other in range(size)]
                by_rank = [port + ADDRESS if other != rank else b"" for other, port in enumerate(ports)]
                await self.say(generation, addresses=addresses.from_member("/global", by_rank))
            case "addresses":
                await self.say(generation, joined_ring=pb.JoinedRing(step=self._step))
                self._step += 1
                await self.say(generation, stepped=pb.Stepped(step=self._step))
                self._generation = generation
            case "leave" | "cut" as order:
                self._generation = 0
                broken = "cut" if order == "cut" else ""
                await self.say(
                    generation, left_ring=pb.LeftRing(step=self._step, has_state=True, broken=broken)
                )

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            self._step += bool(self._generation)
            beat = pb.Heartbeat(step=self._step, rate=100.0, loss=0.5, memory=1 << 28, speed=120.0)
            await self.say(self._generation, heartbeat=beat)


async def main(address: str, first: int, count: int, beats: float) -> None:
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(0, count, STREAMS)
    ]
    talkers = {first + i: Talker(first + i, channels[i // STREAMS], beats) for i in range(count)}
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with asyncio.TaskGroup() as talking:
        for talker in talkers.values():
            talking.create_task(talker.talk())
        while line := (await orders.readline()).decode():
            number = int(line)
            if line.startswith("+"):
                talkers[number] = Talker(number, channels[number % len(channels)], beats)
                talking.create_task(talkers[number].talk())
            else:
                talkers.pop(number).die()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
