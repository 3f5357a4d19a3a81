# SPDX-License-Identifier: Apache-2.0
"""Saving a trained model in the first form and the first directory that work.

Promise: the trained variables are written before any of the user's code runs. A model that cannot be saved in
the output directory is saved elsewhere, and of one that cannot be saved whole at all, its weights are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras
import numpy as np

from edl import scratch
from edl.contract import artifacts
from edl.full_disk import PASSING
from edl.trainer.export import formats, saved_file
from edl.trainer.export.saved_file import FAILURES


def _save_weights(model: keras.Model, path: Path) -> None:
    saved_file.mark_built(model)
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


def secure(model: keras.Model, directories: Sequence[Path], worker: int) -> Path | None:
    """Write the model's variables into the first directory that takes them. Runs none of the user's code.

    It returns the file, for `keep`.
    """
    for directory in _places(directories):
        with contextlib.suppress(*FAILURES):
            return formats.put(directory / artifacts.VARIABLES, partial(_save_variables, model), worker)
    return None


def keep(
    model: keras.Model,
    directories: Sequence[Path],
    worker: int,
    safe: Path | None = None,
    classes: Sequence[str] = (),
) -> Kept:
    """Save the model in the first form and the first directory that work: whole anywhere before its weights.

    Args:
        directories: in order of preference; the last resort is a temporary one.
        worker: the number of this worker, for the names of unfinished files.
        safe: the file with the variables, from `secure`.
        classes: the names of the labels' classes by number, which a whole model has, too.
    """
    trouble: BaseException | None = None
    for name, save in FORMS:
        for directory in _places(directories):
            path, write = directory / name, partial(save, model)
            if save is saved_file.save:
                write = partial(saved_file.save, model, classes=classes)
            try:
                return Kept(formats.put(path, write, worker), trouble, safe)
            except FAILURES as error:
                trouble = trouble or disk_error(error) or error
                if not (may_pass(disk_error(error)) and safe and safe.parent == directory):
                    continue
                # The disk has no room for both files. The model's get_config() has already returned.
                safe.unlink(missing_ok=True)
                try:
                    return Kept(formats.put(path, write, worker))
                except FAILURES:
                    safe = secure(model, directories, worker)
    return Kept(safe, trouble)


def _places(directories: Sequence[Path]) -> Iterator[Path]:
    yield from directories
    yield temporary()


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
    """A temporary directory of this process, created on first use. A model that is saved there stays."""
    return scratch.for_results()
