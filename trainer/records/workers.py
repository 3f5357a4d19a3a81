# SPDX-License-Identifier: Apache-2.0
"""How many reader processes a worker has (data.workers)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from edl.data.objects.batched import Batched
from edl.data.objects.in_memory import Arrays
from edl.data.objects.indexed import Indexed
from edl.data.objects.selected import Selected
from edl.data.objects.split import Subset

CORES_EACH, MAXIMUM = 4, 4  # with data.workers=auto: cores of a worker for each reader; readers
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds, per period


def reader_count(workers: Literal["auto"] | int, reader: Any, cores: int) -> int:
    """Return the number of reader processes; 0 to read on a thread of the worker.

    Args:
        workers: data.workers.
        reader: the training's records.
        cores: the cores that this worker can use.
    """
    if workers != "auto":
        return workers
    return min(cores // CORES_EACH, MAXIMUM) if _reads_files(reader) else 0


def own_cores(sharing: int, limit: Path = CPU_LIMIT) -> int:
    """Return the number of cores that this worker can use.

    Args:
        sharing: the number of workers on this machine.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup of version 2 that could limit it
        pass
    return int(cores) // sharing


def _reads_files(reader: Any) -> bool:
    """Whether each process that opens these records takes little memory: edl reads them from files."""
    while isinstance(reader, Selected | Subset):
        reader = reader.underlying
    return type(reader).__module__.startswith("edl.data.") and not isinstance(
        reader, Arrays | Batched | Indexed
    )
