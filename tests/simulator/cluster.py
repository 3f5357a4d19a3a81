# SPDX-License-Identifier: Apache-2.0
"""A cluster in simulated time: its API server, with the Lease and the pods of masters and workers.

`Transport` replaces the network below `edl.kubernetes.client.Api`. The client's handling of requests,
answers, watches and outages is the shipped code. A process that is cut off from the API receives nothing, but
its requests may still be served later.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster as Server
from lightkube.config.models import User

from edl.contract.ids import WorkerId
from edl.kubernetes import pods
from edl.kubernetes.client import Api
from edl.kubernetes.names import MASTER_PORT, Names
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import Place
from tests.simulator.network import Network, Pipe
from tests.simulator.processes import Process

if TYPE_CHECKING:
    from tests.simulator.masters import Masters

API = "api"  # the host of the API server
SERVICE = f"edl-master:{MASTER_PORT}"
TOKEN = "token"  # of the job
NAMES = Names("edl")
HOSTS = ("10.0.0.1", "10.0.0.2")  # of the masters
logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request
HISTORY: Any = list[tuple[int, str, str, dict[str, Any]]]


def place(host: str) -> Place:
    return Place("n", "edl", "edl", SERVICE, pod=f"edl-master-{HOSTS.index(host)}", pod_uid=host)


class Cluster(Process):
    """The API server, which never dies. `down` is an outage of the whole server."""

    def __init__(self, masters: Masters, network: Network, chance: random.Random):
        super().__init__(masters.clock, API, masters.failed)
        self.masters, self.network, self.random = masters, network, chance
        self.down = False
        self._version = 1
        self.objects: dict[str, dict[str, dict[str, Any]]] = {"leases": {}, "pods": {}, "configmaps": {}}
        self._history: HISTORY = []
        self._watches: list[tuple[str, str, Pipe]] = []
        self._told: list[Pipe] = []  # receivers of events of workers' pods
        self.put("configmaps", NAMES.job, {"uid": "job"}, {})
        self.put("leases", NAMES.lease, {"uid": "lease"}, {"spec": {}})
        for host in HOSTS:
            labels = {pods.INSTANCE: "edl", pods.COMPONENT: "master", pods.JOB: "edl"}
            status = {"phase": "Running", "podIP": host, "conditions": []}
            self.put("pods", place(host).pod, {"uid": host, "labels": labels}, {"status": status})

    # --- objects

    def put(self, resource: str, name: str, meta: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        known = name in self.objects[resource]
        thing = {"metadata": {**meta, "name": name, "resourceVersion": str(self._version)}, **rest}
        self.objects[resource][name] = thing
        told = (self._version, resource, "MODIFIED" if known else "ADDED", copy.deepcopy(thing))
        self._history.append(told)
        for kind, name_only, pipe in self._watches:
            if kind == resource and name_only in ("", name):
                pipe.put(_line(told))
        return thing

    def ready(self, host: str, ready: bool) -> None:
        """Set the Ready condition of a master's pod, as the kubelet does."""
        pod = copy.deepcopy(self.objects["pods"][place(host).pod])
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
        self.put("pods", pod["metadata"]["name"], pod["metadata"], {"status": pod["status"]})

    def acting(self) -> str:
        """The address behind the Service, from the pods' labels."""
        for pod in self.objects["pods"].values():
            if pods.ACTING in (pod["metadata"].get("labels") or {}):
                return f"{pods.ip(pod)}:{MASTER_PORT}"
        return ""

    # --- requests

    def answers(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if self.down:
            return 503, {"message": "the API server is down"}
        parts = path.strip("/").split("/")
        at = parts.index("namespaces") + 2
        resource, name = parts[at], "/".join(parts[at + 1 :])
        things = self.objects[resource]
        if method == "GET" and not name:
            some = [t for t in things.values() if _selected(t, query)]
            return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": copy.deepcopy(some)}
        if method == "POST" and resource == "pods":
            return self.masters.creates(WorkerId(int(body["metadata"]["name"])))
        if method == "DELETE":
            return self.masters.deletes(WorkerId(int(name)), float(body["gracePeriodSeconds"]))
        if name not in things:
            return 404, {"message": f"{resource} {name} not found"}
        thing = copy.deepcopy(things[name])
        if method == "PATCH":
            wanted = (body.get("metadata") or {}).get("resourceVersion")
            if wanted and wanted != thing["metadata"]["resourceVersion"]:
                return 409, {"message": "the object has been modified"}
            thing = _merged(thing, body)
            meta = thing.pop("metadata")
            thing = self.put(resource, name, meta, thing)
        return 200, copy.deepcopy(thing)

    def watches(self, resource: str, query: dict[str, str], to: Pipe) -> None:
        name = query.get("fieldSelector", "").partition("=")[2]
        for told in self._history:
            version, kind, _, thing = told
            known = version <= int(query["resourceVersion"])
            if not known and kind == resource and name in ("", thing["metadata"]["name"]):
                to.put(_line(told))
        self._watches.append((resource, name, to))

    def follows(self, to: Pipe) -> None:
        """Send all further events of workers' pods to this pipe."""
        self._told.append(to)

    def tell(self, event: Any) -> None:
        for pipe in self._told:
            pipe.put(event)


class Transport(httpx.AsyncBaseTransport):
    """The HTTP transport from one process to the API server."""

    def __init__(self, cluster: Cluster, process: Process):
        self._cluster, self._process = cluster, process
        self._to_api = Pipe(cluster.network, process.host, cluster, lambda act: act())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        cluster, process = self._cluster, self._process
        query = dict(request.url.params)
        body = json.loads(request.content) if request.content else None
        answered: asyncio.Future[tuple[int, Any]] = process.create_future()
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        back = Pipe(cluster.network, cluster.host, process, lambda take: take())

        def answer() -> None:
            if "watch" in query and not cluster.down:
                resource = request.url.path.rpartition("/")[2]
                told: tuple[int, Any] = (200, None)
                back.put(lambda: None if answered.done() else answered.set_result(told))
                cluster.watches(
                    resource, query, Pipe(cluster.network, cluster.host, process, lines.put_nowait)
                )
            else:
                found = cluster.answers(request.method, request.url.path, query, body)
                back.put(lambda: None if answered.done() else answered.set_result(found))

        self._to_api.put(answer)
        status, said = await answered
        if said is None:
            return httpx.Response(status, stream=_Lines(lines))
        return httpx.Response(status, json=said)


class _Lines(httpx.AsyncByteStream):
    def __init__(self, lines: asyncio.Queue[bytes]):
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._lines.get()


class SimulatedApi(Api):
    """The shipped client on a simulated network."""

    def __init__(self, cluster: Cluster, process: Process):
        self._transport = Transport(cluster, process)
        config = KubeConfig.from_one(cluster=Server(server="http://api"), user=User(), namespace="n")
        super().__init__(Timing(), config)

    def _connect(self, single: SingleConfig, proxy: str | None, proxied: bool) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self._transport, base_url="http://api", trust_env=False)


def _selected(thing: dict[str, Any], query: dict[str, str]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    name = query.get("fieldSelector", "").partition("=")[2]
    return all(labels.get(key) == value for key, value in wanted) and name in ("", thing["metadata"]["name"])


def _line(told: tuple[int, str, str, dict[str, Any]]) -> bytes:
    return json.dumps({"type": told[2], "object": told[3]}).encode() + b"\n"


def _merged(thing: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(thing) if isinstance(thing, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
