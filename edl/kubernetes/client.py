# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API over HTTP: rate-limited requests and watches with plain dictionaries.

lightkube handles servers and accounts (in a pod the service account, whose token file is read again when the
token is refused; else the result of `kubeconfig`) and provides the HTTP client. Its typed objects and its
watch are not used: the worker's pod can be anything that the chart renders, and no Python client has a watch
that survives all failures of an API server (see `informer`).

The server sees this client as `edl/VERSION` (User-Agent, in its audit log) and as `edl` (the manager of the
written fields, in `kubectl get --show-managed-fields`).

These limits hold for all callers together:
    Writes go through one budget, the urgent ones first.
    While the API is unavailable (no answer, 5xx, 429), at most one request is sent per second, and none
    before the time of a Retry-After.
    After an outage, nothing is written before `vet`, if it is set, has returned.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

import httpx2 as httpx
import httpx2.websockets as websockets
import structlog
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError as LightkubeError

import edl
from edl.errors import ConfigError, EdlError
from edl.kubernetes.kubeconfig import Access
from edl.kubernetes.rate_limit import Budget
from edl.kubernetes.timing import Timing

log = structlog.get_logger()

MERGE: Final = "application/merge-patch+json"
FIELD_MANAGER: Final = "edl"
MAX_RETRY_AFTER = 60.0
EXEC_PROTOCOL: Final = "v4.channel.k8s.io"
MAX_MESSAGE = 4 << 20  # bytes; a kubelet sends some 32 KiB at once
URGENT, SOON, WHENEVER = 0, 1, 2  # creates and deletes; status and events; labels


class ApiError(EdlError):
    """The API refused, or did not answer (status 0)."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float = 0.0):
        super().__init__(f"{what}: {f'{status} ' if status else ''}{message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @property
    def out(self) -> bool:
        """Whether the API is unavailable, as opposed to the request being invalid."""
        return self.status == 0 or self.status == 429 or self.status >= 500


def _is_here(server: str) -> bool:
    """Whether the server is on this machine, or is the API of this pod's cluster."""
    host = httpx.URL(server).host
    if host == os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Connection(ConnectionParams):
    """Connection parameters that trust the certificates that kubectl trusts.

    From 3.13 on, Python refuses certificates that lack an extension (key usage, authority key identifier), as
    in some clusters. The signature is verified all the same.
    """

    def httpx_params(self, config: SingleConfig) -> dict[str, Any]:
        params: dict[str, Any] = super().httpx_params(config)
        params["verify"].verify_flags &= ~ssl.VERIFY_X509_STRICT
        return params


