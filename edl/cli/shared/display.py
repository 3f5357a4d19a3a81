# SPDX-License-Identifier: Apache-2.0
"""Show the state of a job, or how it has ended (`follow` shows a running job until it ends).

Text from users, models and Kubernetes is never interpreted as markup, and cannot control a terminal
(`clean`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edl.cli.shared import output
from edl.cli.shared.jobs import ENDED, JobSnapshot, Phase
from edl.contract.evaluation import FINAL
from edl.contract.modes import HOROVOD, servers_of
from edl.formatting import how_many, measured, plain
from edl.report.results import held_out_results

PLAIN_WIDTH = 240  # columns of output that is not a terminal
STEPLESS = (Phase.Starting, Phase.Finishing)  # phases without steps, in which the reason says what is awaited
KERNEL = "JPY_PARENT_PID"  # set by Jupyter for a kernel, and so for the commands of its cells


class Screen(Console):
    """Standard output, or standard error. Text is printed unchanged; a closed pipe is an error."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        if not self.redraws:
            self.width = PLAIN_WIDTH

    @property
    def redraws(self) -> bool:
        """Whether the output is a terminal, whose lines can be overwritten.

        `is_terminal` is also true of a file or a notebook under FORCE_COLOR, which asks only for colours. A
        cell with `!edl run` gives the command a terminal, and keeps each line that was overwritten.
        """
        return self.is_terminal and self.file.isatty() and KERNEL not in os.environ

    def on_broken_pipe(self) -> None:
        raise  # rich calls this in its handler of BrokenPipeError, and would exit


