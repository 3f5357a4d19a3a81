# SPDX-License-Identifier: Apache-2.0
"""Two masters, three workers and the API server, cut off from each other in all combinations: no ring comes
up under an older master after one came up under a newer one, and when all is whole again they train together.

Each master and each worker has a network namespace of its own, behind one router, all of them in one that the
test makes: what is cut is silent, as a lost cable is, and connections outlive it. The API is the small
server's, and so are pods; the test is their kubelet. EDL_SEED and EDL_ROUNDS choose which cuts, and how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edl.kubernetes.names import MASTER_PORT
from tests.process.conftest import ROOT
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.jobs.session_worker import Told, check_terms, told_in
from tests.support.kubernetes.master import TOKEN, command
from tests.support.kubernetes.small_release import Release, until

INSIDE = "EDL_TEST_NETWORK"
ROUTER = "10.9.0.1"
SEED = int(os.environ.get("EDL_SEED", "1"))
ROUNDS = int(os.environ.get("EDL_ROUNDS", "8"))
WORKERS = 3
A, B = "10.9.1.1", "10.9.1.2"  # the masters
NETWORK = f"""
set -e
ip link set lo up
ip address add {ROUTER}/32 dev lo
echo 1 > /proc/sys/net/ipv4/ip_forward
exec "$@"
"""


@pytest.mark.waits
@pytest.mark.timeout(400)
def test_masters_workers_and_the_api_are_cut_off_from_each_other() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    inner = f"{__file__}::{test_inside.__name__}"
    words = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "-p", "no:logging", inner]
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", NETWORK, "bash", *words],
        cwd=ROOT,
        env=os.environ | {INSIDE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout[-20_000:])
    assert done.returncode == 0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """Hosts behind the router, and what is cut between them."""

    def __init__(self) -> None:
        self.cuts: set[tuple[str, str]] = set()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, words: list[str], env: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
        """A process on a host of its own."""
        number = len(self._processes)
        with open(out, "ab") as log:
            waits = ["unshare", "--net", "bash", "-c", 'read -r; exec "$@"', "bash", *words]
            process = subprocess.Popen(waits, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self._processes.append(process)
        here, there = os.stat("/proc/self/ns/net"), f"/proc/{process.pid}/ns/net"
        while os.stat(there).st_ino == here.st_ino:  # until it has its own, in a millisecond or two
            os.sched_yield()
        ip("link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        ip("link", "set", f"v{number}", "up")
        ip("route", "replace", f"{host}/32", "dev", f"v{number}", "src", ROUTER)
        for line in (
            "link set lo up",
            "link set eth0 up",
            f"address add {host}/32 dev eth0",
            f"route add {ROUTER}/32 dev eth0",
            f"route add default via {ROUTER} dev eth0 onlink",
        ):
            subprocess.run(["nsenter", "-t", str(process.pid), "-n", "ip", *line.split()], check=True)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        return process

    def cut(self, cuts: set[tuple[str, str]]) -> None:
        """These cannot reach each other, and all others can."""
        for change, pairs in (("add", cuts - self.cuts), ("del", self.cuts - cuts)):
            for a, b in pairs:
                for one, other in ((a, b), (b, a)):
                    ip("rule", change, "pref", "10", "from", one, "to", other, "blackhole")
        self.cuts = cuts

    def are_cut(self, a: str, b: str) -> bool:
        return bool({(a, b), (b, a)} & self.cuts)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Cluster:
    """What Kubernetes does for the release: a Service, and a kubelet for the workers' pods."""

    def __init__(self, release: Release, network: Network, folder: Path):
        self._release, self._network, self.folder = release, network, folder
        self.hosts: dict[str, str] = {}  # by worker's pod
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._lead, ROUTER, 0) as server:
            self._address = f"{ROUTER}:{server.sockets[0].getsockname()[1]}"
            kubelet = asyncio.create_task(self._run_pods())
            try:
                yield
            finally:
                kubelet.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await kubelet

    async def _run_pods(self) -> None:
        environment = os.environ | {"EDL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        while True:
            for pod in set(self._release.pods) - self._running.keys():
                number = len(self._running)
                self.hosts[pod] = f"10.9.2.{number + 1}"
                worker = pod.rpartition("-")[2]
                words = [sys.executable, "-m", "tests.support.jobs.session_worker", self._address, worker]
                out = self.folder / f"worker-{worker}"
                self._running[pod] = self._network.start(self.hosts[pod], words, environment, out)
            for pod, process in self._running.items():
                if pod not in self._release.pods:
                    process.kill()
                elif (code := process.poll()) is not None and self._state(pod) == "Running":
                    self._release.server.end_pod(pod, code)
            await asyncio.sleep(0.05)

    def _state(self, pod: str) -> str:
        return str(self._release.server.pod(pod)["status"].get("phase", ""))

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As kube-proxy does on the worker's own node: to the master with the label, if the network lets
        it."""
        worker = writer.get_extra_info("peername")[0]
        with contextlib.suppress(OSError, IndexError, KeyError):
            pod = self._release.server.objects["pods"][self._release.acting[0]]
            master = pod["status"]["podIP"]
            there = await asyncio.open_connection(master, MASTER_PORT)
            await asyncio.gather(
                self._copy(worker, master, reader, there[1]), self._copy(worker, master, there[0], writer)
            )
        writer.close()

    async def _copy(
        self, worker: str, master: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self._network.are_cut(worker, master):
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.skipif(INSIDE not in os.environ, reason="runs in a network of its own")
@pytest.mark.timeout(380)
async def test_inside(tmp_path: Path) -> None:
    chance, network, server = random.Random(SEED), Network(), KubernetesApi(0.05, SEED, ROUTER)
    await server.up()
    release = Release(server, tmp_path)
    release.install(f"workers={WORKERS}", "elastic.joinDelaySeconds=0", "maxWorkers=16")
    masters = {"a": A, "b": B}
    cluster = Cluster(release, network, tmp_path)
    try:
        for name, host in masters.items():
            release.put_master(name, host)
            (tmp_path / name).mkdir()
            listen = f"{host}:{MASTER_PORT}"
            environment = {"KUBECONFIG": str(release.kubeconfig)}
            words, env = command(tmp_path / name, NAMESPACE, environment, name, listen, "127.0.0.1:8501")
            network.start(host, words, env, tmp_path / f"log-{name}")
            await until(lambda: release.acting, 60)  # the first one: which it is decides what a cut does
        async with cluster.running():
            await until(lambda: trains(cluster, 0.0), 60)
            lacking: list[set[str]] = []  # the API: each combination as often, in any order
            for number in range(ROUNDS):
                began = asyncio.get_running_loop().time()
                lacking = lacking or chance.sample([set(), {A}, {B}, {A, B}], 4)
                api = lacking.pop()
                living = [cluster.hosts[pod] for pod in release.pods if pod in cluster.hosts]
                pairs = {(m, w) for m in masters.values() for w in living if chance.random() < 0.4}
                print(f"round {number}: {sorted(api)} without the API, {sorted(pairs)}", flush=True)
                server.cut_off |= api
                network.cut(pairs)
                await asyncio.sleep(chance.uniform(1, 10))
                server.cut_off.clear()
                network.cut(set())
                healed = asyncio.get_running_loop().time()
                await until(lambda at=healed: trains(cluster, at) or settled(cluster, release), 60)
                print(f"  whole again after {asyncio.get_running_loop().time() - began:.1f} s", flush=True)
            told = told_in(tmp_path)
            rings = [t for t in told if t["what"] == "up"]
            check_terms(rings)
            for worker in {t["worker"] for t in told}:
                check_terms([t for t in told if t["worker"] == worker])
            terms = {t["term"] for t in rings}
            print(f"{len(rings)} rings were up, under the masters of terms {sorted(terms)}")
            assert len(terms) > 1, "no master followed a different one: choose another seed"
    finally:
        network.close()
        await server.close()
        for file in sorted(tmp_path.glob("log-*")):
            print(f"--- {file.name}\n{file.read_text()[-6000:]}")


def trains(cluster: Cluster, since: float) -> list[Told]:
    """A ring of all workers that has come up since then."""
    ups = [t for t in told_in(cluster.folder) if t["what"] == "up" and t["at"] >= since]
    return [t for t in ups if len(t["members"]) == WORKERS]


def settled(cluster: Cluster, release: Release) -> bool:
    """The last ring that came up has all workers, and they live."""
    ups = [t for t in told_in(cluster.folder) if t["what"] == "up"]
    members = {f"edl-worker-{number}" for number in ups[-1]["members"]}
    running = {p for p in release.pods if release.server.pod(p)["status"].get("phase") == "Running"}
    return len(members) == WORKERS and members == running
