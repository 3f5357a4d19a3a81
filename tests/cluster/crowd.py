# SPDX-License-Identifier: Apache-2.0
"""A master and as many workers as one likes: pods of kwok, which only seem to run, and for each a client that
talks to the master as a worker does. The master is the real one, and so is the API server."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import yaml
from lightkube.config.kubeconfig import KubeConfig

import edl
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.kubernetes import pods
from edl.kubernetes.client import Api
from edl.kubernetes.informer import Informer
from edl.kubernetes.timing import Timing
from tests.cluster.cluster import Cluster, Namespace
from tests.support.kubernetes.driver import job_values
from tests.support.kubernetes.master import TOKEN, MasterProcess, master

LAYOUT = pb.Layout(records=1_000_000, block=1, shards=1)
PODS = 50  # of a fake node, which has room for twice as many: those that end take some
STREAMS = 50  # of one connection; a server allows a hundred
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "spec": {
        "restartPolicy": "Never",
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
        "containers": [{"name": "worker", "image": "none"}],
    },
}


@asynccontextmanager
async def fleet(
    cluster: Cluster, namespace: Namespace, output: Path, workers: int
) -> AsyncIterator[tuple[Crowd, MasterProcess]]:
    """A master that wants so many workers, and the crowd that they will be, after `start`.

    There have to be fake nodes for them: one for PODS.
    """
    # No worker is silent or late here: this process is busy with all workers, and that is no news.
    sets = (
        f"workers={workers}",
        f"maxWorkers={workers}",
        "elastic.heartbeatTimeoutSeconds=9999",
        "elastic.startupTimeoutSeconds=9999",
    )
    data = {"values.json": json.dumps(job_values(*sets)), "worker.yaml": yaml.safe_dump(POD)}
    for name, content in (("edl-job", data), ("edl-status", {})):
        namespace.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": content}
        )
    group = "coordination.k8s.io/v1"
    namespace.apply({"apiVersion": group, "kind": "Lease", "metadata": {"name": "edl-master"}})
    crowd = Crowd(cluster, namespace, workers)
    with master(output, namespace.name, cluster.env) as process:
        try:
            yield crowd, process
        finally:
            await crowd.close()


class Cost:
    """What a master has used so far."""

    def __init__(self, process: MasterProcess):
        self.at = asyncio.get_running_loop().time()
        with process.process.oneshot():
            used, self._mebibytes = process.process.cpu_times(), process.process.memory_info().rss >> 20
        self._cpu = used.user + used.system
        self._requests = process.pages.value("edl_kubernetes_requests_total")

    def since(self, began: Cost) -> Spent:
        cpu, requests = self._cpu - began._cpu, self._requests - began._requests
        return Spent(self.at - began.at, cpu, self._mebibytes, requests)


@dataclass(frozen=True)
class Spent:
    """By a master, in some time.

    Args:
        seconds: that have passed.
        cpu: seconds of one core.
        mebibytes: resident at the end.
        requests: to the API server.
    """

    seconds: float
    cpu: float
    mebibytes: int
    requests: float

    def __str__(self) -> str:
        share, often = self.cpu / self.seconds, self.requests / self.seconds
        return (
            f"{self.seconds:.0f} s, {self.cpu:.1f} s of CPU ({share:.2f} of one), {self.mebibytes} MiB, "
            f"{self.requests:.0f} requests ({often:.1f} a second)"
        )


class Crowd:
    """The workers: for each pod that runs, a client that calls the master as a worker does."""

    def __init__(self, cluster: Cluster, namespace: Namespace, workers: int):
        self._workers = workers
        self._api = Api(Timing(write=0.01, burst=100), KubeConfig.from_file(cluster.kubeconfig))
        self._path = f"/api/v1/namespaces/{namespace.name}/pods"
        self._mirror = Informer(self._api, self._path, {"labelSelector": pods.selector("edl")}, self._changed)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of workers, by UID
        self._talking: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._news = asyncio.Event()
        self.uids: defaultdict[str, set[str]] = defaultdict(set)  # of all that were ever made, by name
        self._killed: set[str] = set()  # UIDs

    def start(self, target: str) -> None:
        """Be the workers of the master there."""
        options = (("edl.channel", number) for number in range(-(-self._workers // STREAMS)))
        self._channels = [grpc.aio.insecure_channel(target, options=[option]) for option in options]
        self._watching = asyncio.create_task(self._mirror.run())

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
        await self._api.close()

    @property
    def killed(self) -> int:
        return len(self._killed)

    @property
    def talking(self) -> int:
        return len(self._talking)

    def running(self) -> list[pods.Pod]:
        return [p for p in self._mirror.objects.values() if pods.running(p) and not pods.deleting(p)]

    async def until(self, so: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not so():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{self.talking} talk, {len(self.running())} run") from None

    async def kill_one(self) -> None:
        # The watch may not have told of the last ones yet.
        pod = random.choice([p for p in self.running() if pods.uid(p) not in self._killed])
        await self._api.delete(f"{self._path}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        self._killed.add(pods.uid(pod))

    def _changed(self, pod: pods.Pod, vanished: bool) -> None:
        self._news.set()
        uid = pods.uid(pod)
        self.uids[pod["metadata"]["name"]].add(uid)
        if vanished or pods.deleting(pod):
            self._talking.discard(uid)
            if task := self._tasks.pop(uid, None):
                task.cancel()
        elif pods.running(pod) and uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._live(uid, *pods.of(pod)))

    async def _live(self, uid: str, run_id: str, worker: int | None) -> None:
        """A worker that is warm at once, and whose rings do nothing but form and break."""
        assert worker is not None
        say = asyncio.Queue[pb.FromWorker]()

        async def words() -> AsyncIterator[pb.FromWorker]:
            while True:
                yield await say.get()

        say.put_nowait(pb.FromWorker(run_id=run_id, hello=pb.Hello(worker=worker, version=edl.__version__)))
        stub = rpc.MasterStub(self._channels[worker % len(self._channels)])
        async for heard in stub.Work(words(), metadata=[("authorization", f"Bearer {TOKEN}")]):
            about = {"run_id": run_id, "generation": heard.generation}
            match heard.WhichOneof("body"):
                case "welcome":
                    say.put_nowait(pb.FromWorker(run_id=run_id, ready=pb.Ready(layout=LAYOUT)))
                    self._talking.add(uid)
                    self._news.set()
                case "form":
                    say.put_nowait(pb.FromWorker(**about, joined_ring=pb.JoinedRing(step=1)))
                case "leave" | "cut" as why:
                    broken = "cut" if why == "cut" else ""
                    say.put_nowait(
                        pb.FromWorker(**about, left_ring=pb.LeftRing(step=1, has_state=True, broken=broken))
                    )
