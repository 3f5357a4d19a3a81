# SPDX-License-Identifier: Apache-2.0
"""Verified copying of a trained model: the copy is complete and unchanged, or does not exist.

`exports.json` beside the model lists its files (edl/contract/exports.py), each with its size and SHA-256.
The received files are compared with this list in a temporary place, and then moved to their target.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from edl import scratch
from edl.contract import artifacts, exports
from edl.contract.exports import File
from edl.errors import EdlError

PIECE = 1 << 20


def refuse_script(script: str, where: object) -> None:
    """Refuse the job of a script, which writes its files itself.

    Args:
        script: model.script of its values; empty: the job exports a model of Keras.
        where: location of the job, for messages.

    Raises:
        EdlError: the job runs a script.
    """
    if script:
        raise EdlError(
            f"{where}: the job runs a script, which saves its files itself, so edl has exported no model; "
            "copy them from where the script writes them (job.save: the output directory)"
        )


def read_list(output: Path) -> bytes:
    """Read the list of exports in an output directory.

    Raises:
        EdlError: the list cannot be read.
    """
    path = output / artifacts.EXPORTS
    try:
        return artifacts.read_whole(path)
    except OSError as error:
        raise EdlError(f"{path}: {error.strerror}; `edl model export` saves a stopped job's model") from error


def listed(data: bytes, name: str, where: object) -> dict[str, File]:
    """The files of a format, by their paths in the output directory.

    Args:
        data: contents of the list.
        where: location of the job, for messages.

    Raises:
        EdlError: the list is damaged, or the model was not written in this format.
    """
    try:
        found = exports.parse(data)
    except exports.Damaged as error:
        raise EdlError(f"{where}: {artifacts.EXPORTS} is damaged: {error}") from error
    if name not in found:
        raise EdlError(
            f"{where}: the model was not written as {name} (there is: {', '.join(found)}); "
            "export.formats says what is, or `edl model export` writes it"
        )
    if found[name].path != artifacts.FORMATS[name]:
        raise EdlError(f"{where}: the model is at {found[name].path}, where it was kept instead")
    return found[name].files


class Receiving:
    """A copy in progress.

    Args:
        target: the file or directory to create.
        unfinished: the file or directory to write to.
    """

    def __init__(self, target: Path, unfinished: Path):
        self._target, self._unfinished = target, unfinished
        self._nbytes, self._files = 0, 0

    @property
    def outcome(self) -> str:
        many = f" in {self._files} files" if self._files > 1 else ""
        return f"{self._target}: {self._nbytes:,} bytes{many}, as they were written (SHA-256)"

    @contextmanager
    def file(self, path: str, about: File) -> Iterator[Callable[[bytes], None]]:
        """Receive one file: yield a function to call with its bytes, piece by piece.

        Raises:
            EdlError: the received file differs from what was written.
        """
        place = self._unfinished.joinpath(*PurePosixPath(path).parts[1:])
        place.parent.mkdir(parents=True, exist_ok=True)
        digest, nbytes = hashlib.sha256(), 0
        with open(place, "wb") as file:

            def write(piece: bytes) -> None:
                nonlocal nbytes
                file.write(piece)
                digest.update(piece)
                nbytes += len(piece)

            yield write
            file.flush()
            os.fsync(file.fileno())
        if nbytes != about.nbytes:
            raise EdlError(f"{path}: {nbytes:,} bytes have arrived, {about.nbytes:,} were written")
        if digest.hexdigest() != about.sha256:
            raise EdlError(f"{path}: what has arrived is not what was written (its SHA-256 differs)")
        self._nbytes, self._files = self._nbytes + nbytes, self._files + 1


@contextmanager
def receiving(target: Path) -> Iterator[Receiving]:
    """Receive files in a temporary place, and move them to `target` at the end of the block.

    Args:
        target: the file or directory to create.

    Raises:
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch.unfinished(target) as unfinished:
        yield Receiving(target, unfinished)
