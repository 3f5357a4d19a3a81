# SPDX-License-Identifier: Apache-2.0
"""Saving a trained model in the first form and the first directory that work.

Promise: the trained variables are written before any of the user's code runs. A model that cannot be saved in
the output directory is saved elsewhere, and of one that cannot be saved whole at all, its weights are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from edl.contract import artifacts
from edl.full_disk import PASSING
from edl.trainer.export import saved_file

FAILURES = (Exception, SystemExit)  # what the user's code may raise


def _save_weights(model: keras.Model, path: Path) -> None:
    """Save the weights as Keras does, also of a model whose own train_step() calls only its layers."""
    if not model.built and model.variables:
        model.built = True  # its layers are, and Keras asks for no more
    model.save_weights(path)


def _save_variables(model: keras.Model, path: Path) -> None:
    """Save each variable by its path, without Keras: the last resort."""
    paths = [f"{number}:{v.path}" for number, v in enumerate(model.variables)]
    arrays = {p: np.asarray(v) for p, v in zip(paths, model.variables, strict=True)}
    np.savez(path, **arrays)  # type: ignore[arg-type]


# How a model can be written beside its variables, the best way first. Both run the user's code.
FORMS: tuple[tuple[str, Callable[[keras.Model, Path], None]], ...] = (
    (artifacts.MODEL, saved_file.save),
    (artifacts.WEIGHTS, _save_weights),
)


@dataclass(frozen=True)
class Kept:
    """A saved model, and why it was not saved better.

    Args:
        path: the file; None if nothing could be written anywhere.
        trouble: why the whole model is not in the first directory; None if it is.
        spare: a file with the variables, which `path` makes superfluous; None without this file.
    """

    path: Path | None
    trouble: BaseException | None = None
    spare: Path | None = None

    def drop_spare(self) -> None:
        """The master knows of `path`."""
        if self.spare is not None:
            with contextlib.suppress(OSError):
                self.spare.unlink(missing_ok=True)

    @property
    def is_whole(self) -> bool:
        """Whether the kept file is a model, and not its variables only."""
        return self.path is not None and self.path.name == artifacts.MODEL


def secure(model: keras.Model, directories: Sequence[Callable[[], Path]], worker: int) -> Path | None:
    """Write the model's variables into the first directory that takes them. Runs none of the user's code.

    Args:
        directories, worker: see `keep`.
    """
    for directory in directories:
        with contextlib.suppress(*FAILURES):
            return write_whole(model, directory() / artifacts.VARIABLES, _save_variables, worker)
    return None


def keep(
    model: keras.Model,
    directories: Sequence[Callable[[], Path]],
    worker: int,
    secured: Callable[[Path | None], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Kept:
    """Save the model in the first form and the first directory that work: whole anywhere before its weights.

    Args:
        directories: in order of preference. Each is called only when tried, so that no unused one is made.
        worker: the number of this worker, for the names of unfinished files.
        secured: wraps the calls of the user's code, and takes the file with the variables.
    """
    trouble: BaseException | None = None
    safe = secure(model, directories, worker)
    with secured(safe):
        for name, write in FORMS:
            for directory in directories:
                try:
                    kept = write_whole(model, directory() / name, write, worker)
                except FAILURES as error:
                    trouble = trouble or disk_error(error) or error
                    if not (may_pass(disk_error(error)) and safe and safe.parent == directory()):
                        continue
                    # The disk has no room for both files. The model's get_config() has already returned.
                    safe.unlink(missing_ok=True)
                    safe = None
                    try:
                        kept, trouble = write_whole(model, directory() / name, write, worker), None
                    except FAILURES:
                        safe = secure(model, directories, worker)
                        continue
                return Kept(kept, trouble, safe)
    return Kept(safe, trouble)


def write_whole(
    model: keras.Model, path: Path, write: Callable[[keras.Model, Path], None], worker: int
) -> Path:
    """Whole or not at all: a reader sees the old file, none, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*.{path.name}"):  # of a worker that was lost while writing
        left.unlink(missing_ok=True)
    unfinished = path.with_name(f".{worker}.{path.name}")
    try:
        write(model, unfinished)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def disk_error(error: BaseException) -> OSError | None:
    """Find the disk's OSError behind an error, if it has one: code that writes files often wraps it."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        cause = cause.__cause__ or cause.__context__
    return cause


def may_pass(error: BaseException | None) -> bool:
    """Whether the error means a full disk, which may have room later."""
    return isinstance(error, OSError) and error.errno in PASSING


@functools.cache
def temporary() -> Path:
    """A temporary directory of this process, created on first use."""
    return Path(tempfile.mkdtemp(prefix="edl-model-"))
