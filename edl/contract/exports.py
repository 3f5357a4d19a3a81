# SPDX-License-Identifier: Apache-2.0
"""`exports.json`: the files of each export of the trained model, with their sizes and digests.

The worker that saves the model writes the list. `edl audit` and `edl model get` read it, so it may come from
another machine and may have been changed: `parse` accepts only a list that `dumps` can have written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

# The memory of the process that loads an export again (trainer/export/verification.py), without the files of
# the libraries, 380 MiB: its worker maps the same ones.
VERIFIER_BYTES = 320 << 20  # with TensorFlow and Keras
VERIFIER_COPIES = 3  # of what is in a file, while it is loaded

_SHA256 = re.compile("[0-9a-f]{64}")


class Damaged(ValueError):
    """The text is not a list of exports; the message says what is wrong with it."""


@dataclass(frozen=True)
class File:
    """Size in bytes and digest (hexadecimal) of a file at its writing."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Export:
    """The model in one format.

    Args:
        path: the file or directory; relative to the list, or absolute where the model was kept elsewhere.
        verified: whether it was loaded again, and was equal to the model.
        files: by their paths, relative to the directory that holds `path`.
    """

    format: str
    path: str
    verified: bool
    files: dict[str, File]

    @property
    def places(self) -> dict[str, File]:
        """The files by their paths, relative to the list."""
        return {str(PurePosixPath(self.path).parent / name): file for name, file in self.files.items()}


def dumps(exports: Iterable[Export]) -> str:
    """The list as it is written."""
    listed = [
        {
            "format": export.format,
            "path": export.path,
            "verified": export.verified,
            "files": {n: {"bytes": f.nbytes, "sha256": f.sha256} for n, f in export.files.items()},
        }
        for export in exports
    ]
    return json.dumps({"exports": listed}, indent=1) + "\n"


def parse(data: bytes) -> dict[str, Export]:
    """Read the list: the exports by their formats.

    Raises:
        Damaged: it is not as `dumps` writes it, or a path leads out of the export.
    """
    try:
        entries = [_export(entry) for entry in json.loads(data)["exports"]]
    except Damaged:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    exports = {export.format: export for export in entries}
    if len(exports) != len(entries):
        raise Damaged("a format is listed twice")
    return exports


def _export(entry: dict[str, Any]) -> Export:
    format, path = str(entry["format"]), str(entry["path"])
    files = {name: _file(name, about) for name, about in entry["files"].items()}
    for name in files:
        parts = PurePosixPath(name).parts
        if parts[:1] != (PurePosixPath(path).name,) or ".." in parts:
            raise Damaged(f"it names {name}, which is not in {path}")
    return Export(format, path, bool(entry["verified"]), files)


def _file(name: str, about: dict[str, Any]) -> File:
    nbytes, sha256 = about["bytes"], about["sha256"]
    if type(nbytes) is not int or nbytes < 0:
        raise Damaged(f"{name}: the size is {nbytes!r}, expected a number of bytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise Damaged(f"{name}: the digest is {sha256!r}, expected 64 hexadecimal digits")
    return File(nbytes, sha256)
