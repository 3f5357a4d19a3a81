"""Verified copying of a trained model: the copy is complete and unchanged, or does not exist.

`exports.json` beside the model lists its files (trainer/export/catalog.py), each with its size and SHA-256.
The received files are compared with this list in a temporary place, and then moved to their target.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from edl.contract import artifacts
from edl.errors import EdlError

PIECE = 1 << 20


@dataclass(frozen=True)
class File:
    """Size and digest of a file at its writing."""

    nbytes: int
    sha256: str


def read_list(output: Path) -> bytes:
    """Read the list of exports in an output directory.

    Raises:
        EdlError: the list cannot be read.
    """
    path = output / artifacts.EXPORTS
    try:
        return path.read_bytes()
    except OSError as error:
        raise EdlError(f"{path}: cannot read: {error.strerror} (was a model saved there?)") from error


def listed(data: bytes, name: str, where: object) -> dict[str, File]:
    """The files of a format, by their paths in the output directory.

    Args:
        data: contents of the list.
        where: location of the job, for messages.

    Raises:
        EdlError: the list is damaged, or the model was not written in this format.
    """
    try:
        exports = {e["format"]: e for e in json.loads(data)["exports"]}
        if name not in exports:
            raise EdlError(
                f"{where}: the model was not written as {name} (there is: {', '.join(exports)}); "
                "export.formats says what is, or `edl export` writes it"
            )
        if exports[name]["path"] != artifacts.FORMATS[name]:
            raise EdlError(f"{where}: the model is at {exports[name]['path']}, where it was kept instead")
        files = {
            str(path): File(int(about["bytes"]), str(about["sha256"]))
            for path, about in exports[name]["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EdlError(f"{where}: {artifacts.EXPORTS} is damaged: {error!r}") from error
    for path in files:
        parts = PurePosixPath(path).parts
        if parts[:1] != (artifacts.FORMATS[name],) or ".." in parts:  # outside the target
            raise EdlError(f"{where}: {artifacts.EXPORTS} is damaged: it names {path}")
    return files


class Receiving:
    """A copy in progress, in a temporary place until it is complete.

    Args:
        target: the file or directory to create.
    """

    def __init__(self, target: Path):
        self._target = target
        self._aside = target.with_name(f".{target.name}.{os.getpid()}")
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
        place = self._aside.joinpath(*PurePosixPath(path).parts[1:])
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
            raise EdlError(f"{path}: what has arrived is not what was written (its SHA-256 is another one)")
        self._nbytes, self._files = self._nbytes + nbytes, self._files + 1

    def __enter__(self) -> Receiving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            os.replace(self._aside, self._target)
        elif self._aside.is_dir():
            shutil.rmtree(self._aside)
        else:
            self._aside.unlink(missing_ok=True)
