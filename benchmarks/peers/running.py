# SPDX-License-Identifier: Apache-2.0
"""The table of peers, and a running job of one of them, watched by what its workers write down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil

from benchmarks import environments
from benchmarks.recorder import ROOT
from edl.contract import artifacts
from edl.net.master_client import Client

HERE = Path(__file__).parent
MAX_WORKERS = 4
START_SECONDS = 120.0  # to wait for all workers of a new job


@dataclass(frozen=True)
class Peer:
    """One way to train the job.

    Args:
        environment: of `benchmarks.environments`.
        script: in this folder.
        packages: whose versions are recorded.
        command: what starts the job, before the script; {workers}, {most} and {folder} are replaced.
        plain: the peer that trains the same without fault tolerance.
        restarts: `one`: the driver starts a dead worker again; `all`: it then starts all of them again.
        grows: a third worker can join.
        settings: a note on what differs from the peer's defaults.
    """

    environment: str
    script: str
    packages: tuple[str, ...]
    command: tuple[str, ...] = ()
    plain: str = ""
    restarts: str = ""
    grows: bool = False
    settings: str = ""
    variables: dict[str, str] = field(default_factory=dict)


EDL_SET = "elastic.maxFailures=1000,training.batchSize=192,training.epochs=10000,local.threads=1"
HOROVODRUN = ("horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "{workers}")
ELASTIC = ("--min-np", "1", "--max-np", "{most}", "--host-discovery-script", "{folder}/discover.sh")
COOLDOWN = ("--blacklist-cooldown-range", "10", "100")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "{workers}", "--max-restarts", "100")
EDL_RUN = ("edl", "run", "--workers", "{workers}", "--output", "{folder}/job", "--set", EDL_SET)
PEERS = {
    "edl": Peer(
        "edl",
        "edl_job.py",
        ("edl-trainer", "tensorflow-cpu", "keras"),
        EDL_RUN,
        plain="plain Horovod",
        grows=True,
        settings="defaults",
    ),
    "edl.join": Peer(
        "frameworks",
        "edl_loop.py",
        ("edl-trainer", "torch"),
        (*EDL_RUN, "--script"),
        plain="plain DDP",
        grows=True,
        settings="defaults",
    ),
    "Horovod": Peer(
        "horovod",
        "horovod_job.py",
        ("horovod", "tensorflow-cpu"),
        (*HOROVODRUN, *ELASTIC, *COOLDOWN, "python"),
        plain="plain Horovod",
        grows=True,
        settings="a failed host is used again after 10 to 100 s (by default never); a commit each step",
    ),
    "torchft": Peer(
        "torch",
        "torchft_job.py",
        ("torchft", "torch"),
        restarts="one",
        plain="plain DDP",
        grows=True,
        settings="its own all-reduce; heartbeat 1 s, Gloo 1 s, tick 50 ms, join 1 s",
    ),
    "torchrun": Peer(
        "torch",
        "torchrun_job.py",
        ("torch",),
        (*TORCHRUN,),
        plain="plain DDP",
        settings="a snapshot each 10 steps; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (else: pytorch 135712)",
        variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "Ray Train": Peer(
        "ray",
        "ray_job.py",
        ("ray", "torch"),
        ("python",),
        plain="plain DDP",
        grows=True,
        settings="num_workers=(1, 3), a checkpoint each 10 steps, a new size each second (default: 60)",
        variables={"RAY_AUTH_MODE": "disabled"},  # all on this machine
    ),
    "MultiWorkerMirrored": Peer(
        "keras2",
        "keras2_job.py",
        ("tensorflow-cpu", "tf_keras"),
        restarts="all",
        plain="MultiWorkerMirrored without backup",
        settings="Keras 2 (with Keras 3 its fit fails); a backup each 20 steps; the bench starts all again",
    ),
}
BARE = {"BENCH_PLAIN": "1"}
PLAIN = {
    "plain Horovod": Peer(
        "horovod", "horovod_job.py", ("horovod", "tensorflow-cpu"), (*HOROVODRUN, "python"), variables=BARE
    ),
    "plain DDP": Peer("torch", "torchrun_job.py", ("torch",), TORCHRUN, variables=BARE),
    "MultiWorkerMirrored without backup": Peer(
        "keras2", "keras2_job.py", ("tensorflow-cpu", "tf_keras"), restarts="all", variables=BARE
    ),
}

# A job of edl beside the same one with an option: only if it is named.
OPTIONS = {
    "deterministic edl.join": replace(
        PEERS["edl.join"],
        command=(*EDL_RUN, "--deterministic", "--script"),
        plain="edl.join",
        settings="8 blocks of 24 records a step",
    )
}
ALL = PEERS | PLAIN | OPTIONS


@dataclass(frozen=True)
class Step:
    """A worker has completed a step, numbered from 0, in a ring of so many workers."""

    at: float
    pid: int
    number: int
    workers: int
    first: int
    count: int


class Running:
    """A job of a peer; all of its processes end with the block.

    Args:
        directory: for its files; a folder of its own is made in it.
        variables: more of the environment.
    """

    def __init__(self, name: str, directory: Path, workers: int, **variables: str):
        self.name, self.peer = name, ALL[name]
        self.workers = workers
        self.folder = directory / f"{self.peer.script.removesuffix('.py')}-{time.monotonic_ns()}"
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        self._log = open(self.log, "ab")
        self._python = environments.python(self.peer.environment)
        self._variables = {**self.peer.variables, **variables}
        self._ended = threading.Event()
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._prepare()
        if self.peer.command:
            self._launch([*self.peer.command, *self._script()])
        else:
            for index in range(workers):
                self._replicas[index] = self._replica(index)
            self._watch = threading.Thread(target=self._supervise, daemon=True)
            self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End every process with this job's folder in its environment: some have sessions of their own."""
        self._ended.set()
        if self._replicas:
            self._watch.join(10)
        for _ in range(3):
            mine = [process for process in psutil.process_iter() if self._owns(process)]
            for process in mine:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(mine, 10)
        self._log.close()

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("BENCH_DIR") == str(self.folder)
        except psutil.Error:
            return False

    @property
    def is_edl(self) -> bool:
        """Whether it has a journal, which says which record is in which step."""
        return self.peer.environment in ("edl", "frameworks")

    # --- how each kind starts

    def _prepare(self) -> None:
        self._ports = [_free_port() for _ in range(MAX_WORKERS)]
        if self.name == "Horovod":
            self.set_hosts(self.workers)
            script = self.folder / "discover.sh"
            script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
            script.chmod(0o755)
        elif self.name == "torchft":
            ticks = ("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "50")
            bind = f"127.0.0.1:{self._ports[0]}"
            self._launch(["torchft_lighthouse", "--min_replicas", "1", *ticks, "--bind", bind])
            self._variables |= {"TORCHFT_LIGHTHOUSE": f"http://{bind}"}
        elif self.name == "Ray Train":
            address = f"127.0.0.1:{self._ports[0]}"
            self._variables |= {"RAY_ADDRESS": address}
            self._ray_node(
                ["--head", "--port", str(self._ports[0]), "--include-dashboard=false"], self.workers
            )

    def set_hosts(self, hosts: int) -> None:
        """Name so many hosts, all of them this machine, where horovodrun needs no ssh."""
        addresses = [
            a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET
        ]
        others = [address for address in addresses if not address.startswith("127.")]
        names = ("localhost", "127.0.0.1", os.uname().nodename, *others)[:hosts]
        artifacts.write_whole(self.folder / "hosts", "".join(f"{name}:1\n" for name in names))

    def _ray_node(self, words: Sequence[str], cores: int) -> None:
        self._launch(["ray", "start", *words, "--num-cpus", str(cores), "--disable-usage-stats"]).wait(60)

    def _script(self) -> list[str]:
        return [str(HERE / self.peer.script)]

    def _launch(self, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        binaries = Path(self._python).parent
        most = max(self.workers, int(self._variables.get("BENCH_WORKERS", "0")))
        replaced = {"workers": str(self.workers), "most": str(most), "folder": str(self.folder)}
        words = [word.format(**replaced) for word in command]
        environment = {
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(HERE), *environments.folders(self.peer.environment)]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "BENCH_DIR": str(self.folder),
            "BENCH_WORKERS": str(most),
            **self._variables,
            **variables,
        }
        return subprocess.Popen(
            [str(binaries / words[0]), *words[1:]],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _replica(self, index: int) -> subprocess.Popen[bytes]:
        addresses = [f"127.0.0.1:{port}" for port in self._ports[: self.workers]]
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        variables = {"BENCH_INDEX": str(index), "TF_CONFIG": json.dumps(config)}
        return self._launch(["python", str(HERE / self.peer.script)], **variables)

    def _supervise(self) -> None:
        """Start dead workers again, as a launcher of a user's would."""
        while not self._ended.wait(0.1):
            dead = [index for index, process in self._replicas.items() if process.poll() is not None]
            if not dead:
                continue
            if self.peer.restarts == "all":
                for process in self._replicas.values():
                    process.kill()
                    process.wait()
                self._ports = [_free_port() for _ in range(MAX_WORKERS)]
                dead = list(self._replicas)
            for index in dead:
                self._replicas[index] = self._replica(index)

    def grow(self, workers: int) -> None:
        """Let one more worker join."""
        if self.is_edl:
            Client(artifacts.read_contact(self.folder / "job")).scale(workers)
        elif self.name == "Horovod":
            self.set_hosts(workers)
        elif self.name == "torchft":
            self._replicas[workers - 1] = self._replica(workers - 1)
        elif self.name == "Ray Train":
            self._ray_node(["--address", self._variables["RAY_ADDRESS"]], 1)

    # --- what it has done

    def steps(self) -> list[Step]:
        """All completed steps of all workers, in the order of time."""
        found = []
        for file in self.folder.glob("steps.*"):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    at, *rest = line.split()
                    found.append(Step(float(at), int(file.suffix[1:]), *map(int, rest)))
        return sorted(found, key=lambda step: step.at)

    def active(self, within: float = 1.0) -> list[int]:
        """The process ids of the workers that have made a step just now."""
        now = time.monotonic()
        return sorted({step.pid for step in self.steps() if step.at > now - within})

    def wait(self, workers: int, steps: int = 20, seconds: float = START_SECONDS) -> list[int]:
        """Until each of so many workers has made so many steps in a ring of them; their process ids.

        Raises:
            TimeoutError: it has not within that time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            made: dict[int, int] = {}
            for step in self.steps():
                if step.workers == workers:
                    made[step.pid] = made.get(step.pid, 0) + 1
            now = [pid for pid in self.active(2.0) if made.get(pid, 0) >= steps]
            if len(now) >= workers:
                return now
            time.sleep(0.1)
        raise TimeoutError(f"{self.name}: no {workers} workers after {seconds:g} s: {self.tail()}")

    def tail(self) -> str:
        """The end of the job's log."""
        return self.log.read_text(errors="replace")[-1500:]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal; the moment before it."""
    now = time.monotonic()
    os.kill(pid, number)
    return now


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
