# SPDX-License-Identifier: Apache-2.0
"""Saving a trained model: first its variables, then the whole model in the first directory that takes it.

Promise: the trained variables are written before any of the user's code runs. If the whole model can be saved
nowhere, this file stays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
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


def _save_variables(model: keras.Model, path: Path) -> None:
    """Save each variable by its path, without Keras."""
    paths = [f"{number}:{v.path}" for number, v in enumerate(model.variables)]
    arrays = {p: np.asarray(v) for p, v in zip(paths, model.variables, strict=True)}
    np.savez(path, **arrays)  # type: ignore[arg-type]


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
    """Save the whole model in the first directory that takes it; else keep the file with its variables.

    Args:
        directories: in order of preference; the last resort is a temporary one.
        worker: the number of this worker, for the names of unfinished files.
        safe: the file with the variables, from `secure`.
        classes: the names of the labels' classes by number, which a whole model has, too.
    """
    trouble: BaseException | None = None
    write = partial(saved_file.save, model, classes=classes)
    for directory in _places(directories):
        try:
            return Kept(formats.put(directory / artifacts.MODEL, write, worker), trouble, safe)
        except FAILURES as error:
            trouble = trouble or disk_error(error) or error
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
