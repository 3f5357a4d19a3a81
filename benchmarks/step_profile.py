# SPDX-License-Identifier: Apache-2.0
"""Trace steps of edl and of `keras.fit` with TensorFlow's profiler, and print what the device does in one.

    python -m benchmarks.step_profile MODEL DIRECTORY [--batch N] [--precision P] [--xla] [--peer SIDE]

The trace of each side stays in DIRECTORY/SIDE, for TensorBoard's profiler. What is printed is read from the
trace itself, because the analysis of TensorBoard is a package of its own:

kernels, copies   the time in which at least one of them runs; copies to the device (H2D), to the host (D2H)
overlap           the time in which events of different kinds run, such as a kernel and a copy
gaps              the rest of the time from the first event to the last one: the device waits for the program

Without a GPU, the operations of TensorFlow's threads on the CPU are the kernels, and there are no copies.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.steady_state import Steady, measured

GPU, CPU = (
    "/device:GPU:",
    "/host:CPU",
)  # begins of the names of planes; a trace has a plane for each device
STREAM = "Stream"  # begin of the name of a line of a GPU; lines with other names repeat its events in groups
COPIES = (
    "MemcpyH2D",
    "MemcpyD2H",
)  # rows of each table; further ones (MemcpyD2D, Memset) if a trace has them
KERNELS, TOP = "kernels", 8
PICOSECONDS = 1e-9  # in milliseconds
TRACED_SECONDS = 0.2  # long enough for many steps, short enough for a trace of some MB


@dataclass
class DeviceTime:
    """What a device did while it was traced. All times in milliseconds.

    Args:
        busy: the time in which at least one event of a kind ran, by kind.
        events: the number of events, by kind.
        overlap: the time in which events of different kinds ran, counted once for each further kind.
        gaps: the time from the first event to the last one in which no event ran.
        names: the sum of the times of all kernels of a name.
    """

    busy: dict[str, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    overlap: float = 0.0
    gaps: float = 0.0
    names: Counter[str] = field(default_factory=Counter)


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of what intervals (begin, end) cover together."""
    covered, reached = 0, None
    for begin, end in sorted(intervals):
        start = begin if reached is None else max(begin, reached)
        covered += max(0, end - start)
        reached = end if reached is None else max(reached, end)
    return covered


def device_time(space: Any) -> DeviceTime:
    """Add up the events of the GPU in a trace (an XSpace), or those of the CPU if it has no GPU.

    Raises:
        ValueError: the trace has no event of the device.
    """
    gpus = [plane for plane in space.planes if plane.name.startswith(GPU)]
    planes = gpus or [plane for plane in space.planes if plane.name.startswith(CPU)]
    found: dict[str, list[tuple[int, int]]] = {}
    result = DeviceTime()
    for plane in planes:
        for line in plane.lines:
            if gpus and not line.name.startswith(STREAM):
                continue
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if not gpus and not is_operation(name):
                    continue
                kind = name if name.startswith(("Memcpy", "Memset")) else KERNELS
                begin = line.timestamp_ns * 1000 + event.offset_ps
                found.setdefault(kind, []).append((begin, begin + event.duration_ps))
                result.events[kind] += 1
                if kind == KERNELS:
                    result.names[name] += event.duration_ps * PICOSECONDS
    if not found:
        raise ValueError(f"the trace has no events of {GPU if gpus else CPU}")
    result.busy = {kind: union(intervals) * PICOSECONDS for kind, intervals in found.items()}
    everything = [interval for intervals in found.values() for interval in intervals]
    busy = union(everything) * PICOSECONDS
    whole = (max(end for _, end in everything) - min(begin for begin, _ in everything)) * PICOSECONDS
    result.gaps, result.overlap = whole - busy, sum(result.busy.values()) - busy
    return result


def is_operation(name: str) -> bool:
    """Whether an event of the CPU is an operation of TensorFlow, as `gradients/MatMul:MatMul`.

    Python's calls have `$file:line function`, and the runtime's own events `Class::Method` or no colon.
    """
    before, colon, kind = name.rpartition(":")
    return bool(colon) and not before.endswith(":") and kind.isidentifier() and not name.startswith("$")


def read(directory: Path) -> DeviceTime:
    """Read the newest trace below a directory."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    paths = sorted(directory.rglob("*.xplane.pb"))
    if not paths:
        raise ValueError(f"no trace (*.xplane.pb) below {directory}")
    space = xplane_pb2.XSpace()
    space.ParseFromString(paths[-1].read_bytes())
    return device_time(space)


def table(sides: dict[str, tuple[DeviceTime, int]]) -> str:
    """Format the time of one step, from the times and the number of steps of each side."""
    lines = [f"{'ms a step (events)':<20}" + "".join(f"{name:>26}" for name in sides)]
    for kind in dict.fromkeys((KERNELS, *COPIES, *(k for t, _ in sides.values() for k in sorted(t.busy)))):
        cells = (f"{t.busy.get(kind, 0.0) / n:.3f} ({t.events[kind] / n:.1f})" for t, n in sides.values())
        lines.append(f"{kind:<20}" + "".join(f"{cell:>26}" for cell in cells))
    lines.append(f"{'overlap':<20}" + "".join(f"{t.overlap / n:>26.3f}" for t, n in sides.values()))
    lines.append(f"{'gaps':<20}" + "".join(f"{t.gaps / n:>26.3f}" for t, n in sides.values()))
    for name, (times, steps) in sides.items():
        lines.append(f"the longest kernels of {name}, ms a step:")
        lines += [f"  {ms / steps:.3f} {kernel[:90]}" for kernel, ms in times.names.most_common(TOP)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_profile")
    parser.add_argument("model", help="of benchmarks/steady.py")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer", default="fit-pipeline")
    args, more = parser.parse_known_args()
    options = ("--gpu", "--profile", str(args.directory.resolve()), *more)
    case = Steady(args.model, "adam", 1, (args.peer,), options=options)
    # The first round after the one that finds the number of steps is traced.
    sides = asyncio.run(measured(case, rounds=1, seconds=TRACED_SECONDS))
    print(
        table({name: (read(args.directory / name), side.steps) for name, side in sides.items()}), flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
