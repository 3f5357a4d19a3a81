# SPDX-License-Identifier: Apache-2.0
"""Follow a running job: a picture that is redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from edl.cli.shared.display import (
    STEPLESS,
    Screen,
    checkpoint,
    clean,
    colour,
    degraded,
    idle,
    progress_line,
    servers_lines,
    servers_table,
    workers_table,
)
from edl.contract.phases import Phase
from edl.contract.reasons import Reason, Severity

PLAIN_SECONDS = 5.0
NARROWEST = 20  # columns in which a bar is drawn; a terminal without a size reports fewer
# Steps of saving the model, and the end of the job: the result, which follows, names them.
UNTOLD = frozenset({Reason.Evaluating, Reason.Saving, Reason.Succeeded, Reason.Failed, Reason.Stopped})
_PLACE = re.compile(
    r"^Evaluation (?:(?:at step [0-9,]+ )?on .* of data\('([a-z]+)'\)|on the held-out records): "
)


class Story:
    """The lines about a job that a person reads, from its statuses.

    The loss and metrics of an epoch and its evaluation are two notices of the master. Both are in one line:
    an epoch waits for the next notice that is shown.
    """

    def __init__(self) -> None:
        self._told = 0  # number of the newest notice
        self._epoch: tuple[float, str] | None = None  # a line that waits for its evaluation, and its time
        self._idle = ""
        # Places below the current directory are shown relative to it, as users name them.
        self._here = re.compile(rf"(?<!\S){re.escape(str(Path.cwd()))}/(?=[^\s/])")

    def lines(self, status: dict[str, Any]) -> Iterator[Text]:
        """Yield the lines since the last call."""
        for item in status.get("news", []):
            if item["number"] > self._told:
                self._told = item["number"]
                yield from self._line(item["seconds"], item.get("reason", ""), item["text"])
        if (now := idle(status)) != self._idle:
            self._idle = now
            if now:
                yield from self.rest()
                yield stamped(status["seconds"], now, "yellow")

    def awaits_evaluation(self, now: float) -> bool:
        """Whether an epoch of the last PLAIN_SECONDS waits for its evaluation.

        Args:
            now: seconds since the start of the job.
        """
        return self._epoch is not None and now < self._epoch[0] + PLAIN_SECONDS

    def rest(self) -> Iterator[Text]:
        """Yield the line that still waits: at the end of the job, or before any other line."""
        if self._epoch is not None:
            yield stamped(*self._epoch)
            self._epoch = None

    def _line(self, seconds: float, reason: str, text: str) -> Iterator[Text]:
        if reason in UNTOLD:
            return
        text = self._here.sub("", text)
        if reason == Reason.Evaluated and self._epoch is not None and (place := _PLACE.match(text)):
            split = "held out" if place[1] in (None, "validation") else place[1]
            self._epoch = self._epoch[0], f"{self._epoch[1]}; {split}: {text[place.end() :]}"
            yield from self.rest()
            return
        yield from self.rest()
        if reason == Reason.EpochApplied:
            self._epoch = seconds, text.replace(" is applied", "", 1)
        else:
            yield stamped(seconds, text, "yellow" if _warns(reason) else "")


def stamped(seconds: float, text: str, style: str = "") -> Text:
    """A line with the time since the start of the job, in seconds."""
    return Text(f"[{seconds:7.1f} s] {text}", style)


def show(console: Screen, statuses: Iterator[dict[str, Any]]) -> None:
    """Show the job until its statuses end."""
    story = Story()
    if console.redraws:
        _show_live(console, story, map(clean, statuses))
    else:
        _show_plain(console, story, map(clean, statuses))
    for line in story.rest():
        console.print(line, soft_wrap=True)


def _show_live(console: Console, story: Story, statuses: Iterator[dict[str, Any]]) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for status in statuses:
            for line in story.lines(status):
                live.console.print(line, soft_wrap=True)
            live.update(picture(status), refresh=True)


def _show_plain(console: Console, story: Story, statuses: Iterator[dict[str, Any]]) -> None:
    next_line, awaited = 0.0, ""
    for status in statuses:
        for line in story.lines(status):
            console.print(line, soft_wrap=True)
        now, reason = status["seconds"], status["reason"]
        if status["phase"] in STEPLESS and reason != awaited and not story.awaits_evaluation(now):
            awaited = reason
            for line in (*story.rest(), *([] if reason == "starting" else [stamped(now, reason)])):
                console.print(line, soft_wrap=True)
        if status["phase"] == Phase.Training and now >= next_line and not story.awaits_evaluation(now):
            next_line = now + PLAIN_SECONDS
            for line in (*story.rest(), stamped(now, progress_line(status))):
                console.print(line, soft_wrap=True)


class Bar:
    """A progress bar as wide as the terminal. Its two parts differ in shape, and so need no colours.

    Args:
        share: the completed share, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self.share = min(max(share, 0.0), 1.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        percent = f" {int(100 * self.share):3d} %"
        width = max(options.max_width - len(percent), NARROWEST)
        full = int(width * self.share)
        done, left = ("#", "-") if options.ascii_only else ("\N{FULL BLOCK}", "\N{LIGHT SHADE}")
        yield Text(done * full + left * (width - full) + percent, no_wrap=True, overflow="crop")


def picture(status: dict[str, Any]) -> RenderableType:
    """The job as a block of text: phase, bar, progress, workers."""
    records = status["records"]
    told = progress_line(status)
    head = Text.assemble((f"{status['model']} ", "bold"), (status["phase"], colour(status["phase"])))
    if told != status["phase"].lower():
        head.append(f"  {told}")
    trouble = [Text(line, "yellow") for line in [*servers_lines(status), *degraded(status)]]
    if waits := idle(status):
        trouble.insert(0, Text(waits, "yellow"))
    servers = [servers_table(status)] if status.get("servers") else []
    return Group(
        "",
        head,
        Bar(records["applied"] / records["total"] if records["total"] else 0.0),
        workers_table(status),
        *servers,
        *checkpoint(status),
        *trouble,
    )


def _warns(reason: str) -> bool:
    known = Reason.__members__.get(reason)
    return known is not None and known.severity is Severity.WARNING