class Api:
    """A client of one API server, with one account.

    Args:
        pace: timeouts and rate limits.
        config: the server and account; None: from the environment.
        access: the parts of a kubeconfig that lightkube does not support.

    Raises:
        ConfigError: no configuration was found, or it cannot be used.
    """

    def __init__(self, pace: Timing, config: KubeConfig | None = None, access: Access = Access()):  # noqa: B008
        self.pace = pace
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by verb, resource and status
        self.budget = Budget(pace.write, pace.burst)
        self._turn = asyncio.Lock()
        self._out_since: float | None = None
        self._next_at = 0.0  # earliest next request during an outage
        self._closed_until = 0.0  # from the last Retry-After of any answer
        self.vet: Callable[[], Awaitable[None]] | None = None  # called before the first write after outages
        self._doubtful, self._vetting = False, asyncio.Lock()
        looked = (
            "" if config else " (looked for a pod's service account, then for $KUBECONFIG or ~/.kube/config)"
        )
        try:
            single = (config or KubeConfig.from_env()).get()
            assert single is not None  # because no default is given
            self.namespace, self.server = single.namespace, single.cluster.server
            single = single._replace(user=single.user or User())  # anonymous users are allowed
            # Like kubectl, use proxies of the environment, but not for this machine or this pod's cluster.
            proxied = config is not None and not _is_here(self.server)
            self._http = self._connect(single, access.proxy_url, proxied)
        except KeyError as error:
            raise ConfigError(f"no Kubernetes configuration: its context names an unknown {error}") from error
        except (LightkubeError, OSError, ValueError) as error:
            raise ConfigError(f"no Kubernetes configuration: {error}{looked}") from error
        self._http.headers = httpx.Headers([("User-Agent", f"edl/{edl.__version__}"), *access.headers])
        if access.plugin is not None:
            self._http.auth = access.plugin
        self._extensions = {"sni_hostname": access.tls_server_name} if access.tls_server_name else {}

    def _connect(self, single: SingleConfig, proxy: str | None, proxied: bool) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self.pace.answer)
        return AsyncClient(single, _Connection(timeout=timeout, proxy=proxy, trust_env=proxied))

    @property
    def api_up(self) -> bool:
        """Whether the API has answered the last request."""
        return self._out_since is None

    def doubt(self) -> None:
        """Require a call of `vet` before the next write. The write raises the exceptions of `vet`."""
        self._doubtful = True

    async def close(self) -> None:
        """Close the connections to the API."""
        await self._http.aclose()

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """Read one object, or a list of them.

        Args:
            path: the API path, e.g. /api/v1/namespaces/NAMESPACE/pods/NAME.
            query: parameters of the URL, e.g. labelSelector.

        Raises:
            ApiError: the API refuses, or cannot be reached.
        """
        return await self._request("GET", path, query)

    async def create(self, path: str, body: Mapping[str, Any], urgency: int = URGENT) -> dict[str, Any]:
        """Create an object in the collection `path`, and return it as the API has stored it.

        Args:
            urgency: the order in which requests wait for the rate limit; lower is earlier.

        Raises:
            ApiError: the API refuses, or cannot be reached.
        """
        return await self._request("POST", path, {}, body, urgency)

    async def patch(self, path: str, body: Mapping[str, Any], urgency: int | None) -> dict[str, Any]:
        """Send a JSON merge patch: null removes a key. No urgency: the caller has taken from the budget."""
        return await self._request("PATCH", path, {}, body, urgency, MERGE)

    async def delete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Delete the object `path`.

        Args:
            body: Kubernetes' DeleteOptions, e.g. preconditions.

        Raises:
            ApiError: the API refuses, or cannot be reached.
        """
        return await self._request("DELETE", path, {}, body, URGENT)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        urgency: int | None = URGENT,
        content: str = "application/json",
    ) -> dict[str, Any]:
        if method != "GET" and urgency is not None:
            await self.budget.take(urgency)
        await self._my_turn()
        if method != "GET":  # after the wait, not before it
            await self._vetted()
        headers = {"Accept": "application/json"} | ({"Content-Type": content} if body is not None else {})
        query = {**query, "fieldManager": FIELD_MANAGER} if method in ("POST", "PATCH") else query
        data = json.dumps(body).encode() if body is not None else None
        try:
            # httpx limits the time of each read, not the total: a slowly dripping server would block forever.
            async with asyncio.timeout(self.pace.answer):
                response = await self._http.request(
                    method,
                    path,
                    params=dict(query),
                    content=data,
                    headers=headers,
                    extensions=self._extensions,
                )
            return self._answer(method, path, response.status_code, response.headers, response.content)
        except (httpx.HTTPError, TimeoutError, LightkubeError, OSError) as error:
            raise self._no_answer(method, path, error) from error

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of one watch, until the server ends it. An ERROR event is yielded, too.

        Raises:
            ApiError: the watch could not be opened, was silent for too long, or broke.
        """
        async with aclosing(self._lines(path, {**query, "watch": "true"})) as lines:
            async for line in lines:
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise self._no_answer("WATCH", path, error) from error

    async def run(
        self, path: str, command: Sequence[str], container: str, take: Callable[[bytes], object]
    ) -> None:
        """Run a command in a container (the path ends in /exec) until it has ended.

        Args:
            take: is called with pieces of its standard output.

        Raises:
            ApiError: the command could not be run or failed, or the connection broke.
        """
        await self._my_turn()
        query = {"container": container, "stdout": "true", "stderr": "true", "command": list(command)}
        said, end, lost = b"", b"", ""
        self._http.event_hooks = {"response": [_read_refusal]}
        sockets = websockets.AsyncWebSocketClient(
            self._http, max_message_size_bytes=MAX_MESSAGE, keepalive_ping_interval_seconds=None
        )
        try:
            async with sockets.connect(
                path,
                params=query,
                subprotocols=[EXEC_PROTOCOL],
                timeout=httpx.Timeout(self.pace.answer, read=self.pace.silence),
                extensions=self._extensions,
            ) as socket:
                try:
                    while not end:
                        message = await socket.receive_bytes()
                        if message[:1] == b"\1":
                            take(message[1:])
                        elif message[:1] == b"\2":
                            said += message[1:]
                        elif message[:1] == b"\3":
                            end = message[1:]
                except websockets.HTTPXWSException as error:
                    lost = f"{type(error).__name__}: {error}"
        except websockets.WebSocketUpgradeError as error:
            answer = error.response
            self._answer("EXEC", path, answer.status_code, answer.headers, answer.content)
        except (httpx.HTTPError, LightkubeError, OSError) as error:
            raise self._no_answer("EXEC", path, error) from error
        if lost:
            raise ApiError(f"exec {_resource(path)}", 0, "", f"the connection broke ({lost})")
        told = json.loads(end)
        if told.get("status") != "Success":
            why = said.decode(errors="replace").strip() or told.get("message", "no reason given")
            raise ApiError(f"exec {_resource(path)}", 400, str(told.get("reason", "")), why)

    async def _lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch, until the server ends it."""
        await self._my_turn()
        timeout = httpx.Timeout(self.pace.answer, read=self.pace.silence)
        rest = b""
        try:
            async with self._http.stream(
                "GET", path, params=dict(query), timeout=timeout, extensions=self._extensions
            ) as response:
                whole = b"" if response.status_code == 200 else await response.aread()
                self._answer("WATCH", path, response.status_code, response.headers, whole)
                # Not aiter_lines: it also splits at other line separators of Unicode, inside a JSON text.
                async for chunk in response.aiter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
        except (httpx.HTTPError, LightkubeError, OSError) as error:
            raise self._no_answer("WATCH", path, error) from error

    # --- rate limits and outages

    async def _vetted(self) -> None:
        """Call `vet` if there is doubt that writing is right, for example after an outage."""
        async with self._vetting:
            while self._doubtful and self.vet is not None:
                self._doubtful = False
                try:
                    await self.vet()
                except BaseException:
                    self._doubtful = True
                    raise

    async def _my_turn(self) -> None:
        """Return at once while the API answers; else when a second has passed since the last request."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            while True:
                free_at = self._next_at if self._out_since is not None else 0.0
                if (pause := max(free_at, self._closed_until) - loop.time()) <= 0:
                    break
                await asyncio.sleep(pause)
            self._next_at = loop.time() + self.pace.outage

    def _answer(
        self, verb: str, path: str, status: int, headers: Mapping[str, str], content: bytes
    ) -> dict[str, Any]:
        self.requests[verb.lower(), _resource(path), status] += 1
        said: Any = {}
        with suppress(ValueError):
            said = json.loads(content) if content else {}
        if 200 <= status < 300 and isinstance(said, dict):
            if self._out_since is not None:
                seconds = asyncio.get_running_loop().time() - self._out_since
                log.info(f"the Kubernetes API is available again after {seconds:.1f} s")
                self._out_since = None
            return said
        told = said if isinstance(said, dict) else {}
        message = told.get("message") or content[:200].decode(errors="replace") or "no reason given"
        error = ApiError(
            f"{verb.lower()} {_resource(path)}", status, told.get("reason", ""), message, _seconds(headers)
        )
        if error.out:
            self._is_out(error)
        else:
            self._out_since = None  # a refusal is an answer, too
        raise error

    def _no_answer(self, verb: str, path: str, cause: Exception) -> ApiError:
        self.requests[verb.lower(), _resource(path), 0] += 1
        why = f"no answer ({type(cause).__name__}{f': {cause}' if str(cause) else ''})"
        error = ApiError(f"{verb.lower()} {_resource(path)}", 0, "", why)
        if verb != "WATCH" or isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
            self._is_out(error)  # a watch may also break by itself: the next request decides then
        return error

    def _is_out(self, error: ApiError) -> None:
        now = asyncio.get_running_loop().time()
        self.doubt()
        if self._out_since is None:
            self._out_since = now
            log.warning(f"the Kubernetes API is unavailable; training continues, retrying: {error}")
        self._next_at = max(self._next_at, now + self.pace.outage)
        self._closed_until = max(self._closed_until, now + min(error.retry_after, MAX_RETRY_AFTER))


def _seconds(headers: Mapping[str, str]) -> float:
    """The seconds of a Retry-After. An API server never sends a date, so none is parsed."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0


async def _read_refusal(response: httpx.Response) -> None:
    """Read the text of a refused WebSocket request: it is not available once the error is raised."""
    if "Upgrade" in response.request.headers and response.status_code != 101:
        await response.aread()


def _resource(path: str) -> str:
    """The kind of resource of a path: /api/v1/namespaces/n/pods/p -> pods."""
    parts = path.strip("/").split("/")
    return parts[parts.index("namespaces") + 2] if "namespaces" in parts[:-2] else parts[-1]
