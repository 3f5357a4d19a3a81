# SPDX-License-Identifier: Apache-2.0
"""`edl check`: try a model file and its data in one process, before a job is started."""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from edl.cli.local.job_values import Given, ModelArgument, check_addresses, complete, takes_values
from edl.cli.shared import models
from edl.cli.shared.display import Screen
from edl.cli.shared.output import TextForm, TextOption
from edl.contract.model_report import FoundArray, FoundMistake, ModelReport
from edl.contract.own_modules import module_command
from edl.contract.workers import worker_environment
from edl.errors import EdlError, ModelError
from edl.formatting import class_numbers, how_many, measured, plain

MAX_NOISE = 2_000  # characters of a crashed process's output that are shown


@takes_values
def check(
    given: Given,
    model: ModelArgument = "",
    form: TextOption = TextForm.text,
) -> None:
    """Try a model and its data, and report mistakes with their lines.

    Takes seconds. Imports the model file, reads five records of each split, makes one training step and one
    evaluation. Nothing is kept. Exit code 1: there are mistakes.
    """
    began = time.monotonic()
    merged, typed = complete(given.load(), model)
    check_addresses(typed)
    module = typed.model.module
    try:
        if not typed.model.source:
            models.check(module, not typed.data.addresses, typed.model.functions)
    except ModelError as error:  # found without TensorFlow
        if not os.path.isfile(module):
            raise
        report = ModelReport(typed.model.name, [_parsed(line, module) for line in str(error).splitlines()])
    else:
        report = _checked(merged)
    report.seconds = time.monotonic() - began
    show(report, form)
    raise typer.Exit(1 if report.mistakes else 0)


def _parsed(line: str, module: str) -> FoundMistake:
    """A mistake that edl/config/model_check.py has found in a file."""
    why = line.removeprefix(f"{module}: ").removeprefix(f"{os.path.relpath(module)}: ")
    if found := re.match(r"line ([0-9]+): (.*)", why):
        return FoundMistake(found[2], module, int(found[1]))
    return FoundMistake(why)


def _checked(merged: dict[str, Any]) -> ModelReport:
    """Check the model in a process with TensorFlow.

    What the user's code prints goes to standard error. What libraries log is shown only if the process
    crashes.

    Raises:
        EdlError: the process has crashed.
    """
    # Without this machine's GPU, on which a job may train.
    environment = {
        **os.environ,
        **worker_environment(os.environ),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as noise:
        done = subprocess.run(
            [*module_command("edl.trainer.programs.check_model"), str(result.fileno())],
            input=json.dumps(merged).encode(),
            stdout=2,
            stderr=noise,
            env=environment,
            pass_fds=[result.fileno()],
        )
        if done.returncode:
            noise.seek(0)
            said = noise.read().decode("utf-8", "replace").strip()[-MAX_NOISE:]
            how = (
                signal.Signals(-done.returncode).name
                if done.returncode < 0
                else f"exit code {done.returncode}"
            )
            raise EdlError(f"the check crashed ({how}){': ' if said else ''}{said}")
        result.seek(0)
        return ModelReport.from_json(result.read().decode())


def show(report: ModelReport, form: TextForm) -> None:
    """Print the report: mistakes to standard error, all else to standard output."""
    if form is TextForm.json:
        print(report.to_json())
        return
    console, errors = Screen(), Screen(stderr=True)
    for line in _found(report):
        console.print(line, soft_wrap=True)
    for warning in report.warnings:
        console.print(Text.assemble(("warning  ", "yellow"), plain(warning)), soft_wrap=True)
    if report.mistakes:
        sys.stdout.flush()
        for mistake in report.mistakes:
            errors.print(_mistake(mistake), soft_wrap=True)
        found = how_many(len(report.mistakes), "mistake")
        errors.print(Text(f"{found} in {plain(report.model)}", "bold red"), soft_wrap=True)
        return
    seconds = f"checked in {report.seconds:.1f} s"
    console.print(Text.assemble(("ok", "bold green"), f"  {plain(report.model)}, {seconds}"), soft_wrap=True)


def _found(report: ModelReport) -> Iterator[Text]:
    """Lines about what was found, in three columns."""
    rows = [tuple(map(plain, row)) for row in _rows(report)]
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for name, what, more in rows:
        text = f"{what:{second}}  {more}".rstrip()
        yield Text.assemble((f"{name:{first}}", "dim"), f"  {text}")


def _rows(report: ModelReport) -> Iterator[tuple[str, str, str]]:
    for split in report.splits:
        yield split.name, how_many(split.records, "record"), split.source
        for array in split.arrays:
            names = ", ".join(split.columns) if array.name == "features" else ""
            if array.name == "labels" and split.classes:
                names = class_numbers(split.classes)
            yield "", f"  {array.name}", f"{_kind(array)}  {names}".rstrip()
    if report.parameters:
        fixed = report.parameters - report.trained
        yield "model", how_many(report.parameters, "parameter"), f"{fixed:,} not trained" if fixed else ""
        for output in report.outputs:
            yield "", f"  {output.name}", _kind(output)
    if report.loss is not None:
        made_by = f"{report.optimizer}, " if report.optimizer else ""
        yield (
            "step",
            f"loss {measured(report.loss)}",
            f"{made_by}{how_many(report.steps, 'step')} in an epoch",
        )
    for name, value in sorted(report.metrics.items()):
        yield "", f"{name} {measured(value)}", "of 5 records that are evaluated"
    if report.state_bytes:
        own = f"{_size(report.state_bytes)} of it the weights and the optimizer"
        yield "memory", f"{_size(report.process_bytes)} in this check", own


def _mistake(mistake: FoundMistake) -> Text:
    """A mistake with its line of code."""
    text = Text()
    if mistake.file:
        inside = f", in {plain(mistake.function)}" if mistake.function else ""
        text.append(f"{plain(_name(mistake.file))}, line {mistake.line}{inside}\n", "bold")
        if code := linecache.getline(mistake.file, mistake.line).strip():
            text.append(f"    {plain(code)}\n", "cyan")
    text.append(f"  {plain(mistake.why)}\n")
    if mistake.cause:
        text.append(f"  {plain(mistake.cause)}\n", "dim")
    return text


def _name(file: str) -> str:
    """A file's path as seen from here, if it is below."""
    below = os.path.relpath(file)
    return file if below.startswith("..") else below


def _kind(array: FoundArray) -> str:
    shape = ", ".join("any" if n is None else str(n) for n in array.shape)
    return f"{array.dtype} ({shape}{',' if len(array.shape) == 1 else ''})"


def _size(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 10 << 20 else f"{-(-size // 2**10):,} KiB"