def clean(value: Any) -> Any:
    """Apply `plain` to every text in a status or summary."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(str(key)): clean(inner) for key, inner in value.items()}
    return [clean(inner) for inner in value] if isinstance(value, list | tuple) else value


def line(text: str) -> None:
    """Print one line of foreign text: without control characters on a terminal, unchanged elsewhere."""
    if sys.stdout.isatty():  # of an overwritten line (`\r`), show its last state
        text = plain(text.rstrip("\r").rpartition("\r")[2])
    print(text)


def listed(kind: str, found: Mapping[str, str], form: output.Form) -> None:
    """Print names, each with its description."""
    if form.is_document:
        output.write(kind, [{"name": name, "description": text} for name, text in found.items()], form)
        return
    width = max(map(len, found))
    for name, text in found.items():
        line(f"{name:{width}}  {text}".rstrip())


def snapshot(job: JobSnapshot, wide: bool = False) -> None:
    """Print the status of a job, or its result if it has ended.

    Args:
        wide: also print why workers are pending, the id of the run, and the time by what it was spent on.
    """
    console = Screen()
    if job.ended:
        console.print(ended(job.data["phase"], result(job.data, job.kept, job.model)), soft_wrap=True)
        for note in job.notes:
            console.print(plain(note), soft_wrap=True)
        return
    data = clean(job.data)
    mode = data.get("task", {}).get("mode", "")
    servers = f", mode={mode}" if servers_of(mode, 0) else ""
    name = f"{data['model']}{servers}: " if "model" in data else ""
    reason = "" if data["reason"] == data["phase"].lower() else f", {data['reason']}"
    console.print(f"{name}{data['phase']}{reason}", soft_wrap=True)
    if data.get("pass") or data.get("records", {}).get("total") or _is_script(data):
        console.print(progress_line(data))
    if data["workers"]:
        console.print(workers_table(data, wide))
    if data.get("servers"):
        console.print(servers_table(data))
    lines = [*filter(None, [idle(data)]), *servers_lines(data), *checkpoint(data), *degraded(data)]
    for line in [*lines, *(_wide_lines(data) if wide else [])]:
        console.print(line, soft_wrap=True)
    for note in job.notes:
        console.print(plain(note), soft_wrap=True)


def progress_line(status: dict[str, Any]) -> str:
    """Progress in one line."""
    task = status["task"]
    if now := status.get("pass"):
        what = "predicted" if task.get("kind") == "predict" else "evaluated"
        return f"{now['done']:,} of {now['records']:,} records of data({now['split']!r}) {what}"
    if _is_script(status) and status["step"]:
        return f"{status['step']:,} commits, {status['rate']:,.0f} per second; {status['reason']}"
    if not task["steps"] or status["phase"] in STEPLESS:
        return str(status["reason"])
    parts = [
        f"epoch {task['epoch']} of {task['epochs']}",
        f"step {task['step']:,} of {task['steps']:,}",
    ]
    if status["rate"]:
        parts.append(f"{status['rate']:,.0f} records/s")
    if status["eta_seconds"] is not None:
        parts.append(f"ETA {duration(status['eta_seconds'])}")
    if status["loss"] is not None:
        mean = status.get("epoch_loss")
        parts.append(f"loss {measured(status['loss'] if mean is None else mean)}")
    return ", ".join(parts)


def _is_script(told: dict[str, Any]) -> bool:
    """Whether a status or a summary is of a script that was written for Horovod, which counts commits."""
    return bool(told.get("task", {}).get("kind") == HOROVOD)


def _losses(told: dict[str, Any]) -> str:
    """Format the losses of a status or a summary."""
    mean = told.get("epoch_loss")
    last = f"{measured(told['loss'])} (last step)"
    return last if mean is None else f"{measured(mean)} (mean of the epoch), {last}"


def colour(phase: str) -> str:
    """The colour of a phase: red for a failed job, yellow for a stopped one, green otherwise."""
    return {str(Phase.Failed): "red", str(Phase.Stopped): "yellow"}.get(phase, "green")


def idle(status: dict[str, Any]) -> str:
    """Warn that a job has no workers because its number of workers is 0; empty otherwise."""
    if status.get("target") != 0 or status["phase"] in (*ENDED, Phase.Ending):
        return ""
    return "workers=0: nothing trains until `edl scale N`"


def checkpoint(status: dict[str, Any]) -> list[str]:
    """A line about the newest checkpoint, if the job writes any."""
    if (found := status.get("checkpoint")) is None:
        return []
    if not found["step"]:
        return ["checkpoint: none yet"]
    ago = "" if found["seconds_ago"] is None else f", {duration(found['seconds_ago'])} ago"
    return [f"checkpoint: step {found['step']:,}{ago}"]


def servers_lines(status: dict[str, Any]) -> list[str]:
    """Lines about all parameter servers, in addition to the table."""
    lines = [f"Servers: {text}" for key in ("waits", "servers_stay") if (text := status.get(key))]
    return lines + [f"staleness: {text}" for text in staleness(status)]


def staleness(told: dict[str, Any]) -> list[str]:
    """Staleness of the weights of the last steps (mode=ps), from a status or a summary."""
    if not (found := told.get("staleness")):
        return []
    last, again = how_many(found["steps"], "step"), how_many(found["repeated"], "step")
    return [
        f"updates that the weights of the last {last} had missed: {found['median']:g} (median), "
        f"{found['most']:,} (at most); {again} came again"
    ]


def degraded(status: dict[str, Any]) -> list[str]:
    """A line for each subsystem of the job that currently fails."""
    return [f"Degraded: {part}: {why}" for part, why in status.get("degraded", {}).items()]


def _wide_lines(status: dict[str, Any]) -> list[str]:
    """The additional lines of -o wide about a running job."""
    spent = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in (status.get("goodput") or {}).items())
    named = {"run": status.get("run_id"), "seconds": spent}
    return [f"{name}: {text}" for name, text in named.items() if text]


def workers_table(status: dict[str, Any], wide: bool = False) -> Table:
    """One row for each worker; with `wide`, also why it is pending."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    pods = any("node" in w for w in status["workers"])
    gpus = any(w.get("gpu") for w in status["workers"])
    step, rate = ("commit", "commits/s") if _is_script(status) else ("step", "records/s")
    columns = ["worker", "pod" if pods else "pid", "rank", "state", step, rate, "memory"]
    for name in (*columns, *(["GPU", "its memory", "busy"] if gpus else [])):
        table.add_column(name, justify="left" if name in ("state", "GPU") else "right")
    for name in (*(["node"] if pods else []), *(["delay"] if wide else [])):
        table.add_column(name)
    for w in status["workers"]:
        table.add_row(
            str(w["id"]),
            w["handle"],
            "" if w["rank"] is None else str(w["rank"]),
            w["state"],
            str(w["step"]) if w["rank"] is not None else "",
            f"{w['rate']:,.0f}" if w["rank"] is not None else "",
            f"{w['memory'] / 2**20:,.0f} MiB" if w["memory"] else "",
            *(_gpu_cells(w.get("gpu")) if gpus else []),
            *([w["node"]] if pods else []),
            *([w.get("delay") or ""] if wide else []),
        )
    return table


