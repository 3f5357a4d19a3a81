"""`edl run`, `edl master`, `edl worker`: run a job, its master or a worker on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from edl import config
from edl.checkpoints import CheckpointError, Store, check_values, one_of
from edl.cli import display, latest, models
from edl.cli.latest import RUNS, VALUES
from edl.config import values
from edl.config.address import Address
from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.contract.phases import Phase
from edl.contract.workers import worker_environment
from edl.errors import ConfigError, EdlError
from edl.net.master_client import Client
from edl.signals import to_handle

FileOption = Annotated[
    list[Path],
    typer.Option("-f", "--values", help="A values file; repeatable, merged in order; -: standard input."),
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", help="Set values, as with Helm; repeatable: --set workers=3,training.epochs=5"),
]
SetStringOption = Annotated[
    list[str], typer.Option("--set-string", help="Like --set, but values are always strings.")
]
SetFileOption = Annotated[
    list[str], typer.Option("--set-file", help="Like --set, with the text of a file: --set-file key=PATH")
]
SalvageOption = Annotated[
    Path | None,
    typer.Option("--salvage", help="Where to write the model, the journal and the summary if the output "
                 "directory is full, in a subdirectory with the job's name; default: a temporary directory."),
]  # fmt: skip
MOST_NAME = 80  # greatest length of the model's name in the name of an output directory


def run(
    model: Annotated[
        str, typer.Argument(help="The model: a name from `edl zoo list`, a dotted module, or a Python file.")
    ] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    set_files: SetFileOption = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option("--output", help="The output directory; default: a new directory in runs/.")
    ] = None,
    salvage: SalvageOption = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return once the job has started, and leave it running. Without this "
                     "option the job ends with this command."),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR",
                     help="Resume the job of this output directory from its newest checkpoint, with its "
                     "values. Options such as --set override them, for example with more epochs."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --resume: resume even if the seed, the order of the records or "
                     "the file of the model has changed. The differences are reported."),
    ] = False,
) -> None:  # fmt: skip
    """Train a model on this machine, with workers as processes."""
    if force and resume is None:
        raise ConfigError("--force: only valid with --resume")
    if resume is not None:
        values_files = [_values_of(resume), *values_files]
        sets = [*sets, f"checkpoint.resume=true,checkpoint.force={str(force).lower()}"]
    merged, typed = _merged(model, values_files, sets, set_strings, set_files)
    if resume is not None and typed.mode == "predict" and not typed.prediction.dir:
        merged["prediction"]["dir"] = str((resume / artifacts.PREDICTIONS).resolve())
    _check_checkpoints(typed, resume)
    if not typed.model.source:
        models.check(typed.model.module)
    name = Path(typed.model.name).stem.rsplit(".", 1)[-1][:MOST_NAME]
    output = output or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    lock = _prepare(output, merged, salvage)
    interrupts = _Interrupts()
    process = interrupts.process = _start(output, salvage, lock, detach)
    if detach:
        raise typer.Exit(_detach(process, output, interrupts))
    raise typer.Exit(_attend(display.Screen(), process, output, interrupts))


def master(
    output: Annotated[Path, typer.Option("--output", help="The output directory.")],
    model: Annotated[str, typer.Argument(help="The model, as for `edl run`.")] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    set_files: SetFileOption = [],  # noqa: B006
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:0",
    salvage: SalvageOption = None,
) -> None:
    """Run only a job's master; start its workers with `edl worker`."""
    Address.parse(listen, "--listen")
    merged, _ = _merged(model, values_files, sets, set_strings, set_files)
    # If the directory holds a job whose master has died, this master continues the job.
    lock = _prepare(output, merged, salvage, may_exist=latest.is_orphaned(output))
    os.set_inheritable(lock, True)  # the master that replaces this process keeps holding it
    latest.remember(output)
    _become("edl.master", [*_arguments(output, salvage), "--listen", listen, "--backend", "external"])


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
        typer.Option("--token-from", help="The master's output directory, which holds the job's token; "
                     "default: the environment variable EDL_TOKEN."),
    ] = None,
) -> None:  # fmt: skip
    """Run one worker of `edl master`."""
    if not Address.parse(master, "--master").port:
        raise ConfigError(f"--master {master}: the port of the master is missing")
    if token_from is not None:
        os.environ["EDL_TOKEN"] = artifacts.read_contact(token_from).token
    os.environ.update(worker_environment(os.environ))
    _become("edl.trainer", ["--master", master, "--worker", str(identity)])


