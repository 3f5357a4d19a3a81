# SPDX-License-Identifier: Apache-2.0
"""The memory and utilization of this worker's GPU, as NVML reports them. Needs the package `nvidia-ml-py`."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from typing import Any

from edl.contract.gpus import visible_gpus
from edl.contract.heartbeats import Gpu

SECONDS = 1.0  # between two reads


class GpuUsage:
    """Reads the use of the first GPU that this process sees, on a thread of its own.

    NVML's initialization takes seconds where no process keeps the driver loaded, and heartbeats must not wait
    for it. A worker trains without this report, so no failure of NVML is raised: then nothing is reported.
    """

    def __init__(self) -> None:
        self.last: Gpu | None = None  # None without a GPU, the package or the driver
        if visible := visible_gpus(os.environ):
            threading.Thread(target=self._read, args=(visible[0],), name="GPU usage", daemon=True).start()

    def _read(self, number: str) -> None:
        with contextlib.suppress(Exception):  # not installed, no driver, or a device that NVML does not know
            nvml: Any = importlib.import_module("pynvml")  # the module of nvidia-ml-py
            nvml.nvmlInit()
            by_number, by_name = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            device = by_number(int(number)) if number.isdecimal() else by_name(number)
            while True:
                self.last = _usage(nvml, device)
                time.sleep(SECONDS)


def _usage(nvml: Any, device: Any) -> Gpu | None:
    try:
        name = nvml.nvmlDeviceGetName(device)
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
    except Exception:  # the driver is gone, or a part of a GPU (MIG) has no such value
        return None
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return Gpu(text, int(memory.used), int(memory.total), busy)
