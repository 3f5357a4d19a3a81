"""300 workers, half of them killed per minute: the real master, pods of kwok, workers that only talk.

EDL_SCALE_MINUTES says for how long they are killed (half a minute by default, 5 for the whole of it). What it
cost is printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
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
from tests.kubernetes_driver import job_values
from tests.kubernetes_master import TOKEN, MasterProcess, master

WORKERS = 300
LAYOUT = pb.Layout(records=1_000_000, block=1, shards=1)
MINUTES = float(os.environ.get("EDL_SCALE_MINUTES", "0.5"))
# Nobody is silent and nobody is late here: this process is busy with 300 workers, and that is no news.
SETS = [
    f"workers={WORKERS}",
    f"maxWorkers={WORKERS}",
    "elastic.heartbeatTimeoutSeconds=9999",
    "elastic.startupTimeoutSeconds=9999",
]
POD = {
    "apiVersion": "v1", "kind": "Pod",
    "spec": {
        "restartPolicy": "Never", "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
        "containers": [{"name": "worker", "image": "none"}],
    },
}  # fmt: skip


@pytest.mark.timeout(300 + 60 * MINUTES)
async def test_three_hundred_workers_half_of_them_killed_each_minute(
    cluster: Cluster, fake_nodes: Callable[[int], str], namespace: Namespace, tmp_path: Path
) -> None:
    await asyncio.to_thread(fake_nodes, 10)
    data = {"values.json": json.dumps(job_values(*SETS)), "worker.yaml": yaml.safe_dump(POD)}
    for name, content in (("edl-job", data), ("edl-status", {})):
        namespace.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": content}
        )
    group = "coordination.k8s.io/v1"
    namespace.apply({"apiVersion": group, "kind": "Lease", "metadata": {"name": "edl-master"}})
    crowd = Crowd(cluster, namespace)
    with master(tmp_path, namespace.name, cluster.env) as process:
        try:
            began = Cost(process)
            crowd.start(await process.address())
            await crowd.until(lambda: crowd.talking == WORKERS, 180)
            print(f"\n{WORKERS} workers are there: {Cost(process).since(began)}")
            began, lowest = Cost(process), WORKERS
            loop = asyncio.get_running_loop()
            for number in range(round(MINUTES * WORKERS / 2)):
                await asyncio.sleep(began.at + number * 60 / (WORKERS / 2) - loop.time())
                await crowd.kill_one()
                lowest = min(lowest, crowd.talking)
            cost = Cost(process).since(began)
            print(f"{crowd.killed} were killed, and never fewer than {lowest} there: {cost}")
            began = Cost(process)
            await crowd.until(lambda: crowd.talking == WORKERS == len(crowd.running()), 90)
            while process.pages.value("edl_workers", state="member") != WORKERS:
                assert loop.time() - began.at < 90, "they are there, and not in the ring"
                await asyncio.sleep(0.1)
            print(f"all are there again: {Cost(process).since(began)}")
            await asyncio.sleep(5)
            assert crowd.talking == WORKERS == len(crowd.running()), "desired and actual are one, and stay it"
            assert crowd.killed == round(MINUTES * WORKERS / 2)
            assert len(crowd.uids) == WORKERS + crowd.killed, "for each that was killed, one was made"
            assert all(len(uids) == 1 for uids in crowd.uids.values()), "no name is used twice"
            assert process.pages.value("edl_workers", state="member") == WORKERS
        finally:
            await crowd.close()


class Cost:
    """What a master has used by now."""

    def __init__(self, process: MasterProcess):
        self.at = asyncio.get_running_loop().time()
        with process.process.oneshot():
            used, self._mebibytes = process.process.cpu_times(), process.process.memory_info().rss >> 20
        self._cpu = used.user + used.system
        self._requests = process.pages.value("edl_kubernetes_requests_total")

    def since(self, began: Cost) -> str:
        seconds = self.at - began.at
        cpu, requests = self._cpu - began._cpu, self._requests - began._requests
        return (
            f"{seconds:.0f} s, {cpu:.1f} s of CPU ({cpu / seconds:.2f} of one), {self._mebibytes} MiB, "
            f"{requests:.0f} requests ({requests / seconds:.1f} a second)"
        )


class Crowd:
    """The workers: for each pod that runs, somebody who talks to the master as a worker does."""

    def __init__(self, cluster: Cluster, namespace: Namespace):
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
        options = (("edl.channel", number) for number in range(8))  # a connection has 100 streams at most
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