class _Interrupts:
    """Handle Ctrl-C, SIGTERM and a closed terminal: the first stops the job, the next kills its master.

    Signals that this process was started to ignore (`nohup edl run`) stay ignored.
    """

    def __init__(self) -> None:
        self.number = 0  # number of the first signal; 0: none arrived
        self.process: subprocess.Popen[bytes] | None = None
        for number in to_handle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            signal.signal(number, self._come)

    def _come(self, number: int, _: object) -> None:
        again, self.number = self.number, self.number or number
        if self.process is None:  # the master is not started yet
            raise SystemExit(128 + number)
        with contextlib.suppress(OSError):  # the terminal may be closed, and print() may be interrupted
            os.write(2, b"master killed; the workers exit when they notice\n" if again
                     else b"stopping the job (interrupt again to kill it)\n")  # fmt: skip
        if again:
            self.process.kill()
        else:
            self.process.terminate()


def _arguments(output: Path, salvage: Path | None) -> list[str]:
    """Arguments of the job's master."""
    # Two jobs may use the same directory, so each has a subdirectory for its model.
    own = ["--salvage", str(salvage / output.resolve().name)] if salvage is not None else []
    return ["--values", str(output / VALUES), "--output", str(output), *own]


def _start(output: Path, salvage: Path | None, lock: int, detached: bool) -> subprocess.Popen[bytes]:
    """Start the job's master.

    Unless it is detached, it ends the job when this process ends: in any case, the end of this process closes
    the master's standard input.
    """
    arguments = _arguments(output, salvage)
    (output / artifacts.LOGS).mkdir(exist_ok=True)
    with open(output / artifacts.LOGS / "master.log", "wb") as log:
        return subprocess.Popen(
            [*module_command("edl.master"), *arguments, *([] if detached else ["--attached"])],
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True, pass_fds=[lock],
        )  # fmt: skip


def _detach(process: subprocess.Popen[bytes], output: Path, interrupts: _Interrupts) -> int:
    """Wait until the job has begun. Return the exit code."""
    assert process.stdout is not None
    if not process.stdout.readline():
        process.wait()
        return _ended(display.Screen(), process, output, interrupts)
    latest.remember(output)
    display.line(f"the job has begun and goes on by itself; its output directory is {output}")
    display.line(f"to see it: edl status {output}; to end it: edl stop {output}")
    return 0


def _attend(
    console: display.Screen, process: subprocess.Popen[bytes], output: Path, interrupts: _Interrupts
) -> int:
    """Show the job until it ends. Return the exit code."""
    assert process.stdout is not None
    unread = False
    try:
        if process.stdout.readline():  # the master prints a line once it listens
            latest.remember(output)
            display.show(console, Client(artifacts.read_contact(output)).follow())
    except OSError:  # the output is a closed pipe, or the terminal is closed
        unread = True
        process.terminate()
    process.wait()
    if unread:
        return 128 + (interrupts.number or signal.SIGPIPE)
    return _ended(console, process, output, interrupts)


