# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, and how many workers fit on them (`local.gpusPerWorker`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final, Literal

from edl.formatting import how_many

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
HIDDEN: Final = "-1"  # as VISIBLE: the process sees no GPU
AUTO: Final = "auto"
_DEVICE = re.compile(r"nvidia[0-9]+")
_ROUNDING = 1e-9  # 1 / 0.1 may be a little less than 10

GpusPerWorker = Literal["auto"] | float


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment may use, as tokens of CUDA_VISIBLE_DEVICES.

    As in CUDA, the list in the variable ends before its first empty or negative token.

    Args:
        devices: the folder with the device files of NVIDIA's driver.
    """
    if (said := environment.get(VISIBLE)) is None:
        found = sum(_DEVICE.fullmatch(path.name) is not None for path in devices.glob("nvidia*"))
        return [str(number) for number in range(found)]
    tokens = [token.strip() for token in said.split(",")]
    end = next((n for n, token in enumerate(tokens) if not token or token.startswith("-")), len(tokens))
    return list(dict.fromkeys(tokens[:end]))


def use_gpu(environment: MutableMapping[str, str], gpu: str, nccl_host: str) -> None:
    """Set the variables of a worker that the master has placed on a GPU. Empty texts change nothing.

    Args:
        gpu: a token of CUDA_VISIBLE_DEVICES.
        nccl_host: the name of the worker's host to NCCL, unless the user has set one.
    """
    if gpu:
        environment[VISIBLE] = gpu
    if nccl_host:
        environment.setdefault("NCCL_HOSTID", nccl_host)


def workers_per_gpu(gpus_per_worker: GpusPerWorker) -> int | None:
    """How many workers may use one GPU at the same time; None: any number."""
    if isinstance(gpus_per_worker, str):
        return None
    return int(1 / gpus_per_worker + _ROUNDING) if gpus_per_worker else 0


def too_few_gpus(gpus_per_worker: GpusPerWorker, workers: int, environment: Mapping[str, str]) -> str:
    """Why so many workers cannot run on this machine at the same time; empty if they can."""
    each = workers_per_gpu(gpus_per_worker)
    if not each:
        return ""
    devices = visible_gpus(environment)
    if len(devices) * each >= workers and devices:
        return ""
    said = environment.get(VISIBLE)
    here = "this machine" if said is None else f"{VISIBLE}={said}"
    asked = f"local.gpusPerWorker is {gpus_per_worker:g}, and {here} has"
    if not devices:
        return f"{asked} no GPU: set local.gpusPerWorker=0 to train on the CPU"
    enough = how_many(len(devices) * each, "worker")
    return f"{asked} {how_many(len(devices), 'GPU')}, enough for {enough}, not for workers={workers}"
