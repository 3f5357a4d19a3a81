# SPDX-License-Identifier: Apache-2.0
"""A job on this machine, from its output directory to its result: start its master, show it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edl.cli.jobs import ui
from edl.cli.local import latest
from edl.cli.local.job_values import has_checkpoint
from edl.cli.local.latest import RUNS, VALUES
from edl.cli.shared import display
from edl.cli.start import follow
from edl.cli.start.script_lines import ScriptLines
from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.contract.phases import Phase
from edl.errors import EdlError
from edl.formatting import plain
from edl.net.master_client import Client
from edl.report.at_end import write_report
from edl.signals import to_handle

MAX_NAME = 80  # greatest length of the model's name in the name of an output directory
LAST_LINES = 10  # of the log of a master that exited unexpectedly, for the error


def new_output(name: str) -> Path:
    """The path of a new output directory for a job with this name."""
    return RUNS / f"{name[:MAX_NAME]}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


def run_job(
    output: Path,
    merged: dict[str, Any],
    salvage: Path | None = None,
    detach: bool = False,
    with_ui: bool = False,
    more: Sequence[str] = (),
    begun: Callable[[subprocess.Popen[bytes]], None] = lambda master: None,
    command: str = "edl run",
    all_output: bool = False,
) -> int:
    """Run a job with these values, and show it until it ends. Return the exit code.

    Args:
        more: additional arguments of the master.
        begun: is called with the master's process once the master listens.
        command: the command that runs the job, for the job's reason if this process is killed.
        all_output: of a script, show the lines of all workers, and not only those of rank 0.

    Raises:
        EdlError: a Horovod without edl's patches is installed, or `output` cannot be used.
    """
    _refuse_packages(merged)
    lock = prepare(output, merged, salvage)
    interrupts = Interrupts()
    process = interrupts.process = _start(output, salvage, lock, "" if detach else command, more)
    if detach:
        return _detach(process, output, interrupts)
    with contextlib.ExitStack() as until_the_end:
        pages = until_the_end if with_ui else None
        screen, lines = display.Screen(), None
        if merged["model"].get("script"):

            def show(line: str) -> None:
                screen.print(line, soft_wrap=True)

            lines = ScriptLines(output / artifacts.LOGS, show, all_output, process.terminate)
        return _attend(screen, process, output, interrupts, pages, begun, lines)


@contextlib.contextmanager
def running(output: Path, merged: dict[str, Any], command: str) -> Iterator[None]:
    """Run a job with these values while the context is open, without showing it; stop it at the end.

    The job also ends with this process.

    Args:
        command: as for `run_job`.

    Raises:
        EdlError: as `run_job`, or the master has exited at its start.
    """
    _refuse_packages(merged)
    lock = prepare(output, merged, None)
    process = _start(output, None, lock, command, ())
    os.close(lock)
    assert process.stdout is not None and process.stdin is not None
    with process:
        if not process.stdout.readline():
            raise EdlError(exited(output, process.wait()))
        latest.remember(output)
        try:
            yield
        finally:
            with contextlib.suppress(EdlError):
                Client(artifacts.read_contact(output)).stop("its short run is over")
            process.stdin.close()


def _refuse_packages(merged: dict[str, Any]) -> None:
    """Refuse to run where TensorFlow is missing, or where a Horovod without edl's patches is installed.

    That has the same files as edl-horovod, so whichever of the two came last has overwritten the other's.

    Raises:
        EdlError: the package `horovod` is installed, and was not compiled by edl; or a Keras model, which a
            script is not, needs TensorFlow.
    """
    if not merged.get("model", {}).get("script") and find_spec("tensorflow") is None:
        raise EdlError(
            "a Keras model needs TensorFlow, which is not installed: pip install 'edl-trainer[worker]'"
        )
    try:
        found = version("horovod")
    except PackageNotFoundError:  # edl-horovod may be
        return
    if "+edl." not in found:  # scripts/setup installs 0.28.1+edl.8
        raise EdlError(
            f"horovod {found} is installed, which lacks edl's patches and shares its files with edl-horovod; "
            "remove both (pip uninstall horovod edl-horovod), and install edl again"
        )


def prepare(output: Path, merged: dict[str, Any], salvage: Path | None, may_exist: bool = False) -> int:
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


class Interrupts:
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
            os.write(
                2,
                b"master killed; the workers exit when they notice\n"
                if again
                else b"stopping the job (interrupt again to kill it)\n",
            )
        if again:
            self.process.kill()
        else:
            # The master names the signal in the job's reason; Ctrl-C at a terminal does not reach it.
            self.process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)


def master_arguments(output: Path, salvage: Path | None) -> list[str]:
    """Arguments of the job's master."""
    # Two jobs may use the same directory, so each has a subdirectory for its model.
    own = ["--salvage", str(salvage / output.resolve().name)] if salvage is not None else []
    return ["--values", str(output / VALUES), "--output", str(output), *own]


