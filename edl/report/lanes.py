# SPDX-License-Identifier: Apache-2.0
"""The pictures with a row for each worker or parameter server.

If there are many workers, a worker gets the row of one that has ended. If there are even more, a row for each
shows nothing: their numbers by state are drawn, and the rows of the workers that were lost or replaced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from edl.report.servers import ServerState
from edl.report.strip import STATES
from edl.report.tables import COLOURS
from edl.report.timeline import State, Timeline, Worker

WIDTH = 9.0  # inches
MAX_ROWS = 64  # workers or servers that get a row of their own
MAX_LANES = 128  # rows of workers in a picture
CHANGED_LANES = 40  # rows of the workers that were lost or replaced, if there are more than MAX_LANES
MOMENTS = 600  # for which the workers in each state are counted
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
    """Draw the states of all workers over time: a row for each or for each slot, or their numbers."""
    if not timeline.workers:
        return None
    rows = _rows(list(timeline.workers.values()))
    if len(rows) > MAX_LANES:
        figure = _many(timeline, rows)
    else:
        height = min(max(0.24 * len(rows), 0.6), 12.0)
        figure = Figure((WIDTH, height + 1.0), layout="constrained")
        axes = figure.subplots()
        _lanes(axes, timeline, rows, height)
        if len(rows) <= MAX_ROWS and all(len(row) == 1 for row in rows):
            axes.set_yticks(range(len(rows)), [f"worker {row[0].id}" for row in rows])
        else:
            axes.set_ylabel("workers, successors in one row")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [Patch(color=COLOURS[colour], label=str(state)) for state, colour in STATES.items()]
    handles.append(Patch(color=COLOURS["red"], label="lost"))
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper left")
    return figure


def changed(rows: Sequence[Sequence[Worker]]) -> list[Sequence[Worker]]:
    """Return the rows whose workers were lost or replaced last, at most CHANGED_LANES of them."""
    found = [row for row in rows if len(row) > 1 or any(worker.lost for worker in row)]
    found.sort(key=lambda row: max(worker.ended or worker.intervals[0][1] for worker in row))
    return sorted(found[-CHANGED_LANES:], key=lambda row: row[0].id)


def _many(timeline: Timeline, rows: Sequence[Sequence[Worker]]) -> Figure:
    """Draw the numbers of workers by state, and the rows of those that were lost or replaced."""
    shown = changed(rows)
    height = max(0.24 * len(shown), 0.6)
    if not shown:
        figure = Figure((WIDTH, 3.4), layout="constrained")
        _counts(figure.subplots(), timeline)
        return figure
    figure = Figure((WIDTH, height + 3.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, height))
    _counts(above, timeline)
    above.set_xlabel("")
    _lanes(below, timeline, shown, height)
    below.set_yticks(range(len(shown)), [_names(row) for row in shown])
    below.set_title("lost or replaced last")
    return figure


def _names(row: Sequence[Worker]) -> str:
    """Name the workers of a row."""
    between = ", ..." if len(row) > 2 else ""
    return f"worker {row[0].id}" + (f"{between}, {row[-1].id}" if len(row) > 1 else "")


def _counts(axes: Axes, timeline: Timeline) -> None:
    """Draw the number of workers in each state over time."""
    name, size = unit(timeline.ends - timeline.begins)
    step = (timeline.ends - timeline.begins) / MOMENTS
    moments = [timeline.begins + step * nth for nth in range(MOMENTS + 1)]
    spans: dict[State, list[tuple[float, float]]] = {state: [] for state in STATES}
    for worker in timeline.workers.values():
        for state, start, end in worker.intervals:
            spans[state].append((start, end))
    counts = []
    for found in spans.values():
        begun, over = sorted(start for start, _ in found), sorted(end for _, end in found)
        counted = [bisect_right(begun, at) - bisect_right(over, at) for at in moments[:-1]]
        counts.append([*counted, counted[-1]])  # at the last moment all intervals end
    colours = [COLOURS[colour] for colour in STATES.values()]
    axes.stackplot([at / size for at in moments], counts, colors=colours, step="post", linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(timeline.begins / size, max(timeline.ends, timeline.begins + 1e-6) / size)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("workers")
    axes.set_xlabel(f"{name} since the start")


def _lanes(axes: Axes, timeline: Timeline, rows: Sequence[Sequence[Worker]], height: float) -> None:
    """Draw a row for each list of workers.

    Args:
        height: of the axes, in inches.
    """
    name, size = unit(timeline.ends - timeline.begins)
    least = (timeline.ends - timeline.begins) / 3000  # what is shorter cannot be seen
    for state, colour in STATES.items():
        spans = [
            (start, end, y)
            for y, row in enumerate(rows)
            for worker in row
            for kind, start, end in worker.intervals
            if kind is state and end - start > least
        ]
        thick = 72 * height / len(rows) * 0.7
        _segments(axes, [((a / size, y), (b / size, y)) for a, b, y in spans], COLOURS[colour], thick)
    ends = [(w.ended / size, y) for y, row in enumerate(rows) for w in row if w.lost and w.ended is not None]
    _segments(axes, [((x, y - 0.45), (x, y + 0.45)) for x, y in ends], COLOURS["red"], 1.6)
    axes.set_xlim(timeline.begins / size, max(timeline.ends, timeline.begins + 1e-6) / size)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{name} since the start")


def _rows(found: Sequence[Worker]) -> list[list[Worker]]:
    """Put each worker in a row of its own, or, if there are many, in the row of one that has ended."""
    if len(found) <= MAX_ROWS:
        return [[worker] for worker in sorted(found, key=lambda worker: worker.id)]
    rows: list[list[Worker]] = []
    free: list[int] = []  # numbers of the rows whose last worker has ended, the smallest first
    ends: list[tuple[float, int]] = []  # when the last worker of each other row ends, and the row's number
    for worker in sorted(found, key=lambda worker: worker.intervals[0][1] if worker.intervals else 0.0):
        began = worker.intervals[0][1] if worker.intervals else worker.since
        while ends and ends[0][0] <= began:
            heappush(free, heappop(ends)[1])
        if free:
            place = heappop(free)
            rows[place].append(worker)
        else:
            place = len(rows)
            rows.append([worker])
        if worker.ended is not None:
            heappush(ends, (worker.ended, place))
    return rows


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
