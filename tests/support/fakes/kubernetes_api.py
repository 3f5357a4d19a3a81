# SPDX-License-Identifier: Apache-2.0
"""A small server that speaks Kubernetes' protocol, for pods, configmaps and events of one namespace.

Real HTTP on a real port: list with resourceVersion and pages, watch with bookmarks, create, delete
with grace and preconditions, merge patch, label and field selectors. It can be told to misbehave in
the ways in which API servers, load balancers and networks do. `kubernetes_cluster` has the objects and runs
the pods.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.fakes.kubernetes_cluster import KINDS, NAMESPACE, KubernetesCluster, Object, timestamp


@dataclass
class Request:
    """One request as it came."""

    at: float
    verb: str  # list, watch, get, create, patch, delete
    resource: str
    name: str
    status: int = 0


@dataclass
class Refusal:
    """So many of these requests are refused."""

    verb: str
    resource: str
    status: int
    reason: str
    message: str
    times: int
    retry_after: int | None


class KubernetesApi(KubernetesCluster):
    """The server, and the cluster behind it."""

    def __init__(self, second: float = 1.0, seed: int = 0):
        super().__init__(second, seed)
        self.requests: list[Request] = []
        self.names: list[str] = []  # of all pods that were ever made
        self.files: dict[str, bytes] = {}  # in the pods, by path
        self.unanswered: set[str] = set()  # of those whose making was not confirmed
        # How it misbehaves:
        self.refusals: list[Refusal] = []
        self.half_open = False  # watches are accepted and never answered
        self.expires_in_stream = False  # an old version is reported inside the stream, not by the status
        self.twice = False  # events come twice
        self.chopped = False  # the stream is cut into chunks anywhere
        self.broken_after = 0  # a watch breaks after so many events
        self.swallowed = 0  # so many creates succeed, and the answer is lost
        self.deaf = False  # no request gets an answer
        self.quota: int | None = None  # so many pods that have not ended
        self._watching: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # --- its life

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/{resource:configmaps}", self._handle)  # of all namespaces
        for group in ("/api/v1", "/apis/coordination.k8s.io/v1", "/apis/apps/v1"):
            path = f"{group}/namespaces/{NAMESPACE}/{{resource}}"
            app.router.add_route("*", path, self._handle)
            app.router.add_route("*", f"{path}/{{name}}", self._handle)
        path = f"/api/v1/namespaces/{NAMESPACE}/{{resource:pods}}/{{name}}/exec"
        app.router.add_get(path, self._handle)
        path = f"/api/v1/namespaces/{NAMESPACE}/{{resource:pods}}/{{name}}/eviction"
        app.router.add_post(path, self._handle)
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/{{resource:statefulsets}}/{{name}}/scale"
        app.router.add_route("*", path, self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def down(self) -> None:
        """Stop listening and close every connection. The cluster continues."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        self.halt()
        await self.down()

    def cut(self) -> None:
        """Break off every watch, also in the middle of a message."""
        for task in list(self._watching):
            task.cancel()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, since: int = 0) -> Counter[tuple[str, str]]:
        """The requests from that place of `requests` on, by verb and resource."""
        return Counter((r.verb, r.resource) for r in self.requests[since:])

    def refuse(
        self,
        verb: str,
        resource: str,
        status: int,
        reason: str = "",
        message: str = "because",
        times: int = 1,
        retry_after: int | None = None,
    ) -> Refusal:
        refusal = Refusal(verb, resource, status, reason, message, times, retry_after)
        self.refusals.append(refusal)
        return refusal

    # --- the protocol

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        resource, name = http.match_info["resource"], http.match_info.get("name", "")
        verb = {"GET": "get" if name else "list", "POST": "create"}.get(http.method, http.method.lower())
        if http.path.endswith(("/exec", "/eviction")):
            verb = http.path.rpartition("/")[2]
        if verb == "list" and http.query.get("watch") == "true":
            verb = "watch"
        request = Request(time.monotonic(), verb, resource, name)
        self.requests.append(request)
        if self.deaf or (verb == "watch" and self.half_open):
            await asyncio.sleep(3600)
        for refusal in self.refusals:
            if refusal.times > 0 and refusal.verb in (verb, "*") and refusal.resource in (resource, "*"):
                refusal.times -= 1
                request.status = refusal.status
                return _refused(refusal.status, refusal.reason, refusal.message, refusal.retry_after)
        if verb == "exec":
            return await self._exec(http, name, request)
        if verb == "watch":
            task = asyncio.current_task()
            assert task is not None
            self._watching.add(task)
            try:
                return await self._watch(http, resource, request)
            finally:
                self._watching.discard(task)
        response = self._answer(verb, resource, name, http, await http.read())
        request.status = response.status
        if verb == "create" and resource == "pods" and response.status == 201 and self.swallowed > 0:
            self.swallowed -= 1
            self.unanswered.add(json.loads(await http.read())["metadata"]["name"])
            assert http.transport is not None
            http.transport.abort()
        return response

    def _answer(self, verb: str, resource: str, name: str, http: web.Request, body: bytes) -> web.Response:
        things = self.objects[resource]
        if verb == "list":
            return self._list(resource, http)
        if verb == "create":
            return self._create(resource, json.loads(body))
        if name not in things:
            return _refused(404, "NotFound", f'{resource} "{name}" not found')
        thing = things[name]
        if verb == "get":
            return web.json_response(thing)
        said = json.loads(body) if body else {}
        wanted = said.get("preconditions", {}).get("uid") or said.get("metadata", {}).get("uid")
        if wanted and wanted != thing["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: other"
            return _refused(409, "Conflict", why)
        version = said.get("metadata", {}).get("resourceVersion")
        if version and version != thing["metadata"]["resourceVersion"]:
            return _refused(409, "Conflict", "the object has been modified")
        if verb == "patch":
            assert http.content_type == "application/merge-patch+json"
            return web.json_response(self.put(resource, _merged(copy.deepcopy(thing), said)))
        if verb == "eviction":
            assert said["kind"] == "Eviction" and said["metadata"]["name"] == name
            self.delete_pod(name)
            return web.json_response(said, status=201)
        assert verb == "delete"
        running = thing.get("status", {}).get("containerStatuses", [{}])[0].get("state", {}).get("running")
        if resource != "pods" or running is None or said.get("gracePeriodSeconds") == 0:
            self.drop(resource, name)
        else:
            self.delete_pod(name, said.get("gracePeriodSeconds", 30))
        return web.json_response(thing)

    def _create(self, resource: str, thing: Object) -> web.Response:
        name = thing["metadata"]["name"]
        if name in self.objects[resource]:
            return _refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
        if resource == "pods":
            living = [
                p for p in self.objects["pods"].values() if p["status"]["phase"] in ("Pending", "Running")
            ]
            if self.quota is not None and len(living) >= self.quota:
                used = f"requested: pods=1, used: pods={len(living)}, limited: pods={self.quota}"
                why = f'pods "{name}" is forbidden: exceeded quota: few, {used}'
                return _refused(403, "Forbidden", why)
            thing["status"] = {"phase": "Pending"}
            self.names.append(name)
        thing["metadata"].pop("uid", None)
        if resource == "configmaps" and any(not isinstance(text, str) for text in thing["data"].values()):
            return _refused(422, "Invalid", "data: a value is not a text")
        thing["metadata"]["creationTimestamp"] = timestamp()
        thing = self.put(resource, thing)
        if resource == "pods":
            self._keep(self._start(name, thing["metadata"]["uid"]))
        return web.json_response(thing, status=201)

    def _list(self, resource: str, http: web.Request) -> web.Response:
        version = str(self.version)
        found = sorted(n for n, t in self.objects[resource].items() if _selected(t, http))
        after, _, told = http.query.get("continue", "").partition("@")
        if told:
            version = told
            found = [n for n in found if n > after]
            if int(told) < self.compacted:
                return _refused(410, "Expired", "The provided continue parameter is too old")
        limit = int(http.query.get("limit", 0)) or len(found)
        more = f"{found[limit - 1]}@{version}" if len(found) > limit else ""
        return web.json_response(
            {
                "kind": f"{KINDS[resource]}List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": version, "continue": more},
                "items": [self.objects[resource][n] for n in found[:limit]],
            }
        )

    async def _watch(self, http: web.Request, resource: str, request: Request) -> web.StreamResponse:
        at = int(http.query["resourceVersion"])
        expired = {"code": 410, "reason": "Expired", "message": f"too old resource version: {at}"}
        if at < self.compacted and not self.expires_in_stream:
            request.status = 410
            return _refused(410, "Expired", str(expired["message"]))
        request.status = 200
        response = web.StreamResponse()
        response.content_type = "application/json"
        response.enable_chunked_encoding()
        await response.prepare(http)
        if at < self.compacted:
            await self._send(response, "ERROR", {"kind": "Status", "apiVersion": "v1", **expired})
            return response
        until = time.monotonic() + int(http.query.get("timeoutSeconds", "3600"))
        bookmark_at = time.monotonic() + 60 * self.second
        sent = 0
        while time.monotonic() < until:
            if at < self.compacted and self.expires_in_stream:
                await self._send(response, "ERROR", {"kind": "Status", "apiVersion": "v1", **expired})
                return response
            for version, kind, change, thing in [h for h in self.history if h[0] > at]:
                at = version
                if kind != resource or not _selected(thing, http):
                    continue
                for _ in range(2 if self.twice else 1):
                    await self._send(response, change, thing)
                sent += 1
                if self.broken_after and sent >= self.broken_after:
                    assert http.transport is not None
                    http.transport.abort()
                    return response
            if time.monotonic() >= bookmark_at:
                meta = {"resourceVersion": str(self.version), "creationTimestamp": None}
                mark = {"kind": KINDS[resource], "apiVersion": "v1", "metadata": meta}
                await self._send(response, "BOOKMARK", mark)
                bookmark_at = time.monotonic() + 60 * self.second
            with suppress(TimeoutError):
                async with asyncio.timeout(min(until, bookmark_at) - time.monotonic()), self._news:
                    if not self.history or self.history[-1][0] <= at:
                        await self._news.wait()
        return response

    async def _exec(self, http: web.Request, name: str, request: Request) -> web.StreamResponse:
        """`cat` or `sha256sum` of one of the pods' files, over a WebSocket as a kubelet's: each message
        begins with the number of its channel."""
        if name not in self.objects["pods"]:
            return _refused(404, "NotFound", f'pods "{name}" not found')
        request.status = 101
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(http)
        program, path = http.query.getall("command")
        assert program in ("cat", "sha256sum") and http.query["stdout"] == "true"
        data = self.files.get(path)
        status: Object = {"status": "Success"}
        if data is None:
            await socket.send_bytes(f"\2{program}: {path}: No such file or directory\n".encode())
            status = {"status": "Failure", "reason": "NonZeroExitCode", "message": "exit code 1"}
        elif program == "sha256sum":
            data = f"{hashlib.sha256(data).hexdigest()}  {path}\n".encode()
        for start in range(0, len(data or b""), 32768):
            if self.broken_after and start:
                assert http.transport is not None
                http.transport.abort()
                return socket
            await socket.send_bytes(b"\1" + (data or b"")[start : start + 32768])
        await socket.send_bytes(b"\3" + json.dumps(status).encode())
        await socket.close()
        return socket

    async def _send(self, response: web.StreamResponse, kind: str, thing: Object) -> None:
        line = json.dumps({"type": kind, "object": thing}, ensure_ascii=False).encode() + b"\n"
        while line:
            size = self.random.randint(1, 40) if self.chopped else len(line)
            await response.write(line[:size])
            line = line[size:]


