# SPDX-License-Identifier: Apache-2.0
"""`edl list` and `edl rm`: the jobs of this machine, the releases of a cluster, removal of an ended job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edl.cli.jobs.target import ContextOption, KubeconfigOption
from edl.cli.local import latest
from edl.cli.shared import display, output
from edl.cli.shared.jobs import in_short
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.formatting import how_many
from edl.net.master_client import Client

NO_MASTER = "NoMaster"  # shown in place of a phase: the master exited without writing a summary


def list_jobs(
    cluster: Annotated[
        bool, typer.Option("--cluster", "-A", help="List the releases of a cluster, in all namespaces.")
    ] = False,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="List the releases of this namespace of a cluster.")
    ] = "",
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = "",
    form: output.FormOption = output.Form.table,
    old: output.OldJson = False,
) -> None:
    """List the jobs of this machine, or the releases of a cluster.

    Jobs that run and jobs that have ended. An option of a cluster lists its releases instead.
    """
    if cluster := cluster or bool(namespace or kubeconfig or context):
        from edl.cli.release.job import (
            releases,  # imported late, because the Kubernetes client is slow to import
        )

        rows = releases(namespace, kubeconfig, context)
    else:
        rows = [row_of(job) for job in latest.known()]
    if form.is_document:
        output.write("JobSummary", rows, form)
    elif rows:
        _print(rows, wide=form is output.Form.wide)
    else:
        display.line("no releases found" if cluster else "no job has been started on this machine")


def row_of(output: Path) -> dict[str, Any]:
    """Describe the job in `output` for a list: directory, start, phase, reason, progress, workers."""
    began = datetime.fromtimestamp((output / latest.VALUES).stat().st_mtime, UTC)
    row = {"directory": str(output), "started": began.isoformat(timespec="seconds")}
    try:
        if (output / artifacts.SUMMARY).exists():
            return {**row, **in_short(artifacts.read_summary(output))}
        if not (output / artifacts.JOURNAL).exists():
            return {**row, **_without_status(NO_MASTER, "it never began")}
        if latest.is_orphaned(output):
            return {**row, **_without_status(NO_MASTER, f"its master left no {artifacts.SUMMARY}")}
        return {**row, **in_short(Client(artifacts.read_contact(output)).status())}
    except EdlError as error:
        return {**row, **_without_status("Unknown", str(error))}


def _without_status(phase: str, why: str) -> dict[str, Any]:
    return {"phase": phase, "reason": why, "progress": why, "workers": 0}


def rm(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The job directory; it has no default.")
    ] = None,
) -> None:
    """Remove an ended job: its model, checkpoints, journal and logs.

    A running job is refused. Files in DIR that edl has not written are kept, as are checkpoints elsewhere and
    checkpoints in DIR that a resumed job uses.
    """
    if directory is None:
        ended = [job for job in latest.known() if artifacts.has_ended(job)]
        count = how_many(len(ended), "ended job")
        raise ConfigError(f"no job directory given; {count} of yours{latest.commands(ended)}")
    if not (directory / latest.VALUES).exists():
        raise ConfigError(f"{directory}: not the output directory of a job ({latest.VALUES} not found)")
    try:
        lock = artifacts.lock(directory)
    except EdlError:
        raise EdlError(f"{directory}: the job runs; end it with `edl stop {directory}`") from None
    except OSError as error:
        raise EdlError(f"{directory}: cannot remove: {error.strerror}") from error
    latest.announce(directory)
    try:
        user = _user_of(directory / artifacts.CHECKPOINTS)
        latest.forget(directory)
        kept = _remove(directory, user is not None)
    except OSError as error:
        raise EdlError(f"{error.filename}: cannot remove: {error.strerror}") from error
    finally:
        os.close(lock)
    if user is not None and artifacts.CHECKPOINTS in kept:
        display.line(f"removed the job; kept {directory / artifacts.CHECKPOINTS}, which the job {user} uses")
    elif kept:
        display.line(f"removed the job; kept {directory}, because it holds other files: {', '.join(kept)}")
    else:
        display.line(f"removed {directory}")


def _user_of(checkpoints: Path) -> Path | None:
    """Return a different job that writes its checkpoints there (it was resumed); None if no job does."""
    here = checkpoints.resolve()
    for job in latest.known():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            values = json.loads((job / latest.VALUES).read_text(encoding="utf-8"))
            where = values.get("checkpoint", {}).get("dir", "")
            if where == str(here) and job.resolve() != here.parent:
                return job
    return None


def _remove(directory: Path, keep_checkpoints: bool) -> list[str]:
    """Remove the files of a job, and its directory if nothing else is in it; return what else is."""
    written = {path.name for path in artifacts.written(directory)} | {latest.VALUES}
    written -= {artifacts.CHECKPOINTS} if keep_checkpoints else set()
    there = sorted(directory.iterdir(), key=lambda path: path.name == latest.VALUES)  # marks a job, so last
    for path in there:
        if path.name not in written:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    kept = sorted(path.name for path in directory.iterdir())
    if not kept:
        directory.rmdir()
    return kept


def _print(rows: Sequence[dict[str, Any]], wide: bool = False) -> None:
    console = display.Screen()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("phase", "workers", "started", "progress", *(["reason"] if wide else [])):
        folds = name in ("progress", "reason")
        table.add_column(name, justify="right" if name == "workers" else "left", no_wrap=not folds)
    table.add_column("release" if "release" in rows[0] else "directory", overflow="fold")
    for row in display.clean(list(rows)):
        began = row["started"] and datetime.fromisoformat(row["started"]).astimezone().strftime(
            "%Y-%m-%d %H:%M:%S" if wide else "%Y-%m-%d %H:%M"
        )
        if "release" in row:
            where = f"{row['namespace']}/{row['release']}"
        else:
            where = row["directory"] if wide else display.below_here(row["directory"])
        why = [row["reason"]] if wide else []
        table.add_row(row["phase"], str(row["workers"] or ""), began, row["progress"], *why, where)
    console.print(table)
