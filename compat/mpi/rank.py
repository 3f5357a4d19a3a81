# SPDX-License-Identifier: Apache-2.0
"""A rank of `edl mpi` after the start: it runs the training processes of one place in the job.

The rank itself trains nothing. It starts a training process when the master needs a worker, waits for its
end, and starts the next one when the master needs a worker again. So the crash of a training process is no
death of a rank, which a launcher of MPI would answer by ending all of them. A rank whose worker is not needed
is a spare.

Each training process has its own session and log, like the workers of `edl run`. When a launcher ends its
ranks, which some do within a fraction of a second, the workers stay for the master's last checkpoint, and the
master ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edl.contract import artifacts
from edl.contract.exit_codes import ANNOUNCED, WorkerExit
from edl.contract.own_modules import module_command
from edl.contract.phases import ENDED, Phase, WorkerState
from edl.contract.workers import worker_environment
from edl.errors import EdlError
from edl.full_disk import log_file
from edl.net.master_client import Client
from edl.signals import to_handle

ASKED_SECONDS = 2.0  # for a job that ends as a whole: then the master ends the worker
LOOK_SECONDS = 10.0  # a status lists all workers: if each rank read every change, the master did little else
ENDING_SECONDS = 10.0  # for a training process to exit after its job
MAX_KILLS = 10  # of training processes in a row, without a step of the job in between
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


@dataclass(frozen=True)
class Job:
    """What rank 0 sends to all ranks.

    Args:
        contact: the master's address and the job's token.
        output: the absolute path of the job's output directory.
        max_failures: crashes of the training processes of one rank that are tolerated.
        one_host: whether all ranks are on one machine.
    """

    contact: artifacts.Contact
    output: str
    max_failures: int
    one_host: bool


class Place:
    """Runs the training processes of one rank.

    Args:
        rank: the number of this rank, for messages.
    """

    def __init__(self, job: Job, rank: int):
        self._job, self._rank, self._client = job, rank, Client(job.contact)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False  # to end
        self._crashes = self._kills = self._step = 0

    def run(self) -> str:
        """Run training processes until none is needed any more.

        Returns:
            Why this rank gives up; empty if the job has ended, or if the rank was asked to end.
        """
        try:
            self._client.status()  # an unreachable master is an error here, and the end of the job later
            while (worker := self._next_worker()) is not None:
                code = self._run(worker)
                if why := self._trouble(worker, code):
                    return why
        except (EdlError, OSError) as error:
            return str(error)
        return ""

    def handle_signals(self) -> None:
        """Let SIGTERM and its like end this rank, unless the process was started to ignore them."""
        for number in to_handle((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            signal.signal(number, lambda *_: self._ask())

    def close(self) -> None:
        """End the training process that still runs after the end of the job."""
        self._asked = True
        if (process := self._process) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            process.kill()

    # --- requests to end

    def _ask(self) -> None:
        again, self._asked = self._asked, True
        if self._process is None:
            raise SystemExit(0)  # a spare
        if again:
            self._process.kill()
        else:
            threading.Thread(target=self._leave, args=(self._process,), daemon=True).start()

    def _leave(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the worker to leave, unless the whole job is ending.

        A launcher asks all ranks at once, and rank 0 then lets the master stop the job with a checkpoint.
        Workers that left at the same time would take the state with them.
        """
        for status in self._client.follow(ASKED_SECONDS):
            if status["phase"] in (Phase.Ending, *ENDED):
                return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    # --- training processes

    def _next_worker(self) -> int | None:
        """Wait until a worker is needed; return its id, or None once the job has ended."""
        while not self._asked:
            for status in self._client.follow():
                if self._asked or status["phase"] in ENDED:
                    return None
                if status["step"] > self._step:
                    self._step, self._kills = status["step"], 0
                waiting = [w["id"] for w in status["workers"] if w["state"] == WorkerState.PENDING]
                if waiting:
                    return int(waiting[self._rank % len(waiting)])  # other ranks take the others
            with contextlib.suppress(EdlError):
                self._client.status()
                continue
            return None  # the master has exited
        return None

    def _run(self, worker: int) -> int:
        """Run a training process to its end; return its exit code, as in subprocess."""
        contact = self._job.contact
        arguments = ["--master", contact.address, "--worker", str(worker)]
        environment = {**os.environ, **worker_environment(os.environ), "PYTHONUNBUFFERED": "1"}
        environment |= {"EDL_TOKEN": contact.token}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if not self._job.one_host:
            host = contact.address.rpartition(":")[0].strip("[]")
            environment.setdefault("EDL_RING_INTERFACE", interface_of(address_towards(host)))
        logs = Path(self._job.output) / artifacts.LOGS
        logs.mkdir(parents=True, exist_ok=True)
        with open(log_file(logs / f"worker-{worker}.log"), "wb") as log:
            process = self._process = subprocess.Popen(
                [*module_command("edl.trainer"), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = self._wait(process, worker)
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it has left behind
        return code

    def _wait(self, process: subprocess.Popen[bytes], worker: int) -> int:
        """Wait for the end of a training process. Kill it if its worker is gone, but the process is not."""
        unneeded = 0
        while True:
            try:
                return process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                unneeded = 0 if self._is_needed(worker) else unneeded + 1
                if unneeded > 1:
                    process.kill()

    def _is_needed(self, worker: int) -> bool:
        try:
            status = self._client.status()
        except EdlError:
            return False
        return status["phase"] not in ENDED and any(w["id"] == worker for w in status["workers"])

    def _trouble(self, worker: int, code: int) -> str:
        """Count how a training process has ended; return why this rank starts no further one."""
        if self._asked or code in (WorkerExit.STOPPED, *ANNOUNCED):
            return ""
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        print(f"edl mpi: rank {self._rank}: worker {worker} has ended: {how}", file=sys.stderr, flush=True)
        if -code in OUTSIDE:
            self._kills += 1
            if self._kills >= MAX_KILLS:
                return f"{self._kills} training processes in a row were killed without a step in between"
        else:
            self._crashes += 1
            if self._crashes > self._job.max_failures:
                logs = Path(self._job.output) / artifacts.LOGS
                return (
                    f"its training processes crashed {self._crashes} times (elastic.maxFailures); see {logs}"
                )
        return ""


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches `host`.

    Raises:
        EdlError: the name of the host cannot be resolved, or no route leads to it.
    """
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EdlError(f"{host}: cannot be reached from {socket.gethostname()}: {error}") from error


def interface_of(address: str) -> str:
    """Return the network interface of this machine that has this address.

    Raises:
        EdlError: none has.
    """
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    raise EdlError(f"{address}: no network interface of {socket.gethostname()} has this address")
