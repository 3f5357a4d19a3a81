# SPDX-License-Identifier: Apache-2.0
"""The memory and utilization of this worker's GPU, as NVML reports them. Needs the package `nvidia-ml-py`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from edl.contract.gpus import visible_gpus
from edl.contract.heartbeats import Gpu


class GpuUsage:
    """Reads the use of the first GPU that this process sees.

    A worker trains without this report, so no failure of NVML is raised: then nothing is reported.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._device: Any = None
        visible = visible_gpus(os.environ)
        if not visible:
            return
        try:
            nvml: Any = importlib.import_module("pynvml")  # the module of nvidia-ml-py
            nvml.nvmlInit()
            number = visible[0]
            by_number, by_name = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            self._device = by_number(int(number)) if number.isdecimal() else by_name(number)
            self._nvml = nvml
        except Exception:  # not installed, no driver, or a device that NVML does not know
            return

    def read(self) -> Gpu | None:
        """Read the present use; None without a GPU, the package or the driver."""
        if self._nvml is None:
            return None
        try:
            name = self._nvml.nvmlDeviceGetName(self._device)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._device)
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        except Exception:  # the driver is gone, or a part of a GPU (MIG) has no such value
            return None
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        return Gpu(text, int(memory.used), int(memory.total), busy)
