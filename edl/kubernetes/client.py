"""The Kubernetes API over HTTP: requests and watches in plain dictionaries, with good manners.

lightkube knows servers and accounts (in a pod the service account, whose token file is read again
when the token is refused; else what `kubeconfig` has read) and brings the HTTP client. Its typed objects and
its watch are not used: the worker's pod is whatever the chart rendered, and no Python client
has a watch that survives what an API server does (see `informer`).

The server knows us as `edl/VERSION` (User-Agent, in its audit log) and as `edl` (the manager of the fields
that we write, in `kubectl get --show-managed-fields`).

The manners, for all callers together:
    writes go through one budget, the urgent first
    while the API is out (no answer, 5xx, 429), one request a second at most, and none
    before the time that a Retry-After has named
    after an outage nothing is written before `vet`, if there is one, has agreed
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
MOST_RETRY_AFTER = 60.0
EXEC_PROTOCOL: Final = "v4.channel.k8s.io"
MOST_MESSAGE = 4 << 20  # bytes; a kubelet sends some 32 KiB at once
URGENT, SOON, WHENEVER = 0, 1, 2  # creates and deletes; status and events; labels


class ApiError(EdlError):
    """The API refused, or did not answer (status 0)."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float = 0.0):
        super().__init__(f"{what}: {f'{status} ' if status else ''}{message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @property
    def out(self) -> bool:
        """It is the API that has trouble, not our request."""
        return self.status == 0 or self.status == 429 or self.status >= 500


def _is_here(server: str) -> bool:
    """Whether the URL is one of this machine, or of the cluster that this pod is in."""
    host = httpx.URL(server).host
    if host == os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Connection(ConnectionParams):
    """Trusts the certificates that kubectl trusts.

    From 3.13 on, Python refuses those that lack an extension (key usage, authority key identifier), as
    those of some clusters do. Who has signed them is verified all the same.
    """

    def httpx_params(self, config: SingleConfig) -> dict[str, Any]:
        params: dict[str, Any] = super().httpx_params(config)
        params["verify"].verify_flags &= ~ssl.VERIFY_X509_STRICT
        return params


class Api:
    """One API server, as one account.

    Args:
        pace: how long things may take and how often they may be asked.
        config: where the API is; None: from the environment.
        access: what lightkube does not know of a kubeconfig.

    Raises:
        ConfigError: no configuration, or one that cannot be used.
    """

    def __init__(self, pace: Timing, config: KubeConfig | None = None, access: Access = Access()):  # noqa: B008
        self.pace = pace
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by verb, resource and status
        self.budget = Budget(pace.write, pace.burst)
        self._turn = asyncio.Lock()
        self._out_since: float | None = None
        self._next_at = 0.0  # while it is out
        self._closed_until = 0.0  # as a Retry-After of any answer has said
        self.vet: Callable[[], Awaitable[None]] | None = None  # before the first write after an outage
        self._doubtful, self._vetting = False, asyncio.Lock()
        looked = (
            "" if config else " (looked for a pod's service account, then for $KUBECONFIG or ~/.kube/config)"
        )
        try:
            single = (config or KubeConfig.from_env()).get()
            assert single is not None  # as no default is given
            self.namespace, self.server = single.namespace, single.cluster.server
            single = single._replace(user=single.user or User())  # an anonymous user may ask, too
            # As kubectl does it, a proxy of the environment is gone through, but for what is here.
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
        """The last answer was one."""
        return self._out_since is None

    def doubt(self) -> None:
        """Have `vet` asked before the next write; what it raises is raised by the write."""
        self._doubtful = True

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        return await self._request("GET", path, query)

    async def create(self, path: str, body: Mapping[str, Any], urgency: int = URGENT) -> dict[str, Any]:
        return await self._request("POST", path, {}, body, urgency)

    async def patch(self, path: str, body: Mapping[str, Any], urgency: int | None) -> dict[str, Any]:
        """A JSON merge patch: null takes a key away. No urgency: its share of the budget is taken already."""
        return await self._request("PATCH", path, {}, body, urgency, MERGE)

    async def delete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
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
        if method != "GET":  # now, not before it had to wait
            await self._vetted()
        headers = {"Accept": "application/json"} | ({"Content-Type": content} if body is not None else {})
        query = {**query, "fieldManager": FIELD_MANAGER} if method in ("POST", "PATCH") else query
        data = json.dumps(body).encode() if body is not None else None
        try:
            # httpx limits each read, not the whole: a server that drips would hold us for ever.
            async with asyncio.timeout(self.pace.answer):
                response = await self._http.request(
                    method, path, params=dict(query), content=data, headers=headers,
                    extensions=self._extensions,
                )  # fmt: skip
            return self._answer(method, path, response.status_code, response.headers, response.content)
        except (httpx.HTTPError, TimeoutError, LightkubeError, OSError) as error:
            raise self._no_answer(method, path, error) from error

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of one watch, until the server ends it.

        Raises:
            ApiError: it could not be had, was silent for too long, or broke.
                (An ERROR event is only handed on.)
        """
        async with aclosing(self._lines("WATCH", path, {**query, "watch": "true"})) as lines:
            async for line in lines:
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise self._no_answer("WATCH", path, error) from error

    async def log(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """The lines of a pod's log (its path ends in /log), and with `follow` those to come.

        Raises:
            ApiError: it could not be had, was silent for too long, or broke.
        """
        async with aclosing(self._lines("LOG", path, query)) as lines:
            async for line in lines:
                yield line.decode(errors="replace")

    async def run(
        self, path: str, command: Sequence[str], container: str, take: Callable[[bytes], object]
    ) -> None:
        """Run a command in a container (the path ends in /exec) until it has ended.

        Args:
            take: is given what it writes to its standard output, piece by piece.

        Raises:
            ApiError: it could not be run, failed, or the connection broke.
        """
        await self._my_turn()
        query = {"container": container, "stdout": "true", "stderr": "true", "command": list(command)}
        said, end, lost = b"", b"", ""
        self._http.event_hooks = {"response": [_read_refusal]}
        sockets = websockets.AsyncWebSocketClient(
            self._http, max_message_size_bytes=MOST_MESSAGE, keepalive_ping_interval_seconds=None
        )
        try:
            async with sockets.connect(
                path, params=query, subprotocols=[EXEC_PROTOCOL],
                timeout=httpx.Timeout(self.pace.answer, read=self.pace.silence), extensions=self._extensions,
            ) as socket:  # fmt: skip
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

    async def _lines(self, verb: str, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """What the server streams, line by line, until it ends the stream."""
        await self._my_turn()
        timeout = httpx.Timeout(self.pace.answer, read=self.pace.silence)
        rest = b""
        try:
            async with self._http.stream(
                "GET", path, params=dict(query), timeout=timeout, extensions=self._extensions
            ) as response:
                whole = b"" if response.status_code == 200 else await response.aread()
                self._answer(verb, path, response.status_code, response.headers, whole)
                # Not aiter_lines: it also splits at what Unicode calls a line's end, inside a JSON text.
                async for chunk in response.aiter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
        except (httpx.HTTPError, LightkubeError, OSError) as error:
            raise self._no_answer(verb, path, error) from error

    # --- manners

    async def _vetted(self) -> None:
        """Return when, after whatever has happened, writing is known to be right."""
        async with self._vetting:
            while self._doubtful and self.vet is not None:
                self._doubtful = False
                try:
                    await self.vet()
                except BaseException:
                    self._doubtful = True
                    raise

    async def _my_turn(self) -> None:
        """At once while the API answers; else when a second has passed since anybody asked."""
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
            self._out_since = None  # it answers, if only to refuse
        raise error

    def _no_answer(self, verb: str, path: str, cause: Exception) -> ApiError:
        self.requests[verb.lower(), _resource(path), 0] += 1
        why = f"no answer ({type(cause).__name__}{f': {cause}' if str(cause) else ''})"
        error = ApiError(f"{verb.lower()} {_resource(path)}", 0, "", why)
        if verb not in ("WATCH", "LOG") or isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
            self._is_out(error)  # a watch may also break by itself: the next request will tell
        return error

    def _is_out(self, error: ApiError) -> None:
        now = asyncio.get_running_loop().time()
        self.doubt()
        if self._out_since is None:
            self._out_since = now
            log.warning(f"the Kubernetes API is unavailable; training continues, retrying: {error}")
        self._next_at = max(self._next_at, now + self.pace.outage)
        self._closed_until = max(self._closed_until, now + min(error.retry_after, MOST_RETRY_AFTER))


def _seconds(headers: Mapping[str, str]) -> float:
    """Of a Retry-After; an API server always says seconds, and a date is not worth a parser."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0


async def _read_refusal(response: httpx.Response) -> None:
    """Of a request for a WebSocket: its text is gone once the error is there."""
    if "Upgrade" in response.request.headers and response.status_code != 101:
        await response.aread()


def _resource(path: str) -> str:
    """What a path is of: /api/v1/namespaces/n/pods/p -> pods."""
    parts = path.strip("/").split("/")
    return parts[parts.index("namespaces") + 2] if "namespaces" in parts[:-2] else parts[-1]
