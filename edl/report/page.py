# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a report: self-contained, without scripts, readable in light, dark, print and by ear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edl.contract.phases import Phase
from edl.formatting import how_many, measured
from edl.report import hours as paid
from edl.report import pictures, svg
from edl.report.lanes import MAX_ROWS
from edl.report.results import audited, boxes, results
from edl.report.strip import newest
from edl.report.tables import COLOURS, scrolled, style, table, text_of
from edl.report.timeline import PHASES, RECORDS, State, Timeline, duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TABLE_ROWS = 200


def page(timeline: Timeline, told: Mapping[str, Any], verdict: str, name: str) -> str:
    """Write the page.

    Args:
        told: the summary of the job, or its status while it runs; {} if its master does not answer.
        verdict: the sentence of the audit.
        name: the job's name, for the title.
    """
    phase = str(told.get("phase") or "unknown")
    tone = {Phase.Succeeded: "good", Phase.Failed: "bad"}.get(phase, "mixed")  # type: ignore[call-overload]
    title = text_of(f"{name}: {phase}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{style()}</style></head><body><header><h1>{text_of(name)}</h1>"
        f'<p><span class="phase {tone}">{text_of(phase)}</span>: '
        f"{text_of(told.get('reason', 'no status'))}</p>"
        f"{facts(timeline, told, verdict)}</header><main>{sections(timeline, told)}</main>"
        f'<footer><p class="muted">Written by edl from the journal of run {text_of(timeline.run_id)}.</p>'
        "</footer></body></html>\n"
    )


def sections(timeline: Timeline, told: Mapping[str, Any], live: bool = False) -> str:
    """The sections with pictures and tables.

    Args:
        live: only those that the live page shows while the job runs.
    """
    with pictures.styled():
        return "".join(
            section for make in (_LIVE if live else _SECTIONS) if (section := make(timeline, told))
        )