def _ended(
    console: display.Screen, process: subprocess.Popen[bytes], output: Path, interrupts: _Interrupts
) -> int:
    """Print the result of the job. Return the exit code."""
    code = 128 + interrupts.number if interrupts.number else 1
    assert process.stdout is not None
    # If the master could not write to `output`, its last line names the directory that it used instead.
    kept = Path(process.stdout.read().decode().strip() or output)
    try:
        summary = artifacts.read_summary(kept)
    except EdlError:
        if interrupts.number:
            begun = (output / artifacts.JOURNAL).exists()
            console.print("the job was killed" if begun else "stopped before the job had begun")
            return code
        log = (output / artifacts.LOGS / "master.log").read_text(encoding="utf-8", errors="replace")
        raise EdlError(
            f"the master exited unexpectedly ({_how(process.returncode)}): {log.strip()[-2000:]}"
        ) from None
    with contextlib.suppress(OSError):  # the terminal is closed
        console.print(display.result(summary, str(kept), str(kept / summary["model"])), soft_wrap=True)
    return 0 if summary["phase"] == Phase.Succeeded else code


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _become(module: str, arguments: list[str]) -> NoReturn:
    command = module_command(module)
    os.execv(command[0], [*command, *arguments])


def _merged(
    model: str, values_files: list[Path], sets: list[str], set_strings: list[str], set_files: list[str]
) -> tuple[dict[str, Any], config.Config]:
    merged = values.load(values_files, sets, set_strings, set_files)
    if model:
        merged = values.merge(merged, {"model": {"module": model, "source": ""}})
    typed = config.parse(merged)
    paths = {("checkpoint", "dir"): typed.checkpoint.dir, ("initFrom", "path"): typed.init_from.path}
    for (section, key), path in paths.items():
        if path and "://" not in path:
            # Absolute, because `edl run --resume` may be called in a different directory.
            merged = values.merge(merged, {section: {key: str(Path(path).resolve())}})
    typed = config.parse(merged)
    return merged, typed


def _values_of(output: Path) -> Path:
    """The values file of a job to resume.

    Raises:
        EdlError: the job still runs, or the directory holds no job.
    """
    path = output / VALUES
    if not path.exists():
        raise ConfigError(f"--resume {output}: not the output directory of a job ({VALUES} not found)")
    try:
        os.close(artifacts.lock(output))
    except EdlError:
        raise EdlError(f"--resume {output}: the job still runs; end it with `edl stop {output}`") from None
    except OSError:  # the directory cannot be written, so no master runs there
        pass
    return path


def _check_checkpoints(typed: config.Config, resume: Path | None) -> None:
    """Check before the start what every worker would check.

    Raises:
        ConfigError: no checkpoint to resume from exists, or the checkpoints belong to a different job.
    """
    where = typed.checkpoint.dir
    found = Store.open(where).checkpoints() if where else []
    if newest := next((c for c in reversed(found) if not c.wrong()), None):
        check_values(where, newest.manifest, typed, "")
    elif resume is not None and typed.trains:  # a prediction job resumes from its own output
        why = f"{where} holds no whole checkpoint" if where else "the job wrote none: checkpoint.dir is empty"
        raise ConfigError(f"--resume {resume}: no checkpoint to resume from: {why}")
    elif source := typed.init_from.path:
        try:
            if not source.endswith((".keras", ".weights.h5")):
                one_of(source)
            elif "://" not in source and not Path(source).is_file():
                raise ConfigError(f"{source}: no such file")
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"initFrom.path: {error}") from error


def _prepare(output: Path, merged: dict[str, Any], salvage: Path | None, may_exist: bool = False) -> int:
    """Create the output directory and write the job's values there. Return its lock (`artifacts.lock`).

    Raises:
        EdlError: the directory holds a different job, or cannot be written.
    """
    if salvage is not None:
        try:
            salvage.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EdlError(f"--salvage {salvage}: cannot write: {error.strerror}") from error
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = artifacts.lock(output)
        if (output / artifacts.JOURNAL).exists() and not may_exist:
            raise EdlError(
                f"{output}: already holds a job ({artifacts.JOURNAL}); choose a different --output"
            )
        artifacts.write_whole(output / VALUES, json.dumps(merged, indent=1) + "\n")
    except OSError as error:
        raise EdlError(f"{output}: cannot write: {error.strerror}") from error
    return lock
