# SPDX-License-Identifier: Apache-2.0
"""The state of a job at a moment of its journal, for the slider of the live page.

Nothing here needs Matplotlib.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from edl.formatting import how_many
from edl.report.tables import table, text_of
from edl.report.timeline import Timeline, Worker, duration

MAX_WORKERS = 200  # rows of the table
MAX_MEMBERS = 10  # of a ring, named
MAX_NOTICES = 5


def moment(timeline: Timeline, seconds: float) -> str:
    """Describe the ring, the newest checkpoint, the last notices and the workers at a moment, as HTML.

    Args:
        seconds: since the job began; a moment outside the journal is replaced by its nearest one.
    """
    now = min(max(seconds, timeline.begins), timeline.ends)
    lines = [f"At {duration(now)}: {_ring(timeline, now)}"]
    if timeline.writes_checkpoints:
        lines.append(_checkpoint(timeline, now))
    past = [(at, text) for at, _, text in timeline.notices if at <= now]
    lines += [f"{duration(at)}: {text}" for at, text in past[-MAX_NOTICES:]]
    found = [
        (worker, *state)
        for worker in sorted(timeline.workers.values(), key=lambda worker: worker.id)
        if (state := _state(worker, now)) is not None
    ]
    if found:
        lines.append(by_state(state for _, state, _ in found))
    title = f"{how_many(len(found), 'worker')} then"
    if len(found) > MAX_WORKERS:
        found = sorted(found, key=lambda each: each[2])[:MAX_WORKERS]
        title += f": the {MAX_WORKERS} that had changed last"
    rows = [(worker.id, worker.handle, state, duration(age)) for worker, state, age in found]
    columns = ("#worker", "pid or pod", "state", "#for")
    shown = table(title, columns, rows)
    return "".join(f"<p>{text_of(line)}</p>" for line in lines) + shown


def by_state(states: Iterable[str]) -> str:
    """Count the workers in each state: "workers: member 998, starting 2"."""
    counts = Counter(map(str, states))
    return "workers: " + ", ".join(f"{state} {count:,}" for state, count in counts.most_common())


def _ring(timeline: Timeline, now: float) -> str:
    place = bisect_right(timeline.changes, now, key=lambda change: change.formed)
    if not place:
        return "no ring yet"
    change = timeline.changes[place - 1]
    members = ", ".join(map(str, change.members[:MAX_MEMBERS]))
    if len(change.members) > MAX_MEMBERS:
        members += ", ..."
    of = f"ring {change.generation} of {how_many(len(change.members), 'worker')} ({members})"
    stepped = change.stepped is not None and change.stepped <= now
    state = "" if stepped else ", before its first step"
    return f"{of}, for {duration(now - change.formed)}{state}: {timeline.cause(change)[1]}"


def _checkpoint(timeline: Timeline, now: float) -> str:
    place = bisect_right(timeline.checkpoints, now, key=lambda checkpoint: checkpoint[0])
    if not place:
        return "no checkpoint yet"
    at, step, _ = timeline.checkpoints[place - 1]
    return f"newest checkpoint: step {step:,}, {duration(now - at)} old"


def _state(worker: Worker, now: float) -> tuple[str, float] | None:
    """The state of a worker at a moment and its age in seconds; None if the worker did not exist then."""
    if worker.ended is not None and worker.ended <= now:
        return None
    for state, start, end in reversed(worker.intervals):
        if start <= now <= end:
            return str(state), now - start
    return None
