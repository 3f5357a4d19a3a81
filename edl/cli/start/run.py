# SPDX-License-Identifier: Apache-2.0
"""`edl run`, `edl master`, `edl worker`: run a job, its master or a worker on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import yaml

from edl import integrations
from edl.cli.local import latest
from edl.cli.local.job_values import (
    Given,
    ModelArgument,
    check_addresses,
    check_checkpoints,
    complete,
    local_checkpoints,
    takes_values,
)
from edl.cli.shared import models
from edl.cli.start.local_job import master_arguments, new_output, prepare, run_job
from edl.config import Config, values
from edl.config.address import Address
from edl.contract import artifacts
from edl.contract.gpus import too_few_gpus
from edl.contract.own_modules import module_command
from edl.contract.workers import worker_environment
from edl.errors import ConfigError

SalvageOption = Annotated[
    Path | None,
    typer.Option(
        "--salvage",
        help="Where to write the model, the journal and the summary if the output "
        "directory is full, in a subdirectory with the job's name; default: a temporary directory.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="The output directory; default: a new directory in runs/.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Resume the job of this output directory from its newest checkpoint, with its "
        "values. Options such as --set override them, for example with more epochs.",
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="With --resume: resume even if the seed, the order of the records or "
        "the file of the model has changed. The differences are reported.",
    ),
]
DetachOption = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="Return once the job has started, and leave it running. Without this "
        "option the job ends with this command.",
    ),
]
UiOption = Annotated[
    bool, typer.Option("--ui", help="Serve the live page of the job on this machine, and print its address.")
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the values, print all of them as YAML for -f, and start nothing."),
]
ScriptOption = Annotated[
    str,
    typer.Option(
        "--script",
        metavar="FILE [ARGS]",
        help="Run this Python file in each worker, "
        "instead of a model: a training loop that calls edl.join(). What follows FILE are its "
        "arguments, so other options come before it.",
    ),
]
AllOutputOption = Annotated[
    bool,
    typer.Option(
        "--all-output",
        help="With --script: show the lines that all workers print, and not only those of rank 0.",
    ),
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(hidden=True)]


@takes_values
def run(
    given: Given,
    model: ModelArgument = "",
    output: OutputOption = None,
    salvage: SalvageOption = None,
    detach: DetachOption = False,
    with_ui: UiOption = False,
    dry_run: DryRunOption = False,
    resume: ResumeOption = None,
    script: ScriptOption = "",
    arguments: ScriptArguments = None,
    all_output: AllOutputOption = False,
    force: ForceOption = False,
) -> None:
    """Train a model on this machine, with workers as processes."""
    if with_ui and detach:
        raise ConfigError("--ui and --detach are mutually exclusive; show a detached job with `edl ui DIR`")
    if script:
        arguments, model = [model, *(arguments or [])] if model else [], ""
    elif arguments:
        raise ConfigError(f"{arguments[0]}: unexpected argument")
    chosen = given.load(resume, force)
    output, merged, typed = checked(chosen, model, output, resume, script, arguments or [])
    if why := too_few_gpus(typed.local.gpus_per_worker, typed.workers, os.environ):
        raise ConfigError(why)
    if dry_run:
        print(yaml.safe_dump(merged, sort_keys=False, allow_unicode=True), end="")
        return
    raise typer.Exit(run_job(output, merged, salvage, detach, with_ui, all_output=all_output))


def checked(
    given: dict[str, Any],
    model: str,
    output: Path | None,
    resume: Path | None,
    script: str = "",
    arguments: Sequence[str] = (),
) -> tuple[Path, dict[str, Any], Config]:
    """Check a job before its start. Return its output directory, its complete values and their typed form.

    Raises:
        ConfigError: a value, the model, an address of data or a checkpoint is invalid.
    """
    merged, typed = complete(given, model, script, arguments)
    if resume is not None and typed.mode == "predict" and not typed.prediction.dir:
        merged["prediction"]["dir"] = str((resume / artifacts.PREDICTIONS).resolve())
    check_checkpoints(typed, resume)
    if typed.model.script:
        models.check_script(typed.model, typed.mode in integrations.WORKERS)
    elif not typed.model.source:
        models.check(typed.model.module, not typed.data.addresses, typed.model.functions)
    check_addresses(typed)
    output = output or new_output(Path(typed.model.name).stem.rsplit(".", 1)[-1])
    if typed.trains:
        merged = values.merge(merged, local_checkpoints(output, given.get("checkpoint") or {}))
    return output, merged, typed


class RunCommand(typer.core.TyperCommand):
    """`edl run`: what follows `--script FILE` are the arguments of the script, options included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, arg in enumerate(args):
            if arg == "--":
                break
            if arg == "--script" or arg.startswith("--script="):
                rest = place + (2 if arg == "--script" else 1)
                args = [*args[:rest], *(["--"] if args[rest:] else []), *args[rest:]]
                break
        return super().parse_args(ctx, args)


@takes_values
def master(
    given: Given,
    output: Annotated[Path, typer.Option("--output", help="The output directory.")],
    model: ModelArgument = "",
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:0",
    salvage: SalvageOption = None,
) -> None:
    """Run only a job's master; start its workers with `edl worker`."""
    Address.parse(listen, "--listen")
    merged, _ = complete(given.load(), model)
    # If the directory holds a job whose master has died, this master continues the job.
    lock = prepare(output, merged, salvage, may_exist=latest.is_orphaned(output))
    os.set_inheritable(lock, True)  # the master that replaces this process keeps holding it
    latest.remember(output)
    _become("edl.master", [*master_arguments(output, salvage), "--listen", listen, "--backend", "external"])


def worker(
    master: Annotated[str, typer.Option("--master", help="HOST:PORT of the master.")],
    identity: Annotated[
        int,
        typer.Option(
            "--worker", show_default=False, help="This worker's id; default: assigned by the master."
        ),
    ] = -1,
    token_from: Annotated[
        Path | None,
        typer.Option(
            "--token-from",
            help="The master's output directory, which holds the job's token; "
            "default: the environment variable EDL_TOKEN.",
        ),
    ] = None,
) -> None:
    """Run one worker of `edl master`."""
    if not Address.parse(master, "--master").port:
        raise ConfigError(f"--master {master}: the port of the master is missing")
    if token_from is not None:
        os.environ["EDL_TOKEN"] = artifacts.read_contact(token_from).token
    os.environ.update(worker_environment(os.environ))
    _become("edl.trainer", ["--master", master, "--worker", str(identity)])


def _become(module: str, arguments: list[str]) -> NoReturn:
    command = module_command(module)
    os.execv(command[0], [*command, *arguments])
