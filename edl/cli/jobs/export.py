# SPDX-License-Identifier: Apache-2.0
"""`edl model export`: write the model of a job's checkpoint, or its trained model in a different format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from edl import config
from edl.checkpoints import Store
from edl.cli.local import latest
from edl.cli.local.latest import VALUES
from edl.config import values
from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.contract.phases import ENDED
from edl.contract.workers import WORKER_ENVIRONMENT
from edl.errors import ConfigError, EdlError
from edl.net.master_client import Client

CHECKPOINT_SECONDS = 120.0  # for a running job to write a checkpoint
Format: TypeAlias = Literal["keras", "savedmodel", "onnx"]
# Without this machine's GPU: a different process may train on it.
ENVIRONMENT = {**WORKER_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def export(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="A job directory, or a checkpoint directory (a path, or an address like s3://...); "
            "default: the newest job under runs/.",
        ),
    ] = None,
    name: Annotated[Format, typer.Option("--format", help="What to write.")] = "keras",
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            help="The step of the checkpoint; default: the trained model, else the newest checkpoint; a "
            "running job is asked for one.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="The file to write, or for savedmodel the directory; default: here, by the job's name.",
        ),
    ] = None,
) -> None:
    """Write a job's model as .keras, SavedModel or ONNX.

    It is loaded again and compared.
    """
    if directory is not None and "://" in directory:
        request, of = _of_checkpoints(directory, step), directory.rstrip("/").rpartition("/")[2]
    else:
        # Not a job elsewhere: a running job is made to write a checkpoint.
        found = latest.find(None if directory is None else Path(directory), latest.Scope.HERE)
        is_job, of = (found / VALUES).exists(), found.resolve().name
        request = _of_job(found, step) if is_job else _of_checkpoints(str(found), step)
    suffix = Path(artifacts.FORMATS[name]).suffix
    named = f"{of}{f'-{step}' if step is not None else ''}{suffix}"
    output = output or Path(named)
    if name == "keras" and output.suffix != suffix:
        raise ConfigError(f"--output {output}: the name of a Keras file must end in {suffix}")
    if output.exists():
        raise EdlError(f"{output} already exists; choose another --output")
    raise typer.Exit(_run({**request, "step": step, "name": name, "output": str(output)}))


def _of_job(output: Path, step: int | None) -> dict[str, Any]:
    """Find the model or checkpoint of a job to export.

    Raises:
        EdlError: the job has neither a trained model nor checkpoints.
    """
    kept = values.load([output / VALUES])  # with the defaults of values that the job's edl did not have
    where = config.parse(kept).checkpoint.dir
    ended = artifacts.has_ended(output)
    trained = output / artifacts.MODEL
    request = {"values": kept, "trained": "", "checkpoints": where}
    if step is None and ended and trained.exists():
        return {**request, "trained": str(trained)}
    if not where:
        what = f"{artifacts.MODEL} is not there" if ended else "the job has not ended"
        raise EdlError(f"{output}: {what}, and it writes no checkpoints (checkpoint.dir is empty)")
    if step is None and not ended:
        _have_written(output)
    return request


def _have_written(output: Path) -> None:
    """Make a running job write a checkpoint, and wait for it. Do nothing if its master is gone.

    Raises:
        EdlError: the master cannot be reached, or no checkpoint was written in time.
    """
    if latest.is_orphaned(output):
        return
    client = Client(artifacts.read_contact(output))
    before = _newest(client.status())
    print(client.checkpoint(), file=sys.stderr)
    for status in client.follow(CHECKPOINT_SECONDS):
        if _newest(status) > before or status["phase"] in ENDED:
            return
    raise EdlError(
        f"{output}: no checkpoint was written within {CHECKPOINT_SECONDS:g} s; `edl checkpoint list` lists "
        "those that there are, and --step exports one"
    )


def _newest(status: dict[str, Any]) -> int:
    return int((status.get("checkpoint") or {}).get("step") or 0)


def _of_checkpoints(directory: str, step: int | None) -> dict[str, Any]:
    """Find a checkpoint in a directory of checkpoints; the model is the module that it names.

    Raises:
        EdlError: no undamaged checkpoint was found, or the module's text was in the values.
    """
    found = Store.open(directory).checkpoints()
    wanted = [c for c in found if step in (None, c.step) and not c.wrong()]
    if not wanted:
        of = "" if step is None else f" of step {step}"
        raise EdlError(f"{directory}: neither a job's output directory nor a whole checkpoint{of}")
    said = wanted[-1].manifest.config
    module = said.get("model.module")
    if not module:
        raise EdlError(f"{directory}: the model was given as text; name the job's output directory instead")
    sets = [f"training.seed={said['training.seed']}", "data.allowEmpty=true"]
    if least := said.get("ps.replaceEmbeddings"):
        sets.append(f"ps.replaceEmbeddings={least}")
    merged = values.merge(values.load([], sets), {"model": {"module": module}})
    return {"values": merged, "trained": "", "checkpoints": directory}


def _run(request: dict[str, Any]) -> int:
    """Export in a process with TensorFlow. Return its exit code."""
    done = subprocess.run(
        module_command("edl.trainer.programs.export_checkpoint"),
        input=json.dumps(request).encode(),
        env={**os.environ, **ENVIRONMENT},
    )
    return done.returncode if done.returncode >= 0 else 1