def _start(
    output: Path, salvage: Path | None, lock: int, command: str, more: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the job's master.

    Args:
        command: the command of this process. The master ends the job when this process ends, because that
            closes the master's standard input. Empty: the job goes on by itself.
    """
    arguments = master_arguments(output, salvage)
    (output / artifacts.LOGS).mkdir(exist_ok=True)
    with open(output / artifacts.LOGS / "master.log", "wb") as log:
        return subprocess.Popen(
            [*module_command("edl.master"), *arguments, "--attached", command, *more],
            stdin=subprocess.PIPE if command else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock],
        )


def _detach(process: subprocess.Popen[bytes], output: Path, interrupts: Interrupts) -> int:
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
    console: display.Screen,
    process: subprocess.Popen[bytes],
    output: Path,
    interrupts: Interrupts,
    pages: contextlib.ExitStack | None,
    begun: Callable[[subprocess.Popen[bytes]], None],
    lines: ScriptLines | None,
) -> int:
    """Show the job until it ends. Return the exit code.

    Args:
        lines: shows the lines of the job's script; None: the job has no script.
        pages: keeps the job's live page open; None: the job has no live page.
        begun: is called once the master listens.
    """
    assert process.stdout is not None
    unread = False
    try:
        if process.stdout.readline():  # the master prints a line once it listens
            latest.remember(output)
            begun(process)
            if pages is not None:
                console.print(pages.enter_context(ui.beside(output)), soft_wrap=True)
            statuses = Client(artifacts.read_contact(output)).follow()
            if lines is None:
                follow.show(console, statuses)
            else:
                with lines:
                    follow.show(console, lines.follow(statuses))
    except OSError:  # the output is a closed pipe, or the terminal is closed
        unread = True
        process.terminate()
    process.wait()
    if unread:
        return 128 + (interrupts.number or signal.SIGPIPE)
    return _ended(console, process, output, interrupts, script=lines is not None)


def _ended(
    console: display.Screen,
    process: subprocess.Popen[bytes],
    output: Path,
    interrupts: Interrupts,
    script: bool = False,
) -> int:
    """Print the result of the job. Return the exit code.

    Raises:
        EdlError: the master exited unexpectedly; the message holds the end of its log.
    """
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
        raise EdlError(exited(output, process.returncode)) from None
    with contextlib.suppress(OSError):  # the terminal is closed
        told = display.result(summary, str(kept), str(kept / summary["model"]))
        console.print(display.ended(summary["phase"], told), soft_wrap=True)
        if script and (saved := latest.others(kept)):
            console.print(f"  saved     {saved}", soft_wrap=True)
        if script:
            console.print(f"  lines     of all workers: {plain(str(kept / artifacts.LOGS))}", soft_wrap=True)
        if told := write_report(kept):
            console.print(f"  {told}", style="yellow" if told.startswith("warning") else None, soft_wrap=True)
        if told := display.next_steps(summary, str(kept), told.startswith("report")):
            console.print(told, soft_wrap=True)
    return 0 if summary["phase"] == Phase.Succeeded else code


def exited(output: Path, code: int) -> str:
    """Describe an unexpected end of the master: its cause, the end of its log, and how to resume the job."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    log = (output / artifacts.LOGS / "master.log").read_text(encoding="utf-8", errors="replace")
    last = "\n".join(log.strip().splitlines()[-LAST_LINES:])
    resume = (
        f"\nresume the job: edl run --resume {shlex.quote(str(output))}" if has_checkpoint(output) else ""
    )
    return f"the master exited unexpectedly ({how}); its last lines:\n{last}{resume}"
