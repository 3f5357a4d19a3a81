# SPDX-License-Identifier: Apache-2.0
"""The commands for a started job: `status`, `logs`, `wait`, `scale`, `stop`, `token`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from edl.cli.jobs.target import about_a_job, changes_a_job, seconds
from edl.cli.shared import display, output
from edl.cli.shared.jobs import DISCARD, ENDED, JobHandle, LogSource, Phase
from edl.contract.tokens import for_reading
from edl.errors import ConfigError

TIMED_OUT = 124  # like the command `timeout`


def _workers(text: str) -> int | str:
    """Parse the first argument of `scale`: a number of workers, or the directory."""
    try:
        return int(text)
    except ValueError:
        return text


def _in_any_order(command: Callable[..., None]) -> Callable[..., None]:
    """Sort the arguments of `scale`, which are WORKERS and DIR in any order."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        first, second = given["workers"], given["directory"]
        if isinstance(first, str):
            number = None if second is None else _workers(str(second))
            if isinstance(number, str):
                raise typer.BadParameter(f"neither {first!r} nor {number!r} is a number of workers")
            given |= {"workers": number, "directory": Path(first)}
        if given["workers"] is None and given["servers"] is None:
            of = "" if given["directory"] is None else f" ({str(given['directory'])!r} is none)"
            raise ConfigError(f"expected a number of workers{of}, or --servers")
        command(**given)

    return run


@about_a_job
def status(job: JobHandle, form: output.FormOption = output.Form.table, old: output.OldJson = False) -> None:
    """Show a job: phase, progress, workers."""
    snapshot = job.snapshot()
    if form.is_document:
        output.write("Job", output.job(snapshot.data, snapshot.given, snapshot.ended), form)
    else:
        display.snapshot(snapshot, wide=form is output.Form.wide)


@about_a_job
def logs(
    job: JobHandle,
    source: Annotated[
        str, typer.Argument(metavar="all|master|worker|worker-N|ps|ps-N", help="Which logs to show.")
    ] = "all",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Show new lines until the job ends, including those of new workers."
        ),
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Show only the last lines of each log; default: all.")
    ] = None,
) -> None:
    """Show the logs of a job's master, workers and servers.

    With --release, name the command of kubectl that shows them.
    """
    with closing(job.logs(LogSource(source), tail, follow)) as lines:
        for line in lines:
            display.line(line)
            if follow:
                sys.stdout.flush()


@about_a_job
def wait(
    job: JobHandle,
    phase: Annotated[
        Phase, typer.Option("--for", case_sensitive=False, metavar="PHASE", help="The phase to wait for.")
    ] = Phase.Succeeded,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", parser=seconds, metavar="DURATION", help="E.g. 90s, 30m, 2h; default: no limit."
        ),
    ] = None,
    form: output.FormOption = output.Form.table,
) -> None:
    """Wait until a job is in a phase, or has ended.

    The phases are Starting, Training, Suspended, Waiting, Finishing, Ending, Succeeded, Failed and Stopped.

    Exit code: 0 if the job is in that phase, 1 if it has ended in a different one, 124 if the time is up.
    """
    found, reason = job.wait(phase, timeout)
    if form.is_document:
        output.write("Wait", {"phase": found, "reason": reason, "reached": found == phase}, form)
    else:
        display.line(f"{found}: {reason}")
    raise typer.Exit(0 if found == phase else 1 if found in ENDED else TIMED_OUT)


@_in_any_order
@changes_a_job
def scale(
    job: JobHandle,
    workers: Annotated[
        int | None,
        typer.Argument(parser=_workers, metavar="workers", help="The new number of workers."),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers",
            help="The new number of parameter servers. With --release use `helm upgrade --set ps.servers=N`.",
        ),
    ] = None,
) -> None:
    """Change the number of workers or servers of a running job.

    DIR may also come first.
    """
    job.announce()
    display.line(job.scale(workers, servers))


@changes_a_job
def stop(
    job: JobHandle,
    with_checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            help="Write its state to a checkpoint first, and wait for that. If it fails, the job goes on.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --checkpoint: stop the job even if the checkpoint fails.")
    ] = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard",
            help="Stop the job at once: what it has trained since its newest checkpoint, if any, is lost.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", parser=seconds, metavar="DURATION", help="How long to wait for the checkpoint."
        ),
    ] = "10m",  # type: ignore[assignment]  # parsed
) -> None:
    """Stop a running job.

    It writes its state to a checkpoint first, unless checkpoints are off, and ends even if that fails.
    `edl run --resume` continues it, or in a release another runId with checkpoint.resume=true. With --release
    or --checkpoint, the command waits for that. If the time is up, the exit code is 124, and the job still
    ends once its state is written.

    A job that has trained and writes no checkpoints is only stopped with --discard: its training is lost.
    """
    if force and not with_checkpoint:
        raise ConfigError("--force: only valid with --checkpoint")
    if discard and with_checkpoint:
        raise ConfigError("--discard and --checkpoint are mutually exclusive")
    job.announce()
    if not (with_checkpoint or discard) and (lost := job.unsaved()):
        raise ConfigError(f"not stopped: {lost}; add --discard to stop it all the same")
    try:
        if not with_checkpoint:
            display.line(job.stop(discard, timeout))
            return
        display.line(f"waiting for the checkpoint; {DISCARD}")
        sys.stdout.flush()
        display.line(job.stop_with_checkpoint(force, timeout))
    except TimeoutError as late:
        display.line(f"the job still runs after {timeout:g} s: {late}")
        display.line(f"it ends once its state is written (`edl wait --for Stopped`); {DISCARD}")
        raise typer.Exit(TIMED_OUT) from None


@about_a_job
def token(
    job: JobHandle,
    read: Annotated[
        bool,
        typer.Option(
            "--read",
            help="Required. Print the token with which rows of parameter servers can be read; "
            "the job's own token is never printed.",
        ),
    ] = False,
) -> None:
    """Print the token with which rows can be read."""
    if not read:
        raise ConfigError(
            "expected --read: the job's own token, which is enough for everything, is not printed"
        )
    display.line(for_reading(job.token()))
