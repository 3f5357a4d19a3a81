# SPDX-License-Identifier: Apache-2.0
"""The pictures with a row for each worker or parameter server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from edl.report.servers import ServerState
from edl.report.strip import STATES, changed_last
from edl.report.tables import COLOURS
from edl.report.timeline import Timeline, Worker

WIDTH = 9.0  # inches
MAX_ROWS = 64  # workers or servers that get a row of their own
UNITS = ((2 * 86400.0, "days", 86400.0), (2 * 3600.0, "hours", 3600.0), (120.0, "minutes", 60.0))

SERVER_STATES = {
    ServerState.ANSWERS: "blue",
    ServerState.NOT_ANSWERING: "orange",
    ServerState.RESTARTING: "red",
}


def unit(seconds: float) -> tuple[str, float]:
    """Choose the unit of a time axis of this length: its name, and its seconds."""
    return next(((name, size) for least, name, size in UNITS if seconds >= least), ("seconds", 1.0))


def workers(timeline: Timeline) -> Figure | None:
    """Draw the states of the workers over time, with a row for each of those that `changed_last` selects."""
    if not timeline.workers:
        return None
    rows = changed_last(timeline, MAX_ROWS)
    height = min(max(0.24 * len(rows), 0.6), 12.0)
    figure = Figure((WIDTH, height + 1.0), layout="constrained")
    axes = figure.subplots()
    _lanes(axes, timeline, rows, height)
    axes.set_yticks(range(len(rows)), [f"worker {worker.id}" for worker in rows])
    handles = [Patch(color=COLOURS[colour], label=str(state)) for state, colour in STATES.items()]
    handles.append(Patch(color=COLOURS["red"], label="lost"))
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper left")
    return figure


def _lanes(axes: Axes, timeline: Timeline, rows: Sequence[Worker], height: float) -> None:
    """Draw a row for each worker.

    Args:
        height: of the axes, in inches.
    """
    name, size = unit(timeline.ends - timeline.begins)
    least = (timeline.ends - timeline.begins) / 3000  # what is shorter cannot be seen
    for state, colour in STATES.items():
        spans = [
            (start, end, y)
            for y, worker in enumerate(rows)
            for kind, start, end in worker.intervals
            if kind is state and end - start > least
        ]
        thick = 72 * height / len(rows) * 0.7
        _segments(axes, [((a / size, y), (b / size, y)) for a, b, y in spans], COLOURS[colour], thick)
    ends = [(w.ended / size, y) for y, w in enumerate(rows) if w.lost and w.ended is not None]
    _segments(axes, [((x, y - 0.45), (x, y + 0.45)) for x, y in ends], COLOURS["red"], 1.6)
    axes.set_xlim(timeline.begins / size, max(timeline.ends, timeline.begins + 1e-6) / size)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{name} since the start")


def servers(timeline: Timeline) -> Figure | None:
    """Draw the states of the parameter servers over time, with a row for each."""
    if not timeline.servers:
        return None
    found = [timeline.servers[index] for index in sorted(timeline.servers)]
    height = min(max(0.24 * len(found), 0.6), 12.0)
    figure = Figure((WIDTH, height + 1.0), layout="constrained")
    axes = figure.subplots()
    name, size = unit(timeline.ends - timeline.begins)
    least = (timeline.ends - timeline.begins) / 500  # shorter spans are drawn longer, as they matter here
    for state, colour in SERVER_STATES.items():
        grown = 0.0 if state is ServerState.ANSWERS else least
        spans = [
            ((start / size, y), (max(end, start + grown) / size, y))
            for y, server in enumerate(found)
            for kind, start, end in server.intervals
            if kind is state
        ]
        _segments(axes, spans, COLOURS[colour], 72 * height / len(found) * 0.7)
    axes.set_xlim(timeline.begins / size, max(timeline.ends, timeline.begins + 1e-6) / size)
    axes.set_ylim(len(found) - 0.4, -0.6)
    if len(found) <= MAX_ROWS:
        axes.set_yticks(range(len(found)), [f"server {server.index}" for server in found])
    else:
        axes.set_ylabel("servers")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{name} since the start")
    handles = [Patch(color=COLOURS[colour], label=str(state)) for state, colour in SERVER_STATES.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper left")
    return figure


def _segments(
    axes: Axes, lines: Iterable[tuple[tuple[float, float], tuple[float, float]]], colour: str, width: float
) -> None:
    """Draw many straight lines as one path, which keeps the file small."""
    points = [point for line in lines for point in line]
    if points:
        codes = [Path.MOVETO, Path.LINETO] * (len(points) // 2)
        path = Path(points, codes)
        axes.add_patch(PathPatch(path, edgecolor=colour, facecolor="none", linewidth=width, capstyle="butt"))
