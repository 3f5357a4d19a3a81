# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, drawn with Matplotlib.

Each function returns a figure, or None if the job has nothing to show there. The colours are those of the
light theme. In the HTML page they become CSS variables (`edl.report.svg`), so that the page can be dark.
Long jobs are reduced to what can be seen: a line with at most `MAX_POINTS` points, and a histogram of
changes instead of a mark for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from edl.report import hours as paid
from edl.report.lanes import WIDTH, unit
from edl.report.lanes import servers as servers
from edl.report.lanes import workers as workers
from edl.report.pace import Pace
from edl.report.tables import COLOURS
from edl.report.timeline import PHASES, Change, Timeline, duration

MAX_POINTS = 1000  # of a line
MAX_MARKS = 400  # changes that get a mark of their own
MAX_NUMBERS = 40  # changes whose marks are numbered as in the table
MAX_STALLS = 10
MAX_SLOW = 20  # workers in the picture of stragglers
MAX_METRICS = 6
BINS = 120  # of a histogram
LOG_FROM = 100.0  # a loss whose highest value is more than so many times its lowest one has a log scale

KINDS = {
    "start": "grey",
    "lost": "red",
    "left": "purple",
    "joined": "green",
    "planned": "sky",
    "broken": "orange",
}
GOODPUT = {
    "useful": "blue",
    "redone": "red",
    "re-forming": "orange",
    "waiting for workers": "purple",
    "waiting for servers": "purple",
    "waiting for records": "purple",
    "waiting in a ring": "purple",
    "suspended": "grey",
    "starting": "sky",
    "finishing": "green",
    "waiting to join": "purple",
    "leaving": "grey",
}
LINES = ("blue", "orange", "green", "purple", "red", "sky")

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edl",
    "text.parse_math": False,
    "font.size": 9.5,
    "font.family": "sans-serif",
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["ink"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "axes.facecolor": "none",
    "figure.facecolor": COLOURS["paper"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
}


def styled() -> Any:
    """The style of all pictures, as a context in which they are drawn and written."""
    return matplotlib.rc_context(_STYLE)


def ring(timeline: Timeline) -> Figure | None:
    """Draw the size of the ring over time, with each change and its kind."""
    if not timeline.changes:
        return None
    many = len(timeline.changes) > MAX_MARKS
    figure = Figure((WIDTH, 4.0 if many else 3.0), layout="constrained")
    axes, *more = figure.subplots(2 if many else 1, 1, sharex=True, squeeze=False)[:, 0]
    name, size = unit(timeline.ends - timeline.begins)
    times = [change.formed / size for change in timeline.changes] + [timeline.ends / size]
    sizes = [len(change.members) for change in timeline.changes]
    axes.step(times, [*sizes, sizes[-1]], where="post", color=COLOURS["blue"], linewidth=1.4)
    axes.set_ylim(0, max(sizes) * 1.15 + 0.5)
    axes.set_xlim(timeline.begins / size, max(timeline.ends, timeline.begins + 1e-6) / size)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("workers in the ring")
    by_kind: dict[str, list[tuple[int, Change]]] = {}
    for number, change in enumerate(timeline.changes, 1):
        by_kind.setdefault(timeline.cause(change)[0], []).append((number, change))
    if many:
        found = [kind for kind in KINDS if kind in by_kind]
        at = [[change.formed / size for _, change in by_kind[kind]] for kind in found]
        span = (timeline.begins / size, timeline.ends / size)
        colours = [COLOURS[KINDS[kind]] for kind in found]
        more[0].hist(at, bins=BINS, range=span, stacked=True, color=colours, label=found)
        more[0].set_ylabel("changes")
        figure.legend(ncols=len(found), loc="outside upper left")
    else:
        for kind, changes in by_kind.items():
            xs = [change.formed / size for _, change in changes]
            ys = [len(change.members) for _, change in changes]
            axes.plot(xs, ys, "o", color=COLOURS[KINDS[kind]], markersize=6, label=kind)
        _number(axes, list(zip(times, sizes, strict=False)))
        axes.legend(ncols=len(by_kind), loc="lower right")
    (more[0] if many else axes).set_xlabel(f"{name} since the start")
    return figure


def _number(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Number the points of a few changes, but none so close to the one before that the numbers overlap."""
    if len(points) > MAX_NUMBERS:
        return
    last = (float("-inf"), 0.0)
    width, height = (high - low for low, high in (axes.get_xlim(), axes.get_ylim()))
    for number, (x, y) in enumerate(points, 1):
        if x - last[0] >= 0.025 * width or abs(y - last[1]) >= 0.08 * height:
            last = x, y
            axes.annotate(
                str(number), last, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
            )


def metrics(timeline: Timeline) -> Figure | None:
    """Draw the loss and each metric over the steps, training and held out on the same axis."""
    names = list(timeline.trained)
    names += [name for _, name in timeline.held_out if name not in names]
    names = [name for i, name in enumerate(names) if name not in names[:i]]
    if timeline.loss and "loss" not in names:
        names.insert(0, "loss")
    if not (names := names[:MAX_METRICS]):
        return None
    rows = -(-len(names) // 2)
    figure = Figure((WIDTH, 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, min(len(names), 2), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    labels: dict[str, Any] = {}
    for axes, name in zip(grid.flat, names, strict=False):
        _metric(axes, timeline, name)
        lines, said = axes.get_legend_handles_labels()
        labels |= dict(zip(said, lines, strict=True))
    figure.legend(labels.values(), labels.keys(), ncols=min(len(labels), 4), loc="outside upper left")
    return figure


def _metric(axes: Axes, timeline: Timeline, name: str) -> None:
    shown: list[float] = []
    if name == "loss":
        points = _thinned(sorted(timeline.loss.items()))
        look = "." if len(points) <= 60 else "-"
        axes.plot(
            *_columns(points), look, color=COLOURS["grey"], linewidth=0.9, label="training, single steps"
        )
        shown += timeline.loss.values()
    trained = sorted(timeline.trained.get(name, {}).items())
    lines = [("training, mean of the epoch", LINES[0], trained)] if trained else []
    splits = list(dict.fromkeys(split for split, _ in timeline.held_out))
    for split, colour in zip(splits, LINES[1:], strict=False):
        if values := timeline.held_out.get((split, name)):
            lines.append((f"held out ({split})", colour, sorted(values.items())))
    for label, colour, points in lines:
        marker = "o" if len(points) <= 60 else ""
        axes.plot(
            *_columns(_thinned(points)),
            marker=marker,
            markersize=3,
            color=COLOURS[colour],
            linewidth=1.4,
            label=label,
        )
        shown += [value for _, value in points]
    if name == "loss" and _spans_decades(shown):
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(name)
    axes.set_xlabel("step")


def _spans_decades(values: Sequence[float]) -> bool:
    """Whether a linear scale would hide most of these values: none is negative, and they span two decades."""
    positive = [value for value in values if value > 0]
    return bool(positive) and min(values) >= 0 and max(positive) > LOG_FROM * min(positive)


def slowest(timeline: Timeline) -> list[tuple[int, Pace]]:
    """Return the workers whose steps are known with their paces, the slowest first."""
    found = timeline.paces.items()
    return sorted(found, key=lambda each: each[1].own / each[1].steps, reverse=True)


def stragglers(timeline: Timeline) -> Figure | None:
    """Draw the mean step of the slowest workers: their own computing, and waiting for the slowest member."""
    if not (found := slowest(timeline)[:MAX_SLOW]):
        return None
    figure = Figure((WIDTH, 0.3 * len(found) + 1.1), layout="constrained")
    axes = figure.subplots()
    names = [f"worker {number}" for number, _ in found]
    own = [1000 * pace.own / pace.steps for _, pace in found]
    waited = [1000 * pace.waited / pace.steps for _, pace in found]
    axes.barh(names, own, color=COLOURS["blue"], height=0.66, label="own computing")
    label = "waiting for the slowest"
    bars = axes.barh(names, waited, left=own, color=COLOURS["orange"], height=0.66, label=label)
    shares = [f"waits {100 * w / (o + w):.0f} %" for o, w in zip(own, waited, strict=True)]
    axes.bar_label(bars, shares, padding=4, color=COLOURS["ink"])
    axes.set_xlim(0, 1.18 * max(o + w for o, w in zip(own, waited, strict=True)))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds of a step")
    figure.legend(ncols=2, loc="outside upper left")
    return figure


def hours(timeline: Timeline) -> Figure | None:
    """Draw the hours of all workers by what they were spent on, with their cost if the price is known."""
    return goodput(paid.worker_seconds(timeline), paid.price(timeline))


def goodput(seconds: Mapping[str, float], price: float = 0.0) -> Figure | None:
    """Draw hours by what they were spent on.

    Args:
        price: of an hour; 0: unknown.
    """
    total = sum(seconds.values())
    if not total:
        return None
    name, size = unit(total)
    figure = Figure((WIDTH, 0.36 * len(seconds) + 0.7), layout="constrained")
    axes = figure.subplots()
    kinds = list(seconds)
    colours = [COLOURS[GOODPUT.get(kind, "grey")] for kind in kinds]
    bars = axes.barh(kinds, [seconds[kind] / size for kind in kinds], color=colours, height=0.66)
    labels = [f"{duration(seconds[kind])} ({100 * seconds[kind] / total:.1f} %)" for kind in kinds]
    if price:
        cost = [f"{seconds[kind] / 3600 * price:,.2f}" for kind in kinds]
        labels = [f"{label}, costs {money}" for label, money in zip(labels, cost, strict=True)]
    axes.bar_label(bars, labels, padding=4, color=COLOURS["ink"])
    axes.set_xlim(0, (1.5 if price else 1.3) * max(seconds.values()) / size)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(name)
    return figure


def longest_stalls(timeline: Timeline) -> list[tuple[int, Change]]:
    """Return the changes with the longest stalls and their numbers, the longest first."""
    numbered = [(n, change) for n, change in enumerate(timeline.changes, 1) if change.before and change.stall]
    return sorted(numbered, key=lambda each: each[1].stall, reverse=True)[:MAX_STALLS]


def stalls(timeline: Timeline) -> Figure | None:
    """Draw the longest stalls, each divided into its phases."""
    if not (found := longest_stalls(timeline)):
        return None
    figure = Figure((WIDTH, 0.34 * len(found) + 1.1), layout="constrained")
    axes = figure.subplots()
    labels, left = [f"change {number}" for number, _ in found], [0.0] * len(found)
    for index, (phase, colour) in enumerate(zip(PHASES, LINES, strict=False)):
        widths = [change.phases[index][1] for _, change in found]
        axes.barh(labels, widths, left=left, color=COLOURS[colour], label=phase, height=0.66)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds without a step")
    figure.legend(ncols=len(PHASES), loc="outside upper left")
    return figure


def checkpoints(timeline: Timeline) -> Figure | None:
    """Draw the age of the newest checkpoint over time: what a loss of all workers would have cost."""
    if not timeline.checkpoints:
        return None
    figure = Figure((WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    name, size = unit(timeline.ends - timeline.begins)
    points = ages(timeline)
    oldest = max(age for _, age in points)
    age_name, age_size = unit(oldest)
    xs, ys = _columns(_highest(points))
    axes.plot([x / size for x in xs], [y / age_size for y in ys], color=COLOURS["blue"], linewidth=1.1)
    axes.fill_between([x / size for x in xs], [y / age_size for y in ys], color=COLOURS["sky"], linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{name} since the start")
    axes.set_ylabel(f"age in {age_name}")
    return figure


def ages(timeline: Timeline) -> list[tuple[float, float]]:
    """Return the corners of the age of the newest checkpoint over time, in seconds."""
    points, last = [(timeline.begins, 0.0)], timeline.begins
    for at, _, _ in timeline.checkpoints:
        points += [(at, at - last), (at, 0.0)]
        last = at
    return [*points, (timeline.ends, timeline.ends - last)]


# --- helpers


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    every = -(-len(points) // MAX_POINTS) or 1
    return [*points[:-1:every], *points[-1:]]


def _highest(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a line with many points to the highest of each short interval."""
    if len(points) <= 2 * MAX_POINTS:
        return list(points)
    begin, span = points[0][0], (points[-1][0] - points[0][0]) / MAX_POINTS or 1.0
    best: dict[int, tuple[float, float]] = {}
    for x, y in points:
        place = int((x - begin) / span)
        if place not in best or y > best[place][1]:
            best[place] = (x, y)
    return list(best.values())


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
