# SPDX-License-Identifier: Apache-2.0
"""The master's HTTP server: probes (/healthz, /readyz), metrics, and other pages to read.

It runs on the master's event loop, so an answer from /healthz shows that the loop works. Everything is
read-only (GET and HEAD). A client that is too slow in sending its request or receiving the answer is
disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

log = structlog.get_logger()

TIMEOUT_SECONDS = 5.0
METHODS = ("GET", "HEAD")

Page = Callable[[], tuple[str, bytes]]  # renders a page: content type and body


class HttpServer:
    """Serves pages over HTTP.

    Args:
        ready: returns whether the master can do its work.
        pages: the pages, by path.
        timeout_seconds: time for a client to send its request, and again to receive the answer.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        pages: Mapping[str, Page],
        timeout_seconds: float = TIMEOUT_SECONDS,
    ):
        self._ready, self._pages, self._timeout_seconds = ready, pages, timeout_seconds
        app = web.Application(middlewares=[self._in_time])
        app.router.add_route("*", "/{path:.*}", self._answer)
        # Malformed requests are errors of clients, but aiohttp would log each of them with a traceback.
        quiet = logging.getLogger(f"{__name__}.aiohttp")
        quiet.setLevel(logging.CRITICAL)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            keepalive_timeout=timeout_seconds,
            lingering_time=timeout_seconds,
            shutdown_timeout=1.0,
        )

    async def start(self, address: str) -> int:
        """Listen on `address`, and return the port.

        Args:
            address: host:port; port 0 is any free port, [::] is every address, IPv4 and IPv6.

        Raises:
            OSError: the address is taken.
        """
        host, _, port = address.rpartition(":")
        await self._runner.setup()
        # With "::", asyncio would listen on IPv6 only; None also covers IPv4.
        await web.TCPSite(self._runner, None if host == "[::]" else host.strip("[]"), int(port)).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method not in METHODS:
            return _text(405, f"{request.method} is not allowed: use GET or HEAD", Allow=", ".join(METHODS))
        if request.path == "/healthz":
            return _text(200, "ok")
        if request.path == "/readyz":
            return _text(200, "ok") if self._ready() else _text(503, "not ready")
        if page := self._pages.get(request.path):
            kind, body = page()
            return web.Response(body=body, headers={"Content-Type": kind})
        paths = ", ".join(sorted(["/healthz", "/readyz", *self._pages]))
        return _text(404, f"{request.path} does not exist; there are {paths}")

    @web.middleware
    async def _in_time(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send the answer; disconnect a client that does not receive it in time."""
        try:
            response = await handler(request)
        except Exception:
            log.exception(f"{request.path} could not be rendered")
            response = _text(500, "this page could not be rendered; the master's log says why")
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response


def _text(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=headers)