def ring(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about the ring's size and its changes."""
    changes = list(enumerate(timeline.changes, 1))
    kept = sorted(changes, key=lambda each: each[1].stall, reverse=True)[:MAX_TABLE_ROWS]
    rows = [
        (
            number,
            duration(change.formed),
            len(change.before),
            len(change.members),
            timeline.cause(change)[1],
            f"{change.stall:.2f}",
            *((f"{change.redone:,}",) if timeline.counted == RECORDS else ()),
        )
        for number, change in sorted(kept, key=lambda each: each[0])
    ]
    some = f": the {len(rows):,} with the longest stalls" if len(rows) < len(changes) else ""
    columns: tuple[str, ...] = ("#change", "#time", "#from", "#to", "cause", "#stall (s)")
    columns += ("#redone records",) if timeline.counted == RECORDS else ()
    counts: dict[str, int] = {}
    for change in timeline.changes:
        kind = timeline.cause(change)[0]
        counts[kind] = counts.get(kind, 0) + 1
    text = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    if timeline.begins:
        text += f"; the journal before {duration(timeline.begins)} was deleted"
    return _section(
        "ring",
        "Ring size",
        f"Changes by kind: {text}.",
        pictures.ring(timeline),
        table(f"{how_many(len(changes), 'change')}{some}", columns, rows),
        newest(timeline),
    )


def metrics(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about loss and metrics."""
    series = [(name, "training", values) for name, values in timeline.trained.items()]
    series += [(name, f"held out ({split})", values) for (split, name), values in timeline.held_out.items()]
    rows = []
    for name, of, values in series:
        numbers = (values[max(values)], min(values.values()), max(values.values()))
        rows.append((name, of, f"{max(values):,}", *map(measured, numbers)))
    columns = ("metric", "records", "#last step", "#last", "#lowest", "#highest")
    text = "Training: the mean over each epoch. Held out: the model at that step."
    return _section(
        "metrics", "Loss and metrics", text, pictures.metrics(timeline), table("Values", columns, rows)
    )


def workers(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about the workers' states and speeds."""
    found = list(timeline.workers.values())
    rates = {w["id"]: w["rate"] for w in told.get("workers") or () if w.get("rank") is not None}
    kept = sorted(found, key=lambda worker: (worker.lost, worker.id))[-MAX_TABLE_ROWS:]
    rows = []
    for worker in sorted(kept, key=lambda worker: worker.id):
        speed = rates.get(worker.id, worker.speed)
        end = f"lost: {worker.why}" if worker.lost else "left" if worker.ended is not None else "lives"
        seconds = [
            duration(worker.seconds(state)) for state in (State.STARTING, State.INITIALIZING, State.MEMBER)
        ]
        rows.append((worker.id, worker.handle, *seconds, "" if speed is None else f"{speed:,.0f}", end))
    some = f": {len(rows):,} of them, first those that were lost" if len(rows) < len(found) else ""
    rate = f"#{timeline.counted}/s"
    columns = ("#worker", "pid or pod", "#starting", "#initializing", "#member", rate, "end")
    lost = sum(worker.lost for worker in found)
    text = f"{how_many(len(found), 'worker')}, {lost:,} of them lost."
    if len(found) > MAX_ROWS:
        text += f" The picture has the {MAX_ROWS} that were started or lost last."
    return _section(
        "workers",
        "Workers",
        text,
        pictures.workers(timeline),
        table(f"{how_many(len(found), 'worker')}{some}", columns, rows),
    )


def stragglers(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about the workers for which the others wait."""
    found = pictures.slowest(timeline)
    ranks = {number: rank for rank, number in enumerate(timeline.changes[-1].members)} if found else {}
    rows = [
        (
            number,
            ranks.get(number, ""),
            f"{pace.steps:,}",
            f"{1000 * pace.own / pace.steps:.2f}",
            f"{1000 * pace.waited / pace.steps:.2f}",
            f"{100 * pace.waited / (pace.own + pace.waited):.0f}",
        )
        for number, pace in found[:MAX_TABLE_ROWS]
    ]
    text = ""
    if found:
        number, pace = found[0]
        own, middle = pace.own / pace.steps, found[len(found) // 2][1]
        share = sum(p.waited for _, p in found) / sum(p.own + p.waited for _, p in found)
        text = (
            f"Slowest: worker {number} computes for {1000 * own:.1f} ms a step, "
            f"{own * middle.steps / middle.own:.2f} times the median. Waiting for the slowest member takes "
            f"{100 * share:.0f} % of the workers' steps. These are means, without the exchange of gradients."
        )
    some = f": the {len(rows)} slowest" if len(rows) < len(found) else ""
    columns = ("#worker", "#rank at the end", "#steps", "#own (ms)", "#waiting (ms)", "#waiting (%)")
    return _section(
        "stragglers",
        "Stragglers",
        text,
        pictures.stragglers(timeline),
        table(f"{how_many(len(found), 'worker')}{some}", columns, rows),
    )


def servers(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about parameter servers."""
    found = [timeline.servers[index] for index in sorted(timeline.servers)]
    now = {server["index"]: server for server in told.get("servers") or ()}
    rows = []
    for server in found:
        away = server.unavailable
        load: tuple[object, ...] = ()
        if now:
            status = now.get(server.index, {})
            share = status.get("share")
            load = (status.get("rows", ""), "" if share is None else f"{100 * share:.0f}")
        rows.append(
            (
                server.index,
                server.state or "released",
                server.exits,
                server.why,
                len(away),
                f"{sum(away):.1f}",
                f"{max(away, default=0.0):.1f}",
                *load,
            )
        )
    columns = (
        *("#server", "state at the end", "#exits", "last exit"),
        *("#outages", "#outages (s)", "#longest (s)"),
        *(("#rows", "#pulled rows (%)") if now else ()),
    )
    outages = [seconds for server in found for seconds in server.unavailable]
    text = f"{how_many(len(found), 'parameter server')}, {how_many(len(outages), 'outage')}"
    text += f"; the longest one lasted {max(outages):.1f} s." if outages else "."
    if not now:
        text += " Rows and load are shown while the job runs."
    return _section(
        "servers",
        "Parameter servers",
        text,
        pictures.servers(timeline),
        table(how_many(len(found), "server"), columns, rows),
    )


def goodput(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about how the time was spent."""
    seconds = _goodput(told)
    total = sum(seconds.values())
    rows = [(kind, f"{s / 3600:,.3f}", f"{100 * s / total:.1f}") for kind, s in seconds.items() if total]
    columns = ("spent on", "#hours", "#percent")
    text = (
        "Redone: steps that were trained again. Re-forming: from the last step of a ring to the next one. "
        "Finishing: the model is saved, evaluated and verified."
    )
    return _section("goodput", "Goodput", text, pictures.goodput(seconds), table("Hours", columns, rows))


def hours(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about the workers' hours, and their cost."""
    seconds, price = paid.worker_seconds(timeline), paid.price(timeline)
    total = sum(seconds.values())
    rows = [
        (
            kind,
            f"{s / 3600:,.3f}",
            f"{100 * s / total:.1f}",
            *([f"{s / 3600 * price:,.2f}"] if price else []),
        )
        for kind, s in seconds.items()
        if total
    ]
    columns = ("spent on", "#hours", "#percent", *(["#cost"] if price else []))
    text = f"The time of all workers, {total / 3600:,.2f} h"
    if price:
        text += f", costs {total / 3600 * price:,.2f} at {price:g} an hour (report.pricePerWorkerHour)"
    else:
        text += "; with report.pricePerWorkerHour also what it costs"
    if timeline.begins:
        text += f"; without the time before {duration(timeline.begins)}, whose journal was deleted"
    title = "Cost" if price else "Hours of workers"
    return _section("hours", title, f"{text}.", pictures.hours(timeline), table(title, columns, rows))


def stalls(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about the longest stalls."""
    found = pictures.longest_stalls(timeline)
    rows = [
        (number, timeline.cause(change)[1], *(f"{s:.3f}" for _, s in change.phases), f"{change.stall:.3f}")
        for number, change in found
    ]
    columns = ("#change", "cause", *(f"#{phase}" for phase in PHASES), "#all")
    text = "Seconds between the last step before a change and the first after it."
    return _section(
        "stalls", "Longest stalls", text, pictures.stalls(timeline), table("Seconds", columns, rows)
    )


def checkpoints(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section about checkpoints."""
    done = (told.get("task") or {}).get("steps_done", (told.get("task") or {}).get("step")) or 0
    if not timeline.writes_checkpoints:
        text = f"Checkpoints are off: a loss of all workers would have cost {how_many(done, 'step')}."
        return _section("checkpoints", "Checkpoints", text, None, "")
    written = timeline.checkpoints
    ages = [age for _, age in pictures.ages(timeline)]
    text = f"{how_many(len(written), 'checkpoint')}; the newest one was at most {duration(max(ages))} old."
    if written:
        at, step, nbytes = written[-1]
        ago = duration(timeline.ends - at)
        text += f" The last: step {step:,}, {nbytes / 1e6:,.1f} MB, {ago} before the end."
    return _section("checkpoints", "Checkpoints", text, pictures.checkpoints(timeline), "")


def notices(timeline: Timeline, told: Mapping[str, Any]) -> str:
    """The section with the notices that a person may have to act on."""
    rows = [(duration(at), reason, text) for at, reason, text in timeline.notices[-MAX_TABLE_ROWS:]]
    shown = table(how_many(len(rows), "notice"), ("#time", "reason", "text"), rows)
    return _section("notices", "Notices", "", None, shown) if rows else ""


_SECTIONS: tuple[Callable[[Timeline, Mapping[str, Any]], str], ...] = (
    metrics,
    ring,
    workers,
    stragglers,
    servers,
    goodput,
    hours,
    stalls,
    checkpoints,
    notices,
)
_LIVE = (metrics, servers, notices)  # beside ring and workers, which need no Matplotlib (`edl.report.strip`)


# --- elements


def facts(timeline: Timeline, told: Mapping[str, Any], verdict: str) -> str:
    """The most important numbers, and the sentence of the audit.

    Args:
        verdict: as in `page`; empty: the audit was not made.
    """
    task, seconds, earlier = told.get("task") or {}, _goodput(told), told.get("earlier_generations") or {}
    done = task.get("steps_done", task.get("step"))
    changes = [change for change in timeline.changes if change.before]
    named = [*results(told), ("duration", duration(timeline.ends))]
    if done is not None and task.get("steps"):
        named.append(("steps", f"{done:,} of {task['steps']:,}"))
    if applied := (told.get("records") or {}).get("applied"):
        named.append((timeline.counted, f"{applied:,}"))
    if total := sum(seconds.values()):
        named.append(("useful time", f"{100 * seconds.get('useful', 0.0) / total:.1f} %"))
    number, stall, redone = (
        len(changes),
        max((c.stall for c in changes), default=0.0),
        sum(c.redone for c in changes),
    )
    if timeline.begins and earlier:  # the summary also has the changes before the oldest kept line
        kept = told.get("generations") or []
        number = earlier["changes"] + len(kept) - 1
        stall = max(earlier["stall_seconds"], *(change["stall_seconds"] for change in kept), stall)
        redone = earlier["redone_records"] + sum(change["redone_records"] for change in kept)
    named.append(("ring changes", f"{number:,}"))
    longest = max([(stall, "re-forming"), *((end - start, kind) for start, end, kind in timeline.waits)])
    if wait := told.get("longest_wait"):  # the summary also has those before the oldest kept line
        longest = max(longest, (wait["seconds"], wait["kind"]))
    named.append(("longest stall", f"{longest[0]:.2f} s" + (f", {longest[1]}" if longest[0] else "")))
    if timeline.counted == RECORDS:
        named.append(("redone records", f"{redone:,}"))
    if timeline.masters > 1:
        named.append(("masters", f"{timeline.masters:,}"))
    return boxes(named) + audited(verdict)


def _goodput(told: Mapping[str, Any]) -> Mapping[str, float]:
    found: Mapping[str, float] = told.get("goodput_seconds") or told.get("goodput") or {}
    return found


def _section(name: str, title: str, text: str, figure: Figure | None, details: str, listed: str = "") -> str:
    """A section with a picture, its description, a list above it, and a table with the same numbers."""
    drawn = ""
    if figure is not None:
        image = svg.inline(figure, name, title, text or title, COLOURS)
        image = image.replace("var(--paper)", "none")
        drawn = f"<figure>{scrolled(title, image)}</figure>"
    elif not (text or details):
        return ""
    if not drawn and name not in ("checkpoints", "notices"):
        return ""  # nothing of this kind has happened
    head = f'<h2 id="{name}-head">{text_of(title)}</h2>' + (
        f'<p class="muted">{text_of(text)}</p>' if text else ""
    )
    return f'<section aria-labelledby="{name}-head">{head}{listed}{drawn}{details}</section>'
