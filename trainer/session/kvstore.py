# SPDX-License-Identifier: Apache-2.0
"""The key-value store in which the members of a generation find each other.

Horovod's C++ asks `http://host:port/scope/key` for its peers' addresses. Each worker runs this store on its
own loopback, and relays its values over the worker's authenticated stream. No key is stale, since the store
is emptied for each generation. No client polls: a GET is held until the value is there, or answered with 410
Gone when the generation is dead.

Other users of the machine can connect to loopback, too. So every path begins with a secret that only this
process knows; any other request is answered with 403 Forbidden before its body is read.

Lives on the asyncio loop of the worker's stream; not thread-safe.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import defaultdict
from collections.abc import Callable

from aiohttp import web


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
        self._runner: web.ServerRunner | None = None

    async def start(self) -> int:
        """Listen on loopback; returns the port."""
        # No access log: a ring of a hundred would write hundreds of lines into each worker's log.
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), keepalive_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def close(self) -> None:
        self.call_off()
        if self._runner is not None:
            await self._runner.cleanup()

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

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        prefix, _, key = request.path[1:].partition("/")
        # Horovod appends the port to the address that it is given (trainer/ring/horovod.py).
        if not hmac.compare_digest(prefix.partition(":")[0].encode(), self.secret.encode()):
            return web.Response(status=403)
        key = f"/{key}"
        if request.method == "PUT":
            value = await request.read()
            if self._dead:
                return web.Response(status=410)
            self._set(key, value)
            self._relay(self._generation, key, value)
            return web.Response()
        if request.method == "GET":
            return await self._get(key)
        return web.Response()  # DELETE by a rank that leaves: the next generation empties the store anyway

    async def _get(self, key: str) -> web.Response:
        while not self._dead:
            if key in self._values:
                value, times = self._values[key]
                return web.Response(body=value * times)
            future = asyncio.get_running_loop().create_future()
            self._waiting[key].append(future)
            await future
        return web.Response(status=410)
