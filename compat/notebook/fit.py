# SPDX-License-Identifier: Apache-2.0
"""`edl.fit`: run a job from a notebook or a script, with functions that are defined there."""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edl import scratch
from edl.cli.start.local_job import new_output
from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.errors import ConfigError, EdlError

FUNCTIONS = ("feed", "transform", "callbacks", "write")  # that a model file may have beside model and data
# Workers of this machine load it from the job's own directory, as they import a model file; it comes from no
# network.
PICKLE = "functions.pickle"
MODEL_FILE = """\
# Written by edl.fit. The functions are those of the notebook or script that called it.
import sys
from pathlib import Path

import cloudpickle

sys.path.extend(path for path in {path!r} if path not in sys.path)
_functions = cloudpickle.loads(Path(__file__).with_name({pickle!r}).read_bytes())
model = _functions["model"]
data = _functions["data"]
"""


@dataclass(frozen=True)
class Fit:
    """A training that has succeeded.

    Args:
        output: the job's output directory, with the model, the logs and the report.
        summary: the contents of summary.json.
        history: loss and metrics by epoch, as in `keras.callbacks.History.history`.
    """

    output: Path
    summary: dict[str, Any]
    history: dict[str, list[float]]

    @cached_property
    def model(self) -> Any:
        """The trained model, a `keras.Model`."""
        import keras

        return keras.models.load_model(self.output / self.summary["model"])


def fit(
    model: Callable[[], Any],
    data: Any,
    *,
    workers: int = 2,
    epochs: int | None = None,
    batch_size: int | None = None,
    values: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    verbose: bool = True,
    **functions: Callable[..., Any],
) -> Fit:
    """Train a model in processes of this machine, as `edl run` does, and return when it is trained.

    The functions may be defined in a notebook: they reach the workers as bytes (cloudpickle). A worker is
    another process, so what a function changes in a variable outside it is not seen here.

    Args:
        model: a function that returns a compiled Keras model.
        data: the function `data(split)` or `data()` of a model file, or what it would return: arrays, a
            table, a dataset. Of these, the share `data.validationFraction` is held out.
        workers: the number of worker processes.
        epochs: `training.epochs`.
        batch_size: `training.batchSize`, the number of records in a step of all workers together.
        values: any other values of the job, by their keys: `{"training.seed": 7}`.
        output: the output directory; by default a new one in `runs/`.
        verbose: print what `edl run` prints.
        functions: other functions of a model file: `feed`, `transform`, `callbacks`, `write`.

    Raises:
        ConfigError: an argument or a value is not valid.
        EdlError: the job did not succeed; the message has its reason and its output directory.
        KeyboardInterrupt: the job was interrupted, and has been stopped.
    """
    if not callable(model) or hasattr(model, "get_config"):
        raise ConfigError(
            f"edl.fit: model is a {type(model).__name__}, and must be a function that returns a compiled "
            "model: each worker builds its own"
        )
    if unknown := sorted(functions.keys() - set(FUNCTIONS)):
        raise ConfigError(f"edl.fit: unknown argument {unknown[0]!r} (functions are {', '.join(FUNCTIONS)})")
    chosen = {
        "workers": workers,
        "training.epochs": epochs,
        "training.batchSize": batch_size,
        **(values or {}),
    }
    with scratch.directory() as folder:
        where = _new_output(output)
        file = where / "fit.py"
        _write_model_file(file, model, data, functions)
        given = folder / "values.json"
        given.write_text(json.dumps(_nested({k: v for k, v in chosen.items() if v is not None})))
        code, told = _run([str(file), "-f", str(given), "--output", str(where)], verbose)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == 2:
        raise ConfigError(told)
    try:
        summary = artifacts.read_summary(where)
    except EdlError:
        raise EdlError(told or f"edl run exited with code {code}") from None
    if code:
        raise EdlError(f"{summary['phase']}: {summary['reason']} (the logs are in {where})")
    history = where / artifacts.HISTORY
    return Fit(where, summary, json.loads(history.read_text()) if history.exists() else {})


def _new_output(output: str | Path | None) -> Path:
    where = Path(output) if output is not None else new_output("fit")
    if (where / artifacts.JOURNAL).exists():
        raise ConfigError(f"edl.fit: {where} already holds a job; choose another output")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EdlError(f"{where}: cannot write: {error.strerror}") from error
    return where.resolve()


def _write_model_file(
    file: Path, model: Callable[[], Any], data: Any, functions: Mapping[str, Callable[..., Any]]
) -> None:
    """Write a model file whose functions are these.

    Raises:
        ConfigError: a function, or something that it uses, cannot be sent to another process.
    """
    import cloudpickle

    # A class or a table may be callable; a dataset is an object with a length.
    called = data if inspect.isroutine(data) else lambda: data
    try:
        pickled = cloudpickle.dumps({"model": model, "data": called, **functions})
    except Exception as error:  # any: it is of the user's objects
        raise ConfigError(f"edl.fit: the functions cannot be sent to the workers: {error}") from error
    file.with_name(PICKLE).write_bytes(pickled)
    lines = [f'{name} = _functions["{name}"]\n' for name in functions]
    path = [entry or str(Path.cwd()) for entry in sys.path]
    artifacts.write_whole(file, MODEL_FILE.format(path=path, pickle=PICKLE) + "".join(lines))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by section, from values by dotted keys."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested


def _run(arguments: list[str], verbose: bool) -> tuple[int, str]:
    """Run `edl run` and show what it prints; its exit code, and what it wrote to standard error."""
    with subprocess.Popen(
        [*module_command("edl.cli"), "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # an interrupt of this process reaches the job once, from here
    ) as process:
        last: list[str] = []
        while True:
            try:
                _follow(process, last, verbose)
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)  # stops the job; a second one kills it
    return process.returncode, "\n".join(last).removeprefix("edl: ")


def _follow(process: subprocess.Popen[str], last: list[str], verbose: bool) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if verbose:
            print(line, end="", flush=True)
        last[:] = [*last[-19:], line.rstrip()]
    process.wait()
