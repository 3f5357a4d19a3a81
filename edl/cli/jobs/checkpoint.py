# SPDX-License-Identifier: Apache-2.0
"""`edl checkpoint`: make a job write one; list and verify those of a directory."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from edl.checkpoints import Checkpoint, CheckpointError, Manifest, Store
from edl.checkpoints.manifest import encode
from edl.cli import moved
from edl.cli.jobs.target import changes_a_job
from edl.cli.shared import display, groups, output
from edl.cli.shared.jobs import JobHandle
from edl.errors import CheckpointRemoved, EdlError
from edl.formatting import measured

app = groups.group("checkpoint", "Create, list and verify checkpoints.", moved.CheckpointGroup)

Directory = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT_DIR",
        help="The checkpoint directory (checkpoint.dir): a path such as runs/NAME/checkpoints, or an address "
        "like s3://...",
    ),
]


@app.command()
@changes_a_job
def create(job: JobHandle) -> None:
    """Make a running job write a checkpoint now."""
    job.announce()
    display.line(job.checkpoint())


@app.command("list")
def list_checkpoints(
    directory: Directory,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="Show what is in the checkpoint of this step.")
    ] = None,
    form: output.FormOption = output.Form.table,
    old: output.OldJson = False,
) -> None:
    """List the checkpoints in a directory, or show one.

    Only manifests and sizes are compared. Exit code: 1 if a completed checkpoint is damaged, or if the
    directory has none, not even unfinished ones.
    """
    _report(directory, step, False, form)


@app.command()
def verify(
    directory: Directory,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="Verify only the checkpoint of this step.")
    ] = None,
    form: output.FormOption = output.Form.table,
) -> None:
    """Read all bytes of checkpoints and compare their SHA-256.

    Exit code: 0 if all completed ones are intact, 1 if one is damaged, or if the directory has none, not even
    unfinished ones.
    """
    _report(directory, step, True, form)


def _report(directory: str, step: int | None, verify: bool, form: output.Form) -> None:
    """List the checkpoints in a directory, or show one.

    Raises:
        EdlError: the directory has no checkpoint, or none of this step.
        Exit: a completed checkpoint is damaged.
    """
    store = Store.open(directory)
    found = sorted([*store.checkpoints(), *store.unfinished()], key=lambda c: c.step)
    if step is not None and not (found := [c for c in found if c.step == step]):
        raise EdlError(f"{directory}: no checkpoint of step {step} found")
    if not found:
        raise EdlError(f"{directory}: no checkpoints found")
    # A manifest is shown only if it is valid.
    seen = [(c, *_look(c, verify)) for c in found]
    if form.is_document:
        output.write("Checkpoint", [_as_json(*each, whole=step is not None) for each in seen], form)
    elif step is not None:
        for checkpoint, manifest, state in seen:
            _show(checkpoint, manifest, state)
    else:
        _list(seen, wide=form is output.Form.wide)
    if any(c.is_complete and state not in (WHOLE, COMPLETE, REMOVED) for c, _, state in seen):
        raise typer.Exit(1)


WHOLE, COMPLETE, UNFINISHED, SUPERSEDED = "whole", "complete (not verified)", "not completed", "superseded"
REMOVED = "removed meanwhile"  # by its job, which keeps only the newest and the best


def _look(checkpoint: Checkpoint, verify: bool) -> tuple[Manifest | None, str]:
    """Read and check the manifest of a checkpoint. Return the manifest and the state of the checkpoint."""
    if not checkpoint.is_complete:
        return None, SUPERSEDED if checkpoint.is_superseded else UNFINISHED
    manifest = None
    try:
        manifest = checkpoint.manifest
        wrong = checkpoint.wrong()
        if verify and not wrong:
            checkpoint.verify()
        if wrong and checkpoint.was_removed():
            wrong = REMOVED
    except CheckpointRemoved:
        wrong = REMOVED
    except CheckpointError as error:
        wrong = str(error)
    return manifest, wrong.removeprefix(f"{checkpoint.directory}: ") or (WHOLE if verify else COMPLETE)


def _list(seen: list[tuple[Checkpoint, Manifest | None, str]], wide: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    more = ("attempt", "parts", "edl", "directory") if wide else ()
    for name in ("step", "epoch", "created", "MB", "state", "metrics", *more):
        table.add_column(name, justify="right" if name in ("step", "epoch", "MB") else "left")
    for checkpoint, manifest, state in seen:
        metrics = manifest.metrics if manifest else {}
        table.add_row(
            f"{checkpoint.step:,}",
            str(manifest.epoch + 1) if manifest else "",
            manifest.created if manifest else "",
            f"{sum(checkpoint.files.values()) / 1e6:,.1f}",
            display.clean(state),
            display.clean(", ".join(f"{name} {measured(value)}" for name, value in metrics.items())),
            *(_wide_cells(checkpoint, manifest) if wide else ()),
        )
    _print(table)


def _wide_cells(checkpoint: Checkpoint, manifest: Manifest | None) -> tuple[str, str, str, str]:
    """The cells of the additional columns of -o wide."""
    parts = str(len(manifest.parts)) if manifest else ""
    written_by = display.clean(manifest.edl) if manifest else ""
    return str(checkpoint.attempt), parts, written_by, display.clean(checkpoint.directory)


def _show(checkpoint: Checkpoint, manifest: Manifest | None, state: str) -> None:
    print(f"step {checkpoint.step:,}, attempt {checkpoint.attempt}: {display.clean(state)}")
    if manifest is None:
        return
    about = {
        "run": manifest.run,
        "created": f"{manifest.created} by edl {manifest.edl}",
        "epoch": str(manifest.epoch + 1),
        "records": f"{manifest.records:,}",
        "skipped steps": ", ".join(f"{start}-{stop - 1}" for start, stop in manifest.skipped),
        "bad records": ", ".join(f"{count} in epoch {epoch + 1}" for epoch, count in manifest.bad.items()),
        "metrics": ", ".join(f"{name} {measured(value)}" for name, value in manifest.metrics.items()),
        "model": manifest.model,
        "bytes": f"{manifest.nbytes:,} in {len(manifest.parts)} parts"
        + (f", {len(manifest.of_servers)} of them of parameter servers" if manifest.of_servers else ""),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in about.items():
        if text:
            table.add_row(name, display.clean(text))
    for key, value in sorted(manifest.config.items()):
        table.add_row(display.clean(key), display.clean(json.dumps(value)))
    _print(table)
    variables = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("variable", "dtype", "shape", "part"):
        variables.add_column(name, justify="right" if name == "part" else "left")
    for variable in manifest.variables:
        shape = " x ".join(map(str, variable.shape)) or "scalar"
        variables.add_row(
            display.clean(variable.name), display.clean(variable.dtype), shape, str(variable.part)
        )
    print()
    _print(variables)


def _print(table: Table) -> None:
    display.Screen().print(table)


def _as_json(checkpoint: Checkpoint, manifest: Manifest | None, state: str, whole: bool) -> dict[str, Any]:
    """Convert a checkpoint for JSON.

    Args:
        whole: include the whole manifest.
    """
    about: dict[str, Any] = {
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "directory": checkpoint.directory,
        "bytes": sum(checkpoint.files.values()),
        "state": state,
        "usable": state in (WHOLE, COMPLETE),
    }
    if manifest is not None:
        body = json.loads(encode(manifest))  # here, a NaN is a text, because JSON has no number for it
        about |= {key: body[key] for key in ("epoch", "created", "metrics")}
        if whole:
            about["manifest"] = body
    return about
