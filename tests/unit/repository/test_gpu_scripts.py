# SPDX-License-Identifier: Apache-2.0
"""The scripts that only a machine with a GPU runs: what can be checked of them without one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.step_profile import KERNELS, device_time, table

ROOT = Path(__file__).parents[3]
SOURCED = re.compile(
    r'^\s*\. "\$(?:\(dirname "\$0"\)|kit)(/[^"]+)"', re.M
)  # $kit is the folder of scripts/gpu
PICOSECONDS = 1_000_000_000  # in a millisecond


def test_the_files_that_shell_scripts_read_exist() -> None:
    paths = [path for folder in ("scripts", "tools", "docker") for path in (ROOT / folder).rglob("*")]
    scripts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    read = [
        (path, f"{path.parent}{name}") for path, text in scripts.items() for name in SOURCED.findall(text)
    ]
    assert ROOT / "scripts/gpu/run.sh" in dict(read)
    assert not [(path, name) for path, name in read if not Path(name).is_file()]


def plane(name: str, lines: dict[str, list[tuple[str, int, int]]]) -> Any:
    """A plane of a trace: events (name, begin, end) in ms, by line."""
    names = sorted({event[0] for events in lines.values() for event in events})
    made = [
        SimpleNamespace(
            name=line,
            timestamp_ns=0,
            events=[
                SimpleNamespace(
                    metadata_id=names.index(event),
                    offset_ps=begin * PICOSECONDS,
                    duration_ps=(end - begin) * PICOSECONDS,
                )
                for event, begin, end in events
            ],
        )
        for line, events in lines.items()
    ]
    metadata = {number: SimpleNamespace(name=event) for number, event in enumerate(names)}
    return SimpleNamespace(name=name, lines=made, event_metadata=metadata)


def test_a_profile_tells_kernels_copies_and_gaps_apart() -> None:
    gpu = plane(
        "/device:GPU:0",
        {
            "Stream #1(Kernel)": [("matmul", 0, 10), ("relu", 8, 12), ("matmul", 30, 40)],
            "Stream #2(MemcpyH2D)": [("MemcpyH2D", 10, 20)],
            "Stream #3(MemcpyD2H)": [("MemcpyD2H", 45, 50)],
            "TensorFlow Ops": [("MatMul", 0, 50)],
        },
    )
    host = plane("/host:CPU", {"python": [("dense/MatMul:MatMul", 0, 100)]})
    found = device_time(SimpleNamespace(planes=[host, gpu]))
    assert found.busy == pytest.approx({KERNELS: 22.0, "MemcpyH2D": 10.0, "MemcpyD2H": 5.0})
    assert found.overlap == pytest.approx(2.0), "a copy begins while a kernel runs"
    assert found.gaps == pytest.approx(15.0)
    assert dict(found.names) == pytest.approx({"matmul": 20.0, "relu": 4.0})
    assert "11.000 (1.5)" in table({"edl": (found, 2)}), "kernels of one of two steps"


def test_a_profile_without_a_gpu_is_of_the_operations_of_the_cpu() -> None:
    events = [("dense/MatMul:MatMul", 0, 4), ("$worker.py:7 run", 0, 100), ("Executor::Run", 0, 50)]
    found = device_time(SimpleNamespace(planes=[plane("/host:CPU", {"threads": events})]))
    assert found.busy == pytest.approx({KERNELS: 4.0})


def test_a_trace_without_events_of_the_gpu_is_refused() -> None:
    trace = SimpleNamespace(planes=[plane("/device:GPU:0", {"Steps": [("1", 0, 9)]})])
    with pytest.raises(ValueError, match="no events of /device:GPU:"):
        device_time(trace)