def _gpu_cells(gpu: dict[str, Any] | None) -> tuple[str, str, str]:
    """The name of a worker's GPU, its memory in use and its utilization; empty if it has none."""
    if gpu is None:
        return "", "", ""
    memory = f"{gpu['memory'] / 2**20:,.0f} of {gpu['memory_limit'] / 2**20:,.0f} MiB"
    return plain(gpu["name"]), memory, f"{100 * gpu['busy']:.0f} %"


def servers_table(status: dict[str, Any]) -> Table:
    """One row for each parameter server, with its share of the pulled rows, which shows hot servers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    processes = any(s.get("handle") for s in status["servers"])
    columns = (
        "server",
        *(["pid"] if processes else []),
        "state",
        "rows",
        "memory",
        "rows/s",
        "share",
        "busy",
    )
    for name in (*columns, "restarts"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for s in status["servers"]:
        most = f" of {s['memory_limit'] / 2**20:,.0f}" if s["memory_limit"] else ""
        table.add_row(
            str(s["index"]),
            *([s.get("handle", "")] if processes else []),
            s["state"],
            f"{s['rows']:,}",
            f"{s['memory'] / 2**20:,.0f}{most} MiB" if s["memory"] else "",
            f"{s['pulled_per_second']:,.0f}",
            "" if s["share"] is None else f"{100 * s['share']:.0f} %",
            f"{100 * s['busy']:.0f} %",
            str(s["restarts"]),
        )
    return table


def duration(seconds: float) -> str:
    """Format seconds: 42 s, 3:20, 1:02:05."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def age(at: str) -> str:
    """Format the age of a Kubernetes time (RFC 3339)."""
    return duration(seconds_since(at))


