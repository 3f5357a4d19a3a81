# SPDX-License-Identifier: Apache-2.0
"""The `edl` command, a job of it that lasts, and its processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from edl.contract import artifacts

ROOT = Path(__file__).parents[3]
EDL = [str(Path(sys.executable).with_name("edl"))]
LONG = ["--set", "workers=2,training.epochs=1000"]


def edl(*arguments: str, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EDL, *arguments], capture_output=True, text=True, check=check, timeout=170, **options
    )


@contextlib.contextmanager
def a_long_job(*sets: str, model: str = "counting") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`edl run` of a job that does not end by itself, once its ring trains."""
    job = subprocess.Popen(
        [*EDL, "run", model, *LONG, *[f"--set={s}" for s in sets], "--output", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    try:
        for line in job.stdout:
            if "ring 0 -> " in line:
                break
        yield job, Path("job")
    finally:
        job.terminate()
        job.communicate(timeout=60)


def processes_of(output: Path) -> list[int]:
    """The master and the workers of a job, as the journal names them."""
    pids = [artifacts.read_contact(output).pid]
    for line in (output / artifacts.JOURNAL).read_text().splitlines():
        event = json.loads(line).get("event", {})
        if event.get("type") == "Seen":
            pids.append(int(event["handle"]))
    return pids


def all_gone(pids: list[int], seconds: float = 20) -> bool:
    _, alive = psutil.wait_procs([p for pid in pids if (p := _process(pid))], timeout=seconds)
    return not alive


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None
