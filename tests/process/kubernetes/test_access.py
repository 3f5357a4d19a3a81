# SPDX-License-Identifier: Apache-2.0
"""What a kubeconfig says of the way to a cluster, at a real server with TLS."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from edl import __version__
from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.kubeconfig import load
from edl.kubernetes.timing import Timing

pytestmark = pytest.mark.waits

NAME = "api.internal"


def certificate(folder: Path, name: str, *more: str) -> None:
    """NAME.crt and NAME.key, signed by ca if there is one."""
    signer = ["-CA", "ca.crt", "-CAkey", "ca.key"] if name != "ca" else []
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    command = ["openssl", "req", "-x509", *kind, "-subj", f"/CN={name}", *files, *signer, *more]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@dataclass
class Server:
    """An API server that returns the user of each request, and how it was authenticated."""

    folder: Path
    port: int = 0
    requests: list[web.Request] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        assert request.transport is not None
        subject = request.transport.get_extra_info("peercert")["subject"]
        self.peers.append(dict(pair for part in subject for pair in part)["commonName"])
        return web.json_response({"items": []})

    def kubeconfig(self, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
        authority = base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()
        key = base64.b64encode((self.folder / "jane.key").read_bytes()).decode()
        at = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": authority, **cluster}
        credentials = {"client-certificate": "jane.crt", "client-key-data": key, **user}
        path = self.folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "c", "cluster": at}],
                    "users": [{"name": "u", "user": credentials}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    async def asked(self, cluster: dict[str, Any], user: dict[str, Any]) -> None:
        """Ask it as such a kubeconfig says, by a list and a write."""
        api = Api(Timing(), *load(self.kubeconfig(cluster, user)))
        try:
            await api.get("/api/v1/namespaces/n/pods")
            await api.create("/api/v1/namespaces/n/pods", {})
        finally:
            await api.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    certificate(tmp_path, "ca")
    certificate(
        tmp_path,
        NAME,
        "-addext",
        f"subjectAltName=DNS:{NAME}",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    )
    certificate(tmp_path, "jane", "-addext", "basicConstraints=critical,CA:FALSE")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    context.load_cert_chain(tmp_path / f"{NAME}.crt", tmp_path / f"{NAME}.key")
    context.verify_mode = ssl.CERT_REQUIRED
    found = Server(tmp_path)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


async def test_tls_server_name_and_a_client_certificate(server: Server) -> None:
    await server.asked({"tls-server-name": NAME}, {})
    assert server.peers == ["jane", "jane"]
    with pytest.raises(ApiError, match=r"certificate is not valid for '127\.0\.0\.1'"):
        await server.asked({}, {})


async def test_the_server_is_told_who_we_are_and_as_whom_we_act(server: Server) -> None:
    await server.asked({"tls-server-name": NAME}, {"as": "joe", "as-groups": ["day", "night"]})
    for request in server.requests:
        assert request.headers["User-Agent"] == f"edl/{__version__}"
        assert request.headers["Impersonate-User"] == "joe"
        assert request.headers.getall("Impersonate-Group") == ["day", "night"]
    read, write = server.requests
    assert "fieldManager" not in read.query
    assert write.query["fieldManager"] == "edl"


async def test_a_proxy_is_gone_through(server: Server) -> None:
    wanted: list[bytes] = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pipe(reader, back), pipe(there, writer), return_exceptions=True)

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    async with proxy:
        port = proxy.sockets[0].getsockname()[1]
        await server.asked({"tls-server-name": NAME, "proxy-url": f"http://127.0.0.1:{port}"}, {})
    assert wanted == [f"127.0.0.1:{server.port}".encode()]
    assert server.peers == ["jane", "jane"]
