# SPDX-License-Identifier: Apache-2.0
"""The use of a worker's GPU, from NVML to the status, with a fake NVML."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edl.cli.shared.display import workers_table
from edl.contract.heartbeats import Gpu, Usage
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.core import facts, view
from edl.master.rpc.messages import event_of
from edl.trainer.runtime import gpu_usage
from edl.trainer.runtime.gpu_usage import GpuUsage
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from tests.support.jobs.stories import Story

MIB = 1 << 20
SECONDS = 60.0
DEVICES = {0: ("NVIDIA A", 1), 1: ("NVIDIA B", 2), "GPU-c": (b"NVIDIA C", 3)}


class Nvml:
    """The functions of `pynvml` that a worker calls, for the GPUs in DEVICES."""

    def __init__(self) -> None:
        self.fails = False
        self.answers = threading.Event()
        self.answers.set()

    def nvmlInit(self) -> None:
        self.answers.wait(SECONDS)

    def _find(self, key: Any) -> Any:
        return DEVICES[key]

    nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = _find

    def nvmlDeviceGetName(self, device: Any) -> Any:
        return device[0]

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        if self.fails:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(used=device[1] * 100 * MIB, total=1000 * MIB)

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> Any:
        return SimpleNamespace(gpu=37, memory=5)


@pytest.mark.parametrize(
    ("visible", "nvml", "found"),
    [
        ("1,0", Nvml(), Gpu("NVIDIA B", 200 * MIB, 1000 * MIB, 0.37)),
        ("GPU-c", Nvml(), Gpu("NVIDIA C", 300 * MIB, 1000 * MIB, 0.37)),
        ("-1", Nvml(), None),
        ("7", Nvml(), None),  # unknown to NVML
        ("0", None, None),  # without the package
    ],
)
def test_the_first_visible_gpu_is_read(
    visible: str, nvml: Nvml | None, found: Gpu | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    others, usage = threading.active_count(), GpuUsage()
    while usage.last is None and threading.active_count() > others:
        time.sleep(0.001)
    assert usage.last == found


async def test_a_driver_that_does_not_answer_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpu_usage, "SECONDS", 0.001)
    nvml, stream = Nvml(), MasterStream("127.0.0.1:1", "token", 0, "run")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nvml.answers.clear()
    beats = asyncio.Queue[Gpu | None]()
    monkeypatch.setattr(stream.session, "heartbeat", lambda rate, usage: beats.put_nowait(usage.gpu))
    sending = asyncio.create_task(stream._heartbeats(0.01))
    async with asyncio.timeout(SECONDS / 2):
        assert await beats.get() is None
        nvml.answers.set()
        for nvml.fails in False, True, False:  # it is read again when NVML answers again
            while (await beats.get() is None) != nvml.fails:
                pass
    sending.cancel()
    stream._loop.close()


def printed(status: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(workers_table(status))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_status_shows_each_workers_gpu() -> None:
    sent: list[pb.FromWorker] = []
    Session(0, sent.append, threading.Event()).heartbeat(
        1.0, Usage(MIB, Gpu("NVIDIA B", 200 * MIB, 1000 * MIB, 0.37))
    )
    beat = event_of(WorkerId(0), pb.FromWorker.FromString(sent[0].SerializeToString()))
    assert isinstance(beat, facts.Heartbeat)
    story = Story(workers=2).running(0)
    without = view.status(story.job, story.now)
    assert [w["gpu"] for w in without["workers"]] == [None, None] and "GPU" not in printed(without)
    told = view.status(story.job, story.now, {WorkerId(0): beat})
    assert told["workers"][0]["gpu"]["busy"] == 0.37 and told["workers"][1]["gpu"] is None
    assert "NVIDIA B" in printed(told) and "200 of 1,000 MiB" in printed(told) and "37 %" in printed(told)
