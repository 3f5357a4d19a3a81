# SPDX-License-Identifier: Apache-2.0
"""`worker.gpuMemory` is what TensorFlow configures its GPUs with. No GPU is needed: none is initialized."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from edl.trainer.runtime.gpu_memory import set_gpu_memory


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> context.Context:
    """A fresh context of TensorFlow, whose configuration names so many GPUs."""
    devices = [b"/physical_device:CPU:0", *(f"/physical_device:GPU:{n}".encode() for n in range(gpus))]
    monkeypatch.setattr(context.pywrap_tfe, "TF_ListPhysicalDevices", lambda: devices)
    fresh = context.Context()
    monkeypatch.setattr(context, "_context", fresh)
    assert len(tf.config.list_physical_devices("GPU")) == gpus
    return fresh


@pytest.mark.parametrize(
    ("allowed", "grows", "limits"),
    [("growth", True, []), ("all", False, []), (2048, False, [2048.0, 2048.0])],
)
def test_each_gpu_is_configured_before_the_first_operation(
    allowed: str | int, grows: bool, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = machine(monkeypatch, gpus=2)
    set_gpu_memory(allowed)
    options: Any = fresh.config.gpu_options
    assert options.allow_growth == grows
    devices = options.experimental.virtual_devices
    assert [limit for device in devices for limit in device.memory_limit_mb] == limits


@pytest.mark.parametrize("allowed", ["growth", "all", 2048])
def test_a_machine_without_gpus_needs_no_setting(allowed: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = machine(monkeypatch, gpus=0)
    before = fresh.config.SerializeToString()
    set_gpu_memory(allowed)
    assert fresh.config.SerializeToString() == before


def test_a_setting_that_comes_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = machine(monkeypatch, gpus=1)
    monkeypatch.setattr(fresh, "_context_handle", object())  # what the first operation creates
    with pytest.raises(RuntimeError, match="cannot be modified after being initialized"):
        set_gpu_memory(2048)
