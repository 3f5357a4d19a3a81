# SPDX-License-Identifier: Apache-2.0
"""The preflight check: before the first step, try the end of the job with a few real records.

Promise: all that would certainly fail at the end fails now, in the first seconds, and not after days of
training. A failing evaluation ends the job. A model that cannot be saved whole, or loaded again, can still be
trained, and its weights can be saved; this is only a warning. The check may change the model's state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from edl import scratch
from edl.contract import artifacts
from edl.errors import DataError, EdlError, UserCodeError
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.export import formats, samples, saved_file
from edl.trainer.export.model_saving import disk_error
from edl.trainer.export.saved_file import FAILURES
from edl.trainer.export.verification import BASE_BYTES, COPIES, refuse_without
from edl.trainer.model.user_model import UserModel
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.watchdog import Watch

BATCH = 2  # records; two batches are taken, the first and the last


def run_preflight(
    model: keras.Model,
    module: UserModel,
    watch: Watch,
    allow_empty: bool,
    warn: Callable[[str], None],
    keeps: bool,
    further: Sequence[str] = (),
    features: Any = None,
    verifies: bool = False,
) -> None:
    """Evaluate, save and load the model as the end of the job will.

    Args:
        watch: wraps each call of the user's code that reads.
        allow_empty: held-out data without a record are allowed.
        warn: takes what people should know in time.
        keeps: whether the model will be saved at all.
        further: in which formats beside Keras' own.
        features: the features of a few records.
        verifies: whether it will be loaded again in a process of its own.

    Raises:
        EdlError: the evaluation would fail, or one of these formats cannot be written.
    """
    if keeps:
        formats.refuse_missing(further)
    _evaluation(model, module, watch, allow_empty)
    if not keeps:
        return
    # A worker may be killed meanwhile: what it leaves is a link, and not a file as large as the model.
    with scratch.directory() as directory, tempfile.TemporaryFile() as file:
        path = directory / artifacts.MODEL
        path.symlink_to(f"/proc/self/fd/{file.fileno()}")
        for name in ("keras", *further):
            if why := _unwritten(model, name, directory / artifacts.FORMATS[name], features):
                warn(why)
            elif name == "keras":
                _loading(model, module, path, warn)
        if verifies:
            try:
                refuse_without(BASE_BYTES + COPIES * path.stat().st_size)
            except EdlError as error:
                warn(f"the model could not be verified at the end: {error}")


def _evaluation(model: keras.Model, module: UserModel, watch: Watch, allow_empty: bool) -> None:
    try:
        reader = module.reader("test")
        if reader is not None:
            size = len(reader)
            refuse_empty(size, "test", module.name, allow_empty)
            ends = [(0, min(BATCH, size)), (max(size - BATCH, 0), size)]
            evaluate(model, module, reader, watch, ends)
    except EdlError:
        raise
    except FAILURES as error:
        raise UserCodeError(
            f'the trained model could not be evaluated on data("test"), tried out before the first step: '
            f"{format_error(error)}"
        ) from error


def _unwritten(model: keras.Model, name: str, path: Path, features: Any) -> str:
    """Write the model in a format. Return a warning, empty if it was written.

    Raises:
        UserCodeError: the model cannot be written in this format, which is not Keras' own.
    """
    try:
        formats.write(model, name, path, features)
    except FAILURES as error:
        if (full := disk_error(error)) is not None:
            return f"whether the model can be written as {name} could not be tried out: {full}"
        if name == "keras":
            return (
                f"the model cannot be saved whole: {format_error(error)}; only its weights will be kept "
                f"({artifacts.WEIGHTS}, or {artifacts.VARIABLES} where Keras cannot write that), and the job "
                "will not count as succeeded"
            )
        raise UserCodeError(
            f"export.formats: the model cannot be written as {name}, tried out before the first step: "
            f"{format_error(error)}"
        ) from error
    return ""


def _loading(model: keras.Model, module: UserModel, path: Path, warn: Callable[[str], None]) -> None:
    """Load the saved model, and warn of what its users must know to do so."""
    if note := saved_file.note(path):
        warn(note)
    why = ""
    try:
        if samples.digests(saved_file.load(path, module.names)) != samples.digests(model):
            why = "is loaded with other weights than it was saved with"
    except FAILURES as error:
        why = f"cannot be loaded again: {format_error(error)}"
    if why:
        warn(saved_file.by_its_code(f"{artifacts.MODEL} {why}"))


def refuse_empty(size: int, split: str, name: str, allowed: bool) -> None:
    """Refuse data without records, unless the job allows it.

    Raises:
        DataError: there are no records, and that is not allowed.
    """
    if size == 0 and not allowed:
        none = "; return None if nothing is held out" if split == "test" else ""
        raise DataError(
            f"{name}: data({split!r}) has no records{none} (expected at least 1, or data.allowEmpty=true)"
        )
