# SPDX-License-Identifier: Apache-2.0
"""The listener of a master or a parameter server: an address, the job's token, a certificate.

The caller registers the service: that of an acting master, a standby master or a parameter server.

Promise: calls without a token of the job are refused; for calls that only read, the read token is enough. An
address that is in use is reported in plain words. A replaced certificate is used for the next connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import structlog

from edl.contract import vital
from edl.contract.tokens import Tokens
from edl.errors import EdlError
from edl.net.tls import Certificate

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
    # By default, gRPC enlarges the flow-control window of a busy connection to several MiB, even for callers
    # without a token. Without that, a message that is being read still gets the window that it needs.
    ("grpc.http2.bdp_probe", 0),
    # A worker pings its master every ten seconds, and while it initializes, neither sends anything else. By
    # default, a server treats more than two such pings in five minutes as an attack and closes the
    # connection: every worker that takes more than half a minute to be ready would be lost.
    ("grpc.http2.max_ping_strikes", 0),
]
CERTIFICATE_SECONDS = 5.0  # between two checks; the kubelet itself takes a minute or two to update the files
UNKNOWN_TOKEN_SECONDS = 60.0  # between two log lines about wrong tokens

UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
NEEDS_THE_TOKEN = "this call needs the job's token; the one for reading is enough for rows as they are now"

Reading: TypeAlias = Mapping[str, Callable[[Any], bool]]
NOTHING: Reading = {}

log = structlog.get_logger()


class TokenCheck(grpc.aio.ServerInterceptor):
    """An interceptor that refuses every call without a token of the job.

    Args:
        reading: by method, whether a request only reads, so that the read token is enough.
    """

    def __init__(self, tokens: Tokens, reading: Reading = NOTHING):
        self._tokens, self._reading, self._told_at = tokens, reading, -UNKNOWN_TOKEN_SECONDS
        self._without_token = _refusal(UNAUTHENTICATED, "the job's token is missing or wrong")
        self._token_for_reading = _refusal(PERMISSION_DENIED, NEEDS_THE_TOKEN)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Reject a call without the job's token; admit the token for reading only to calls that read."""
        handler = await continuation(details)
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        if handler is None or self._tokens.accept(str(given)):
            return handler
        if self._tokens.accept_for_reading(str(given)):
            reads = self._reading.get(details.method)
            return self._token_for_reading if reads is None else _for_reading(handler, reads)
        now = asyncio.get_running_loop().time()
        if given and now - self._told_at >= UNKNOWN_TOKEN_SECONDS:
            self._told_at = now
            log.warning("a caller was refused: its token is neither the current one nor an earlier one")
        return self._without_token


def _refusal(code: grpc.StatusCode, why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses every call without reading its request.

    gRPC reads the request of a unary call in whole, up to the greatest message that the server accepts,
    before a handler of such a call runs. A handler of streams reads a message only when it asks for one.
    """

    async def refuse(_: Any, context: Context) -> None:
        await context.abort(code, why)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _for_reading(
    handler: grpc.RpcMethodHandler[Any, Any], reads: Callable[[Any], bool]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap a handler so that it refuses requests that do more than read."""

    async def answer(request: Any, context: Context) -> Any:
        if not reads(request):
            await context.abort(PERMISSION_DENIED, NEEDS_THE_TOKEN)
        return await handler.unary_unary(request, context)  # type: ignore[misc, arg-type]

    return grpc.unary_unary_rpc_method_handler(
        answer, handler.request_deserializer, handler.response_serializer
    )


def _check_free(address: str) -> None:
    """Check that the address is free, because gRPC reports the reason only in its own log.

    Raises:
        EdlError: the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    failed: OSError | None = None
    free = False
    try:
        # [::] means all addresses to gRPC, or all IPv4 addresses on machines without IPv6.
        named = None if host == "[::]" else host.strip("[]") or None
        places = socket.getaddrinfo(named, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(place)
                    free = True
                except OSError as error:
                    failed = error if failed is None or error.errno == errno.EADDRINUSE else failed
    except OSError as error:  # no such host
        failed = error
    if failed is not None and not (free and failed.errno != errno.EADDRINUSE):
        raise EdlError(f"cannot listen on {address}: {failed.strerror}")


class Listener:
    """One gRPC server, from `start` to `close`.

    Args:
        certificate: certificate for TLS; None: no TLS.
        options: options of gRPC.
        reading: by method, whether a request only reads, so that the read token is enough.
    """

    def __init__(
        self,
        tokens: Tokens,
        certificate: Certificate | None = None,
        options: Sequence[tuple[str, Any]] = OPTIONS,
        reading: Reading = NOTHING,
    ):
        self._tokens, self._certificate, self._options = tokens, certificate, options
        self._reading = reading
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self, address: str, serve: Callable[[grpc.aio.Server], None]) -> int:
        """Listen on `address` (host:port, port 0 for any); return the port.

        Args:
            serve: registers the services at the server.

        Raises:
            EdlError: the address is in use, or not of this machine; or the certificate cannot be used.
        """
        server = grpc.aio.server(
            interceptors=[TokenCheck(self._tokens, self._reading)], options=self._options
        )
        serve(server)
        port = _bind(server, address, self._certificate)
        await server.start()
        self._server = server
        if self._certificate is not None:
            self._looking = vital.task(_look_at(self._certificate), "certificate")
        return port

    async def close(self, grace: float) -> None:
        """Free the address; running calls have `grace` seconds to end."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.stop(grace=grace)


def _bind(server: grpc.aio.Server, address: str, certificate: Certificate | None) -> int:
    """Bind the server to `address` (host:port, port 0 for any), before it is started; return the port.

    Raises:
        EdlError: the address is in use, or not of this machine; or the certificate cannot be used.
    """
    _check_free(address)
    credentials = certificate.credentials() if certificate is not None else None
    try:
        if credentials is not None:
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise EdlError(f"cannot listen on {address}: {error}") from error


async def _look_at(certificate: Certificate) -> None:
    """Check for a new certificate periodically, forever."""
    while True:
        await asyncio.to_thread(certificate.look)
        await asyncio.sleep(CERTIFICATE_SECONDS)