@asynccontextmanager
async def serving(second: float = 1.0, seed: int = 0) -> AsyncIterator[KubernetesApi]:
    """A server that is up; down when the block ends."""
    api = KubernetesApi(second, seed)
    await api.up()
    try:
        yield api
    finally:
        await api.close()


def _selected(thing: Object, http: web.Request) -> bool:
    meta = thing["metadata"]
    labels = meta.get("labels") or {}
    wanted = re.findall(r"([^,= ]+)(?:=([^,]*)| in \(([^)]*)\))", http.query.get("labelSelector", ""))
    fields = [pair.split("=") for pair in http.query.get("fieldSelector", "").split(",") if pair]
    known = {
        "metadata.name": meta["name"],
        "involvedObject.name": thing.get("involvedObject", {}).get("name"),
        "type": thing.get("type"),
    }
    return all(labels.get(key) in (several or one).split(",") for key, one, several in wanted) and all(
        known[key] == value for key, value in fields
    )


def _refused(status: int, reason: str, message: str, retry_after: int | None = None) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status,
        "reason": reason,
        "message": message,
    }
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    return web.json_response(body, status=status, headers=headers)


def _merged(thing: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    thing = thing if isinstance(thing, dict) else {}
    for key, value in patch.items():
        if value is None:
            thing.pop(key, None)
        else:
            thing[key] = _merged(thing.get(key), value)
    return thing
