"""`edl run`, `edl master`, `edl worker`: the sides of a job as processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from edl import config
from edl.cli import display, latest, models
from edl.client import Client
from edl.config import values
from edl.contract import artifacts
from edl.errors import EdlError

FileOption = Annotated[
    list[Path], typer.Option("-f", "--values", help="A values file; repeatable, merged in order.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Values as in Helm; repeatable: --set workers=3,training.epochs=5")
]
SetStringOption = Annotated[list[str], typer.Option("--set-string", help="As --set, but always strings.")]


def run(
    model: Annotated[
        str, typer.Argument(help="The model: a name from `edl zoo list`, a dotted module, or a Python file.")
    ] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option("--output", help="The output directory; default: a new one in runs/.")
    ] = None,
) -> None:
    """Train a model on this machine, with workers as processes."""
    merged, typed = _merged(model, values_files, sets, set_strings)
    if not typed.model.source:
        models.check(typed.model.module)
    name = Path(typed.model.name).stem.rsplit(".", 1)[-1]
    output = output or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    _prepare(output, merged)
    console = Console(highlight=False)
    (output / artifacts.LOGS).mkdir(exist_ok=True)
    with open(output / artifacts.LOGS / "master.log", "wb") as log:
        arguments = ["--values", str(output / "values.json"), "--output", str(output)]
        process = subprocess.Popen(
            [sys.executable, "-m", "master", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    raise typer.Exit(_attend(console, process, output))


def master(
    output: Annotated[Path, typer.Option("--output", help="The output directory.")],
    model: Annotated[str, typer.Argument(help="As for `edl run`.")] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:0",
) -> None:
    """Run only a job's master; start its workers with `edl worker`."""
    merged, _ = _merged(model, values_files, sets, set_strings)
    # In a directory whose master has died, this one goes on with the job.
    _prepare(output, merged, may_exist=latest.is_orphaned(output))
    latest.remember(output)
    arguments = ["--values", str(output / "values.json"), "--output", str(output), "--listen", listen]
    _become("master", [*arguments, "--backend", "external"])


def worker(
    master: Annotated[str, typer.Option("--master", help="HOST:PORT of the master.")],
    identity: Annotated[
        int, typer.Option("--worker", help="This worker's id; default: assigned by the master.")
    ] = -1,
    token_from: Annotated[
        Path | None,
        typer.Option("--token-from", help="The master's output directory, which holds the job's token; "
                     "default: the environment variable EDL_TOKEN."),
    ] = None,
) -> None:  # fmt: skip
    """Run one worker of `edl master`."""
    if token_from is not None:
        os.environ["EDL_TOKEN"] = artifacts.read_contact(token_from).token
    _become("trainer", ["--master", master, "--worker", str(identity)])


def _attend(console: Console, process: subprocess.Popen[bytes], output: Path) -> int:
    """Show the job until it ends; Ctrl-C, SIGTERM or a closed terminal end it. Returns the exit code."""
    assert process.stdout is not None
    interrupted = False

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    while True:
        try:
            if process.stdout.readline():  # the master says when it listens
                latest.remember(output)
                caller = Client(artifacts.read_contact(output))
                display.show(console, caller.follow())
            process.wait()
            break
        except KeyboardInterrupt:
            if interrupted:
                console.print("master killed; the workers exit when they notice")
                process.kill()
            else:
                console.print("stopping the job (interrupt again to kill it)")
                process.terminate()
            interrupted = True
    try:
        summary = json.loads((output / artifacts.SUMMARY).read_text(encoding="utf-8"))
    except OSError:
        log = (output / artifacts.LOGS / "master.log").read_text(encoding="utf-8", errors="replace")
        raise EdlError(
            f"the master exited unexpectedly ({_how(process.returncode)}): {log.strip()[-2000:]}"
        ) from None
    console.print(
        display.result(summary, str(output), str(output / artifacts.MODEL)), markup=False, soft_wrap=True
    )
    return 0 if summary["phase"] == "Succeeded" else 1


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _merged(
    model: str, values_files: list[Path], sets: list[str], set_strings: list[str]
) -> tuple[dict[str, Any], config.Config]:
    merged = values.load(values_files, sets, set_strings)
    if model:
        merged = values.merge(merged, {"model": {"module": model, "source": ""}})
    return merged, config.parse(merged)


def _prepare(output: Path, merged: dict[str, Any], may_exist: bool = False) -> None:
    """An output directory of this job's own, with its values in it.

    Raises:
        EdlError: the directory holds another job, or cannot be written.
    """
    if (output / artifacts.JOURNAL).exists() and not may_exist:
        raise EdlError(f"{output}: already holds a job ({artifacts.JOURNAL}); choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(output / "values.json", json.dumps(merged, indent=1) + "\n")
    except OSError as error:
        raise EdlError(f"{output}: cannot write: {error.strerror}") from error
