# SPDX-License-Identifier: Apache-2.0
"""Ring and workers over time as HTML for the live page.

It takes milliseconds and needs no Matplotlib, so it is as new as the numbers beside it. Bars stretch with the
screen and texts do not, so it can also be read on a phone.
"""

from __future__ import annotations

from heapq import nlargest

from edl.formatting import how_many
from edl.report.tables import text_of
from edl.report.timeline import State, Timeline, Worker, duration

LANES = 24  # workers that get a row
NEWEST = 3  # changes of the ring that are listed
UNITS = 1000  # of a bar's width
GRID = 8  # workers up to which the ring's picture has a line for each

STATES = {
    State.STARTING: "grey",
    State.INITIALIZING: "orange",
    State.READY: "sky",
    State.MEMBER: "blue",
    State.DRAINING: "purple",
}


def strip(timeline: Timeline) -> str:
    """Draw the size of the ring and the states of its workers on one time axis; empty without workers."""
    if not timeline.workers:
        return ""
    found = changed_last(timeline, LANES)
    lost = sum(worker.lost for worker in timeline.workers.values())
    text = f"{how_many(len(timeline.workers), 'worker')} so far, {lost:,} of them lost"
    if len(found) < len(timeline.workers):
        text += f"; the {LANES} that were started or lost last"
    rows = [*([_ring(timeline)] if timeline.changes else [])]
    rows += [_lane(timeline, worker) for worker in found]
    middle = (timeline.begins + timeline.ends) / 2
    axis = "".join(f"<span>{duration(at)}</span>" for at in (timeline.begins, middle, timeline.ends))
    keys = [*((str(state), colour) for state, colour in STATES.items()), ("lost", "red")]
    legend = "".join(
        f'<span><i style="background: var(--{colour})"></i>{name}</span>' for name, colour in keys
    )
    return (
        '<section id="ring" aria-labelledby="ring-head"><h2 id="ring-head">Ring and workers</h2>'
        f'<p class="muted">{text}.</p>{newest(timeline)}<div class="strip">{"".join(rows)}'
        f'<b></b><div class="axis">{axis}</div></div><p class="legend">{legend}</p></section>'
    )


def changed_last(timeline: Timeline, most: int) -> list[Worker]:
    """Return the workers that were started or lost last, at most so many, in the order of their numbers."""
    return sorted(nlargest(most, timeline.workers.values(), key=_changed), key=lambda worker: worker.id)


def newest(timeline: Timeline) -> str:
    """List the newest changes of the ring, so that a loss stays in sight however short the epochs are."""
    items = []
    for change in reversed([change for change in timeline.changes if change.before][-NEWEST:]):
        size = f"{len(change.before):,} to {how_many(len(change.members), 'worker')}"
        stall = "no step yet" if change.stepped is None else f"{change.stall:.2f} s without a step"
        text = f"{duration(change.formed)}: {timeline.cause(change)[1]}; {size}, {stall}"
        items.append(f"<li>{text_of(text)}</li>")
    return f'<ul class="newest">{"".join(items)}</ul>' if items else ""


def _changed(worker: Worker) -> float:
    """When a worker was lost, or else when it began."""
    if worker.lost and worker.ended is not None:
        return worker.ended
    return worker.intervals[0][1] if worker.intervals else worker.since


def _x(timeline: Timeline, at: float) -> float:
    return round(UNITS * (at - timeline.begins) / max(timeline.ends - timeline.begins, 1e-6), 1)


def _ring(timeline: Timeline) -> str:
    """Draw the size of the ring: of many changes at one place, the smallest size and the last one."""
    sizes: dict[int, tuple[int, int]] = {}
    for change in timeline.changes:
        place, size = int(_x(timeline, change.formed)), len(change.members)
        sizes[place] = min(size, sizes.get(place, (size, size))[0]), size
    most = max(len(change.members) for change in timeline.changes) or 1
    path = "".join(
        f"H{x}V{100 - 100 * low // most}V{100 - 100 * last // most}" for x, (low, last) in sizes.items()
    )
    lines = "".join(f"M0 {100 - 100 * n // most}H{UNITS}" for n in range(1, most + 1)) if most <= GRID else ""
    drawn = _path(lines, "grid", 1) + _path(f"M0 100{path}H{UNITS}", "blue", 2)
    last = len(timeline.changes[-1].members)
    return _bar(
        "ring", f"ring: {how_many(last, 'worker')} now, at most {most:,}", drawn, f"ring of {last:,}", 100
    )


def _lane(timeline: Timeline, worker: Worker) -> str:
    drawn = "".join(
        _path(f"M{_x(timeline, start)} 5H{_x(timeline, end)}", STATES[state], 16)
        for state, start, end in worker.intervals
        if end > start
    )
    if worker.lost and worker.ended is not None:
        drawn += _path(f"M{_x(timeline, worker.ended)} -5V15", "red", 3)
    state = "lost" if worker.lost else "left" if worker.ended is not None else str(worker.intervals[-1][0])
    return _bar("lane", f"worker {worker.id}: {state}", drawn, f"worker {worker.id}", 10)


def _bar(kind: str, description: str, drawn: str, label: str, height: int) -> str:
    """A row: its label and its picture, which stretches without its lines becoming thicker."""
    return (
        f'<b>{label}</b><svg class="{kind}" role="img" aria-label="{description}" preserveAspectRatio="none" '
        f'viewBox="0 0 {UNITS} {height}">{drawn}</svg>'
    )


def _path(way: str, colour: str, width: int) -> str:
    return f'<path d="{way}" stroke="var(--{colour})" stroke-width="{width}"/>'
