# SPDX-License-Identifier: Apache-2.0
"""The preflight check: before the first step, try the end of the job with a few real records.

Promise: all that would certainly fail at the end fails now, in the first seconds, and not after days of
training. A failing evaluation ends the job. A model that cannot be saved whole, or loaded again, can still be
trained, and its weights can be saved; this is only a warning. The check may change the model's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from edl import scratch
from edl.contract import artifacts
from edl.contract.exports import VERIFIER_BYTES, VERIFIER_COPIES
from edl.errors import EdlError, UserCodeError
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.export import formats, saved_file
from edl.trainer.export.model_saving import disk_error
from edl.trainer.export.saved_file import FAILURES
from edl.trainer.export.verification import refuse_without
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.splits import refuse_empty
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
    _evaluate(model, module, watch, allow_empty)
    if not keeps:
        return
    with scratch.directory() as directory:
        for name in ("keras", *further):
            path = directory / artifacts.FORMATS[name]
            try:
                formats.write(model, name, path, features)
            except FAILURES as error:
                _unwritten(name, error, warn)
            else:
                if name == "keras":
                    _load(model, module, path, warn, verifies)


def _evaluate(model: keras.Model, module: UserModel, watch: Watch, allow_empty: bool) -> None:
    try:
        for split, reader in module.held_out().items():
            size = len(reader)
            refuse_empty(size, split, module.name, allow_empty)
            ends = [(0, min(BATCH, size)), (max(size - BATCH, 0), size)]
            evaluate(model, module, reader, watch, ends, split)
    except EdlError:
        raise
    except FAILURES as error:
        raise UserCodeError(
            "the trained model could not be evaluated on the held-out records, tried out before the first "
            f"step: {format_error(error)}"
        ) from error


def _unwritten(name: str, error: BaseException, warn: Callable[[str], None]) -> None:
    """Warn of a model that could not be written in a format.

    Raises:
        UserCodeError: the model itself is the cause, and the format is not Keras' own.
    """
    if (full := disk_error(error)) is not None:
        warn(f"whether the model can be written as {name} could not be tried out: {full}")
    elif name == "keras":
        warn(
            f"the model cannot be saved whole: {format_error(error)}; only its weights will be kept "
            f"({artifacts.VARIABLES}), and the job will not count as succeeded"
        )
    else:
        raise UserCodeError(
            f"export.formats: the model cannot be written as {name}, tried out before the first step: "
            f"{format_error(error)}"
        ) from error


def _load(
    model: keras.Model, module: UserModel, path: Path, warn: Callable[[str], None], verifies: bool
) -> None:
    """Load the saved model, and warn of what its users must know to do so, or of too little memory for it."""
    if note := saved_file.note(path):
        warn(note)
    try:
        loaded = saved_file.load(path, module.names)
        same = saved_file.weights_digest(loaded) == saved_file.weights_digest(model)
        why = "" if same else "is loaded with other weights than it was saved with"
    except FAILURES as error:
        why = f"cannot be loaded again: {format_error(error)}"
    if why:
        warn(saved_file.by_its_code(f"{artifacts.MODEL} {why}"))
    try:
        if verifies:
            refuse_without(VERIFIER_BYTES + VERIFIER_COPIES * path.stat().st_size)
    except EdlError as error:
        warn(f"the model could not be verified at the end: {error}")
