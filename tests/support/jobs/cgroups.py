# SPDX-License-Identifier: Apache-2.0
"""A cgroup with a memory limit, as that of a container: of version 1 or 2, as this machine has it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1 = ROOT / "memory"


class Cgroup:
    """A cgroup. Processes that are started with `enter` as `preexec_fn` are in it, with their children."""

    def __init__(self, path: Path):
        self.path = path

    def enter(self) -> None:
        """Move this process into the cgroup."""
        (self.path / "cgroup.procs").write_text("0")

    @property
    def peak(self) -> int:
        """The largest memory so far, in bytes; some of it is cached files."""
        v1 = self.path / "memory.max_usage_in_bytes"
        return int((v1 if v1.exists() else self.path / "memory.peak").read_text())

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed at the limit."""
        v1 = self.path / "memory.oom_control"
        lines = (v1 if v1.exists() else self.path / "memory.events").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def limited(nbytes: int) -> Iterator[Cgroup]:
    """Make a cgroup with this limit, and remove it and its processes at the end.

    Raises:
        OSError: this machine lets this user make none.
    """
    name = f"edl-test-{os.getpid()}"
    if V1.is_dir():
        path, limit = V1 / name, "memory.limit_in_bytes"
    else:
        (ROOT / "cgroup.subtree_control").write_text("+memory")
        path, limit = ROOT / name, "memory.max"
    path.mkdir()
    try:
        (path / limit).write_text(str(nbytes))
        yield Cgroup(path)
    finally:
        while pids := (path / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        path.rmdir()
