"""The `edl` command. It talks to a master and starts the sides as processes; it decides nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from edl import config
from edl.cli import client, display, zoo
from edl.cli.jobs import ENDED, Job, Phase, Whose
from edl.cli.target import DirArgument, about_a_job
from edl.config import model_check, values
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError, ModelError

app = typer.Typer(
    name="edl",
    help="Elastic training of Keras models: workers come and go, every record counts exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(zoo.app)

FileOption = Annotated[
    list[Path], typer.Option("-f", "--values", help="A values file; several are merged in order.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", help="One value or several: --set workers=3,training.epochs=5")
]
SetStringOption = Annotated[list[str], typer.Option("--set-string", help="As --set, but always a text.")]
TIME_IS_UP = 124  # as the command `timeout` says it


def _seconds(text: str) -> float:
    """Of a time such as 90s, 30m, 2h, or seconds without a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise typer.BadParameter(f"{text!r} is no time; allowed: a number with s, m or h, such as 90s")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@app.command()
def run(
    model: Annotated[
        str, typer.Argument(help="A model of the zoo, a dotted module, or a Python file; as model.module.")
    ] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to keep what the job leaves; default: runs/...")
    ] = None,
) -> None:
    """Train a model on this machine, with workers as processes."""
    merged, typed = _merged(model, values_files, sets, set_strings)
    _check_model_file(typed.model)
    name = Path(typed.model.name).stem.rsplit(".", 1)[-1]
    output = output or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    _prepare(output, merged)
    console = Console(highlight=False)
    (output / artifacts.LOGS).mkdir(exist_ok=True)
    with open(output / artifacts.LOGS / "master.log", "wb") as log:
        arguments = ["--values", str(output / "values.json"), "--output", str(output)]
        master = subprocess.Popen(
            [sys.executable, "-m", "master", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    code = _attend(console, master, output)
    raise typer.Exit(code)


def _attend(console: Console, master: subprocess.Popen[bytes], output: Path) -> int:
    """Show the job until it ends; Ctrl-C, SIGTERM or a closed terminal end it."""
    assert master.stdout is not None
    interrupted = False

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    while True:
        try:
            if master.stdout.readline():  # the master says when it listens
                client.remember(output)
                caller = client.Client(artifacts.read_contact(output))
                display.show(console, caller.follow())
            master.wait()
            break
        except KeyboardInterrupt:
            if interrupted:
                console.print("killed: workers end by themselves when they notice")
                master.kill()
            else:
                console.print("ending the job (once more to kill it)")
                master.terminate()
            interrupted = True
    try:
        summary = json.loads((output / artifacts.SUMMARY).read_text(encoding="utf-8"))
    except OSError:
        log = (output / artifacts.LOGS / "master.log").read_text(encoding="utf-8", errors="replace")
        _fail(f"the master ended without a word ({master.returncode}); {log.strip()[-2000:]}", 1)
    console.print(display.result(summary, str(output)), markup=False, soft_wrap=True)
    return 0 if summary["phase"] == "Succeeded" else 1


@app.command()
@about_a_job
def status(
    job: Job,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show a job: phase, progress, workers."""
    now = job.now()
    if as_json:
        print(json.dumps(now.data, indent=1))
        return
    display.now(now)


@app.command()
@about_a_job
def logs(
    job: Job,
    whose: Annotated[str, typer.Argument(metavar="[all|master|worker|worker-N]", help="Whose logs.")] = "all",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends, with workers to come.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="So many of the last lines of each; default: all.")
    ] = None,
) -> None:
    """Show what a job's master and workers log."""
    job.logs(Whose(whose), tail, follow, lambda line: print(line, flush=follow))


@app.command()
@about_a_job
def wait(
    job: Job,
    phase: Annotated[
        Phase, typer.Option("--for", case_sensitive=False, help="Until the job is so far.")
    ] = Phase.Succeeded,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", parser=_seconds, metavar="TIME", help="Such as 90s, 30m or 2h; default: none."
        ),
    ] = None,
) -> None:
    """Wait until a job has ended, or is so far as `--for` says.

    Exit code: 0 if it is so far (if it has Succeeded), 1 if it has ended otherwise, 124 if the time is up.
    """
    found, reason = job.wait(lambda now: now == phase, timeout)
    print(f"{found}: {reason}")
    raise typer.Exit(0 if found == phase else 1 if found in ENDED else TIME_IS_UP)


@app.command()
@about_a_job
def scale(
    job: Job,
    workers: Annotated[int, typer.Argument(help="How many workers the job should have.")],
) -> None:
    """Change the number of workers of a running job."""
    print(job.scale(workers))


@app.command()
@about_a_job
def stop(job: Job) -> None:
    """End a running job."""
    print(job.stop())


@app.command()
def audit(directory: DirArgument = None) -> None:
    """Prove from a job's journal that every record of every epoch counted exactly once."""
    from edl import audit as audit_module  # with NumPy, which the master's image does not have

    print(audit_module.audit(client.find(directory)))


@app.command()
def replay(directory: DirArgument = None) -> None:
    """Feed a job's journal through the core again: it must decide the same and end the same."""
    output = client.find(directory)
    raise typer.Exit(subprocess.call([sys.executable, "-m", "master.replay", str(output)]))


@app.command()
def master(
    output: Annotated[Path, typer.Option("--output", help="Where to keep what the job leaves.")],
    model: Annotated[str, typer.Argument(help="As for `edl run`.")] = "",
    values_files: FileOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    set_strings: SetStringOption = [],  # noqa: B006
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:0",
) -> None:
    """Run only a job's master; start the workers yourself with `edl worker`."""
    merged, _ = _merged(model, values_files, sets, set_strings)
    # In a directory whose master has died, this one goes on with the job.
    _prepare(output, merged, may_exist=client.is_orphaned(output))
    client.remember(output)
    arguments = ["--values", str(output / "values.json"), "--output", str(output), "--listen", listen]
    _become("master", [*arguments, "--backend", "external"])


@app.command()
def worker(
    master: Annotated[str, typer.Option("--master", help="HOST:PORT of the master.")],
    identity: Annotated[int, typer.Option("--worker", help="This worker's id; default: any wanted.")] = -1,
    token_from: Annotated[
        Path | None,
        typer.Option("--token-from", help="Output directory of the master, which holds the job's token; "
                     "default: the environment variable EDL_TOKEN."),
    ] = None,
) -> None:  # fmt: skip
    """Run one worker by hand."""
    if token_from is not None:
        os.environ["EDL_TOKEN"] = artifacts.read_contact(token_from).token
    _become("trainer", ["--master", master, "--worker", str(identity)])


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _merged(
    model: str, values_files: list[Path], sets: list[str], set_strings: list[str]
) -> tuple[dict[str, Any], config.Config]:
    merged = values.load(values_files, sets, set_strings)
    if model:
        merged = values.merge(merged, {"model": {"module": model, "source": ""}})
    return merged, config.parse(merged)


def _check_model_file(model: config.Model) -> None:
    module = model.module
    if model.source or not (module.endswith(".py") or os.sep in module):
        return
    if not Path(module).is_file():
        raise ConfigError(f"model.module: there is no file {module}")
    if wrong := model_check.check(zoo.read(Path(module)), module, most=None):
        raise ModelError("\n".join(wrong))


def _prepare(output: Path, merged: dict[str, Any], may_exist: bool = False) -> None:
    """An output directory of this job's own, with its values in it.

    Raises:
        EdlError: the directory holds another job, or cannot be written.
    """
    if (output / artifacts.JOURNAL).exists() and not may_exist:
        raise EdlError(f"{output}: holds a job already ({artifacts.JOURNAL}); choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(output / "values.json", json.dumps(merged, indent=1) + "\n")
    except OSError as error:
        raise EdlError(f"{output}: cannot be written: {error.strerror}") from error


def _fail(text: str, code: int) -> NoReturn:
    print(f"edl: {text}", file=sys.stderr)
    raise SystemExit(code)


def main() -> None:
    """The console script. Errors of ours are one text; anything else is a bug and keeps its traceback."""
    try:
        app(prog_name="edl")
    except (ConfigError, ModelError) as error:
        _fail(str(error).replace("\n", "\nedl: "), 2)
    except EdlError as error:
        _fail(str(error), 1)
