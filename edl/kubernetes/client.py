"""The Kubernetes API over HTTP: requests and watches in plain dictionaries, with good manners.

lightkube reads the configuration (in a pod the service account, whose token file is read again
when the token is refused; else the kubeconfig) and brings the HTTP client. Its typed objects and
its watch are not used: the worker's pod is whatever the chart rendered, and no Python client
has a watch that survives what an API server does (see `watch`).

The manners, for all callers together:
    writes go through one budget, the urgent first
    while the API is out (no answer, 5xx, 429), one request a second at most, and none
    before the time that a Retry-After has named
    after an outage nothing is written before `vet`, if there is one, has agreed
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import httpx2 as httpx
import structlog
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError as LightkubeError

from edl.errors import ConfigError, EdlError

log = structlog.get_logger()

MERGE: Final = "application/merge-patch+json"
MOST_RETRY_AFTER = 60.0
URGENT, SOON, WHENEVER = 0, 1, 2  # creates and deletes; status and events; labels


@dataclass(frozen=True)
class Timing:
    """Every span of time towards the API, in seconds. Tests use a shorter second."""

    answer: float = 15.0  # for the answer to one request
    silence: float = 75.0  # of a watch: a live one brings a bookmark every minute
    watch: float = 300.0  # the longest watch; the shortest is 4/5 of it, so that they spread
    relist: float = 300.0  # a full list at least so often, whatever the watches said
    first_pause: float = 0.5  # after a failure, doubling
    most_pause: float = 30.0
    outage: float = 1.0  # between the requests of everybody while the API is out
    write: float = 0.2  # one write's share of the budget: 5 a second
    burst: int = 10  # writes that need not wait for their share
    # The longest pause between creates that are refused (quota, rights). Nobody tells when others leave
    # room in a quota, and what is asked for once in so many seconds waits half as long, on average.
    blocked: float = 15.0
    mercy: float = 2.0  # for a worker whose stream has ended to end by itself: its pod then keeps the log
    overdue: float = 30.0  # past its grace, and still not ended: its node does not answer
    untaken: float = 5.0  # for a kubelet to take a pod up, on a node where a worker fell silent
    # In doubt, and avoided. Kubernetes taints a node that is silent for 50 s; from there on that is enough.
    doubt: float = 120.0
    look: float = 0.1  # between two looks at what there is to be shown: it may change with every event
    status: float = 1.0  # between two writes of the status
    drift: float = 5.0  # the same when nothing but the progress has changed
    labels: float = 2.0  # between two looks at the workers' labels
    events: float = 10.0  # one Event's share, beyond a burst; and the same once more for minor ones

    def times(self, factor: float) -> Timing:
        """Everything so many times as long."""
        spans = {f.name: getattr(self, f.name) * factor for f in fields(self) if f.name != "burst"}
        return replace(self, **spans)


class ApiError(EdlError):
    """The API refused, or did not answer (status 0)."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float = 0.0):
        super().__init__(f"{what}: {f'{status} ' if status else ''}{message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @property
    def out(self) -> bool:
        """It is the API that has trouble, not our request."""
        return self.status == 0 or self.status == 429 or self.status >= 500


class Backoff:
    """Pauses after failures: doubling, with jitter so that masters do not come back in step."""

    def __init__(self, first: float, most: float):
        self._first, self._most, self._failures = first, most, 0

    def next(self) -> float:
        pause = min(self._first * 2.0 ** min(self._failures, 16), self._most)
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0


class Budget:
    """A token bucket that serves the urgent first.

    Args:
        each: seconds until one more is allowed.
        burst: how many may be saved up.
    """

    def __init__(self, each: float, burst: int):
        self._each, self._burst = each, burst
        self._left, self._at = float(burst), 0.0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, urgency: int) -> None:
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._order), mine))
        self._serve()
        await mine

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = loop.time()
        self._left = min(self._left + (now - self._at) / self._each, float(self._burst))
        self._at = now
        while self._waiting and self._left >= 1:
            _, _, first = heapq.heappop(self._waiting)
            if not first.done():  # who has given up takes nothing
                first.set_result(None)
                self._left -= 1
        if self._waiting:
            self._timer = loop.call_later((1 - self._left) * self._each + 0.001, self._serve)


class Api:
    """One API server, as one account.

    Args:
        pace: how long things may take and how often they may be asked.
        config: where the API is; None: from the environment.

    Raises:
        ConfigError: no configuration, or one that cannot be used.
    """

    def __init__(self, pace: Timing, config: KubeConfig | None = None):
        self.pace = pace
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by verb, resource and status
        self.budget = Budget(pace.write, pace.burst)
        self._turn = asyncio.Lock()
        self._out_since: float | None = None
        self._next_at = 0.0  # while it is out
        self._closed_until = 0.0  # as a Retry-After has said, whoever it was said to
        self.vet: Callable[[], Awaitable[None]] | None = None  # before the first write after an outage
        self._doubtful, self._vetting = False, asyncio.Lock()
        looked = (
            "" if config else " (looked for a pod's service account, then for $KUBECONFIG or ~/.kube/config)"
        )
        try:
            single = (config or KubeConfig.from_env()).get()
            assert single is not None  # as no default is given
            self.namespace, self.server = single.namespace, single.cluster.server
            single = single._replace(user=single.user or User())  # nobody in particular may ask too
            self._http = AsyncClient(single, ConnectionParams(timeout=httpx.Timeout(pace.answer)))
        except KeyError as error:
            raise ConfigError(
                f"no Kubernetes to talk to: its context names {error}, which is not there"
            ) from error
        except (LightkubeError, OSError, ValueError) as error:
            raise ConfigError(f"no Kubernetes to talk to: {error}{looked}") from error

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
        data = json.dumps(body).encode() if body is not None else None
        try:
            # httpx limits each read, not the whole: a server that drips would hold us for ever.
            async with asyncio.timeout(self.pace.answer):
                response = await self._http.request(
                    method, path, params=dict(query), content=data, headers=headers
                )
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

    async def _lines(self, verb: str, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """What the server streams, line by line, until it ends the stream."""
        await self._my_turn()
        timeout = httpx.Timeout(self.pace.answer, read=self.pace.silence)
        rest = b""
        try:
            async with self._http.stream("GET", path, params=dict(query), timeout=timeout) as response:
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
                log.info(f"the Kubernetes API answers again, after {seconds:.1f} s")
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
            log.warning(f"the Kubernetes API is in trouble: {error}; training goes on")
        self._next_at = max(self._next_at, now + self.pace.outage)
        self._closed_until = max(self._closed_until, now + min(error.retry_after, MOST_RETRY_AFTER))


def _seconds(headers: Mapping[str, str]) -> float:
    """Of a Retry-After; an API server always says seconds, and a date is not worth a parser."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0


def _resource(path: str) -> str:
    """What a path is of: /api/v1/namespaces/n/pods/p -> pods."""
    parts = path.strip("/").split("/")
    return parts[parts.index("namespaces") + 2] if "namespaces" in parts[:-2] else parts[-1]
