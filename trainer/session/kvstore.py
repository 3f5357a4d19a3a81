# SPDX-License-Identifier: Apache-2.0
"""The key-value store in which the members of a generation find each other.

Horovod's C++ asks `http://host:port/scope/key` for its peers' addresses. Each worker runs this store on its
own loopback, and relays its values over the worker's authenticated stream. No key is stale, since the store
is emptied for each generation. No client polls: a GET is held until the value is there, or answered with 410
Gone when the generation is dead.

Other users of the machine can connect to loopback, too. So every path begins with a secret that only this
process knows; any other request is answered with 403 Forbidden, and its body is not read.

Horovod makes one request in a connection. So asyncio's streams are enough; aiohttp would take 10 MiB of each
worker. Lives on the asyncio loop of the worker's stream; not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from asyncio import StreamReader, StreamWriter
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus

Answer = tuple[HTTPStatus, bytes]
CALLED_OFF: Answer = (HTTPStatus.GONE, b"")


def parts(value: bytes, rank: int, size: int) -> list[bytes]:
    """Divide the value that `rank` of `size` puts under its own key, by the rank that each part is for.

    Gloo puts the addresses for all other ranks there, concatenated, and each of them reads only its
    own.

    Returns:
        a part for each rank; empty if the value cannot be divided.
    """
    length, rest = divmod(len(value), max(size - 1, 1))
    if not length or rest:
        return []
    found = [value[at : at + length] for at in range(0, len(value), length)]
    return [*found[:rank], b"", *found[rank:]]


class KeyValueStore:
    """The keys of one generation at a time.

    Args:
        relay: called with (generation, key, value) for each key that the local Horovod puts.
    """

    def __init__(self, relay: Callable[[int, str, bytes], None]):
        self._relay = relay
        self.secret = secrets.token_hex(16)
        self._generation = 0
        self._dead = True
        self._values: dict[str, tuple[bytes, int]] = {}  # and the number of repetitions in the answer
        self._waiting: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on loopback; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self.call_off()
        if self._server is not None:
            self._server.close()

    def open(self, generation: int) -> None:
        """Empty the store, and accept values of `generation` only."""
        self.call_off()
        self._generation, self._dead, self._values = generation, False, {}

    def put(self, generation: int, key: str, value: bytes, times: int = 1) -> None:
        """Store a value of a different member."""
        if generation == self._generation and not self._dead:
            self._set(key, value, times)

    def call_off(self) -> None:
        """Answer every request with 410, also those that wait: the generation is called off."""
        self._dead = True
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_result(None)
        self._waiting.clear()

    def _set(self, key: str, value: bytes, times: int = 1) -> None:
        self._values[key] = (value, times)
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the request of a connection, and close it."""
        # The caller has left, or what it has sent is no request.
        with contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split(maxsplit=2)
            status, body = await self._answer(method, path, head, reader)
            writer.write(
                f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()
        writer.close()

    async def _answer(self, method: str, path: str, head: str, reader: StreamReader) -> Answer:
        prefix, _, key = path[1:].partition("/")
        # Horovod appends the port to the address that it is given (trainer/ring/horovod.py).
        if not hmac.compare_digest(prefix.partition(":")[0].encode(), self.secret.encode()):
            return HTTPStatus.FORBIDDEN, b""
        key = f"/{key}"
        if method == "PUT":
            size = re.search(r"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
            value = await reader.readexactly(int(size[1]) if size else 0)
            if self._dead:
                return CALLED_OFF
            self._set(key, value)
            self._relay(self._generation, key, value)
        elif method == "GET":
            return await self._get(key)
        # DELETE, by a rank that leaves: the next generation empties the store anyway.
        return HTTPStatus.OK, b""

    async def _get(self, key: str) -> Answer:
        while not self._dead:
            if key in self._values:
                value, times = self._values[key]
                return HTTPStatus.OK, value * times
            future = asyncio.get_running_loop().create_future()
            self._waiting[key].append(future)
            await future
        return CALLED_OFF