def seconds_since(at: str) -> float:
    """Seconds since a Kubernetes time (RFC 3339)."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())


def ended(phase: str, told: str) -> Text:
    """Colour the lines of `result`, or of a report about the job: the end, and each warning."""
    text = Text()
    for number, line in enumerate(told.split("\n")):
        style = colour(phase) if not number else "yellow" if line.startswith("  warning ") else ""
        text.append("\n" if number else "").append(line, style)
    return text


def called() -> str:
    """How this shell calls edl: by its name, or by its path if no environment is activated."""
    mine = Path(sys.argv[0])
    found = shutil.which(mine.name)
    if mine.name != "edl" or not mine.is_file() or (found and mine.samefile(found)):
        return "edl"
    return shlex.quote(str(mine))


def next_steps(summary: dict[str, Any], kept: str, reported: bool) -> str:
    """Say what a user may do with a job that has ended.

    Args:
        kept: its output directory.
        reported: whether its report was written.
    """
    name, where = summary.get("model", ""), plain(shlex.quote(kept))
    steps = [f"open the report: {called()} report --open {where}"] if reported else []
    trained = summary.get("task", {}).get("kind", "train") == "train"
    if summary["phase"] == Phase.Succeeded and name.endswith(".keras"):
        told = f"keras.models.load_model({plain(f'{kept}/{name}')!r})"
        steps.append(f"load the model: {plain(summary.get('model_note') or told)}")
    elif summary["phase"] != Phase.Succeeded:
        if trained and (summary.get("checkpoint") or {}).get("step"):
            steps.append(f"resume the job: {called()} run --resume {where}")
        if summary["phase"] == Phase.Failed:
            steps.append(f"read the logs: {called()} logs {where}")
    return "\n".join(f"  {'next' if not number else '':9} {step}" for number, step in enumerate(steps))


def result(summary: dict[str, Any], kept: str, model: str) -> str:
    """Summarize in a few lines how a job ended and what elasticity cost.

    Args:
        kept: location of the summary.
        model: location of the trained model, if one was saved.
    """
    trained = summary.get("task", {}).get("kind", "train") == "train"
    # A script may have saved no model, and a shortened summary does not name it.
    saved = summary.get("model", summary["phase"] == Phase.Succeeded and trained)
    summary = clean(summary)
    where = f"  model     {plain(model)}\n" if saved else ""
    where += f"  kept in   {plain(kept)}"
    if "records" not in summary:  # it was shortened to fit where it is kept
        return f"{summary['phase']}: {summary['reason']}\n{where}"
    records, task, goodput = summary["records"], summary["task"], summary["goodput_seconds"]
    lines = [f"{summary['phase']} after {summary['seconds']:.1f} s: {summary['reason']}"]
    if summary["traceback"]:
        lines.append(summary["traceback"].rstrip())
    if records["size"] is not None and task.get("kind", "train") == "train":
        loss = f", loss {_losses(summary)}" if summary["loss"] is not None else ""
        lines.append(
            f"  trained   {records['applied']:,} of {records['size'] * task['epochs']:,} records "
            f"({how_many(task['epochs'], 'epoch')} of {records['size']:,}) in "
            f"{how_many(task['steps_done'], 'step')}{loss}"
        )
    for split, found in held_out_results({} if task.get("kind") == "predict" else summary).items():
        measures = ", ".join(f"{name} {measured(value)}" for name, value in sorted(found.items()))
        lines.append(f"  {'test    ' if split == FINAL else 'held out'}  {measures}")
    lines += [f"  warning   {text}" for text in summary.get("warnings", [])]
    lines.append("  seconds   " + ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in goodput.items()))
    earlier = summary.get("earlier_generations", {"changes": 0, "stall_seconds": 0.0, "redone_records": 0})
    changes = summary["generations"][0 if earlier["changes"] else 1 :]  # the first ring is not a change
    if changes:
        count = len(changes) + max(earlier["changes"] - 1, 0)
        redone = earlier["redone_records"] + sum(c["redone_records"] for c in changes)
        stall = max(earlier["stall_seconds"], *(c["stall_seconds"] for c in changes), 0.0)
        times = how_many(count, "time")
        again = "" if _is_script(summary) else f", {how_many(redone, 'record')} redone"
        lines.append(f"  ring      changed {times}, longest stall {stall:.2f} s{again}")
    if wait := summary.get("longest_wait"):
        lines.append(f"  stalled   {wait['seconds']:.1f} s at most, {wait['kind']}")
    if (last := summary.get("checkpoint")) and last["step"]:
        place = plain(_as_given(last["dir"], kept))
        lines.append(f"  newest    checkpoint of step {last['step']:,} in {place}")
    if summary["state_losses"]:
        lost = "once" if summary["state_losses"] == 1 else f"{summary['state_losses']} times"
        lines.append(f"  lost      the newest state, {lost} (no worker that held it was left)")
    lines += [f"  staleness {text}" for text in staleness(summary)]
    if freed := summary.get("servers_freed"):
        lines.append(f"  servers   {freed}")
    return "\n".join([*lines, where])


def _as_given(place: str, directory: str) -> str:
    """Write a path below `directory` as `directory` was given, and other paths as `below_here` does."""
    whole = Path(directory).resolve()
    inside = Path(place)
    return (
        str(Path(directory) / inside.relative_to(whole))
        if inside.is_relative_to(whole)
        else below_here(place)
    )


def below_here(place: str) -> str:
    """Write a path below the current directory relative to it; return other paths and addresses unchanged."""
    here = Path.cwd()
    return str(Path(place).relative_to(here)) if Path(place).is_relative_to(here) else place
