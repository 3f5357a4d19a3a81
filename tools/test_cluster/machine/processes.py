# SPDX-License-Identifier: Apache-2.0
"""The cluster's processes, found by a mark in their environment and not by files of numbers.

A daemon carries its part's name in EDL_CLUSTER_PART, and what it starts inherits it (containerd's
shims, network plugins). What runs is what /proc says: a cluster that was only half started, or
whose starter was killed, is found whole, and no process id can belong to an unrelated process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .settings import STATE, ClusterError

MARK = "EDL_CLUSTER_PART"
LOGS = STATE / "logs"
START_SECONDS = 180  # a start takes a few; but a machine may have other work. An exit is reported at once
COMMAND_SECONDS = START_SECONDS + 60  # so that kubectl's own limit, whose message says more, comes first


def run(*command: object, text: str | None = None, ok: bool = True) -> str:
    """What the command prints.

    Raises:
        ClusterError: it is not there, failed or took too long, and `ok` asks that it does not.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        if ok:
            raise ClusterError(str(error)) from error
        return ""
    if ok and done.returncode:
        raise ClusterError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def start(part: str, *command: object, netns: str = "", **env: str) -> subprocess.Popen[bytes]:
    """Start a daemon, with a log; in another network, but with the machine's mounts, if one is named."""
    LOGS.mkdir(parents=True, exist_ok=True)
    # Not `ip netns exec`: it makes private mounts, and kubelet and containerd share theirs.
    inside = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
    with open(LOGS / f"{part.replace('/', '-')}.log", "ab") as log:
        return subprocess.Popen(
            [*inside, *(str(word) for word in command)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | env | {MARK: part},
        )


def marked() -> dict[int, str]:
    """The part of each process of ours that runs; a process that has ended (a zombie) has none."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue  # it has just ended
            for entry in environment.split(b"\0"):
                if entry.startswith(f"{MARK}=".encode()):
                    found[int(process.name)] = entry.decode().partition("=")[2]
    return found


def running() -> set[str]:
    """The parts that run, by their own program and not only by a child that outlived it."""
    return {part for pid, part in marked().items() if part.rpartition("/")[2].startswith(_program(pid))}


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "-"


def kill(find: Callable[[], Iterable[int]], seconds: float = 60) -> None:
    """Kill what is found until twice nothing is: what dies may just have started another, and a
    process has no environment for the moment in which it becomes another program.

    Raises:
        ClusterError: something is still there after `seconds`.
    """
    end = time.monotonic() + seconds
    none = 0
    while none < 2:
        pids = list(find())
        none = 0 if pids else none + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids and time.monotonic() > end:
            raise ClusterError(f"processes {pids} are still there {seconds:.0f} s after SIGKILL")
        time.sleep(0.02)


def wait(part: str, daemon: subprocess.Popen[bytes], ready: Callable[[], object]) -> None:
    """Wait until a part that was started is ready.

    Raises:
        ClusterError: it has ended, or is not ready after START_SECONDS; with the end of its log.
    """
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            if ready():
                return
        except (OSError, ClusterError):
            pass
        gone = daemon.poll() is not None
        if gone or time.monotonic() > end:
            why = "has ended" if gone else f"is not ready after {START_SECONDS} s"
            raise ClusterError(f"{part} {why}; the end of its log:\n{last_words(part)}")
        time.sleep(0.05)


def last_words(part: str, size: int = 2000) -> str:
    log = LOGS / f"{part.replace('/', '-')}.log"
    return log.read_text(errors="replace")[-size:] if log.exists() else "(it wrote none)"
